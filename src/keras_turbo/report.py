"""The report: what was lowered and what ran stock Keras while a script ran.

Dispatch keeps a journal of the rows of every program from the moment the report is asked
for, so that models which are gone by the end are reported too; fallbacks are counted anyway.
"""

from __future__ import annotations

import atexit
import sys

from keras_turbo import tables


def at_exit() -> None:
    """Print the report on stderr when the interpreter exits.

    Exit functions run in reverse order: this one is registered before any of the script's
    and so comes after them.
    """
    atexit.register(_print)


def start() -> None:
    """Start the journal; called once Keras is imported and the package is enabled."""
    from keras_turbo import dispatch

    dispatch.journal = {}


def text() -> str:
    """The report so far."""
    dispatch = sys.modules.get("keras_turbo.dispatch")
    if dispatch is None or dispatch.journal is None:
        return "keras_turbo report: Keras ran without keras_turbo"
    from keras_turbo.explain import HEADER, cells
    from keras_turbo.fallback import QUIET, fallbacks

    rows = sorted(dispatch.journal, key=lambda row: row.lowered)
    lowered = sum(row.lowered for row in rows)
    parts = [f"keras_turbo report: {lowered} layers lowered, {len(rows) - lowered} stock inside"]
    if rows:
        parts.append(tables.text_table(HEADER, cells(rows)))
    quiet = {reason.name for reason in QUIET}
    counts = [
        (path, reason, count)
        for (path, reason), count in fallbacks().items()
        if reason.split(":")[0] not in quiet
    ]
    if counts:
        parts.append("calls that ran stock Keras:")
        parts.append(tables.text_table(("path", "reason", "calls"), counts))
    else:
        parts.append("no call ran stock Keras")
    return "\n".join(parts)


def _print() -> None:
    print(text(), file=sys.stderr)
