"""Tables: results in units that people read, with what is only noise said to be noise.

The command prints them on stdout; everything else it says goes to stderr.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from keras_turbo.bench.compiling import Compiled
from keras_turbo.bench.isolate import Part
from keras_turbo.bench.measure import is_noise
from keras_turbo.bench.overhead import Overhead
from keras_turbo.bench.result import Result


def results_table(results: Sequence[Result]) -> Table:
    """Stock, turbo and hand-written torch, one workload per row."""
    table = _table(
        "Time per call, and turbo relative to the other two (below 1: turbo is faster)",
        "workload",
        "stock",
        "turbo",
        "hand-written",
        "turbo/stock",
        "turbo/hand",
        "noise",
        "max|a-b|",
        "graph breaks",
    )
    for r in results:
        table.add_row(
            r.workload,
            seconds(r.stock),
            seconds(r.turbo),
            seconds(r.hand),
            ratio(r.turbo_to_stock, r.noise),
            ratio(r.turbo_to_hand, r.noise),
            percent(r.noise),
            error(r.turbo_error),
            "-" if r.graph_breaks is None else str(r.graph_breaks),
            style="bold red" if r.problems else None,
        )
    return table


def isolate_table(parts: Sequence[Part]) -> Table:
    """Each rule family and each pass, alone and added up."""
    table = _table(
        "Relative to stock Keras: this alone, and this and all before",
        "workload",
        "part",
        "stock",
        "alone",
        "and all before",
        "alone/stock",
        "and all before/stock",
        "noise",
    )
    workload = ""
    for p in parts:
        table.add_row(
            p.workload if p.workload != workload else "",
            p.part,
            seconds(p.stock),
            seconds(p.alone),
            seconds(p.cumulated),
            ratio(p.alone_to_stock, p.noise),
            ratio(p.cumulated_to_stock, p.noise),
            percent(p.noise),
        )
        workload = p.workload
    return table


def overhead_table(overheads: Sequence[Overhead]) -> Table:
    """What turbo costs beside the torch operations."""
    table = _table(
        "What turbo itself costs: the hit path, and lowering",
        "workload",
        "model(x)",
        "program alone",
        "hit path",
        "noise",
        "lowering",
        "layers",
        "per layer",
    )
    for o in overheads:
        table.add_row(
            o.workload,
            seconds(o.call),
            seconds(o.program),
            seconds(o.hit_path),
            seconds(o.noise),
            seconds(o.lowering),
            str(o.layers),
            seconds(o.lowering / o.layers),
        )
    return table


def compiled_table(rows: Sequence[Compiled]) -> Table:
    """Compiled models: what compiling costs, what it gives, and when it is done again."""
    table = _table(
        "Both compiled: the first call, later calls, and graphs (turbo / hand-written)",
        "workload",
        "turbo compiles",
        "hand compiles",
        "turbo/hand",
        "turbo",
        "hand-written",
        "turbo/hand",
        "noise",
        "max|a-b|",
        "graph breaks",
        "recompiles",
    )
    for r in rows:
        table.add_row(
            r.workload,
            seconds(r.turbo_compile),
            seconds(r.hand_compile),
            f"{r.compile_ratio:.2f}",
            seconds(r.turbo),
            seconds(r.hand),
            ratio(r.turbo_to_hand, r.noise),
            percent(r.noise),
            error(r.error),
            f"{r.turbo_breaks} / {r.hand_breaks}",
            f"{r.turbo_recompiles} / {r.hand_recompiles}",
            style="bold red" if r.problems else None,
        )
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first, no_wrap=True)
    for column in columns:
        text = column == "part"
        table.add_column(column, justify="left" if text else "right", no_wrap=text)
    return table


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if value < 1000 * scale else f"{value:.0f} s"
    return f"{value / 1e-6:.3g} us"


def ratio(value: float, noise: float) -> str:
    """A ratio, marked where it could as well be 1."""
    text = f"{value:.2f}" if value >= 0.095 else f"{value:.3f}"
    return f"{text} (noise)" if is_noise(value, noise) else text


def percent(value: float) -> str:
    """A relative deviation."""
    return "-" if value == float("inf") else f"{100 * value:.1f}%"


def error(value: float) -> str:
    """A difference between two results."""
    if value == float("inf"):
        return "DIFFERENT"
    return "0" if value == 0 else f"{value:.1e}"
