"""Plain tables: how explanations, verifications, reports and the doctor show their rows.

They end up in terminals, logs and notebooks, so that text is aligned with spaces alone and
the same for every width of terminal.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as lines of text, each column as wide as its widest entry.

    Example:

    >>> from keras_turbo.tables import text_table
    >>> print(text_table(("layer", "calls"), [("dense", 3)]))
    layer  calls
    -----  -----
    dense  3
    """
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    ruled = [list(header), ["-" * width for width in widths], *lines]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in ruled
    )


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same table as HTML, for notebooks.

    Example:

    >>> from keras_turbo.tables import html_table
    >>> html_table("one", ("a",), [("<b>",)])
    '<table><caption>one</caption><tr><th>a</th></tr><tr><td>&lt;b&gt;</td></tr></table>'
    """
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption><tr>{head}</tr>{body}</table>"
