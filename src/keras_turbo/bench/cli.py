"""The command `keras-turbo bench`: options in, tables, files and an exit code out.

Keras and torch are imported when the command runs, so that `--help` is quick and the
backend can still be chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from keras_turbo.bench.workloads import Workload

QUICK_ROUNDS = 10


@click.command(name="bench")
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--quick", is_flag=True, help="Only the small workloads, and few rounds.")
@click.option(
    "--rounds", type=click.IntRange(min=1), help="Samples of each; 30 unless --quick says 10."
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Torch threads."
)
@click.option("--isolate", is_flag=True, help="Time each rule family and each pass instead.")
@click.option("--overhead", is_flag=True, help="Time the hit path and lowering instead.")
@click.option("--no-breaks", is_flag=True, help="Do not count graph breaks.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw a PNG here.")
@click.option("--list", "list_only", is_flag=True, help="List the workloads and stop.")
def bench(
    workloads: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    threads: int,
    isolate: bool,
    overhead: bool,
    no_breaks: bool,
    json_path: Path | None,
    plot_path: Path | None,
    list_only: bool,
) -> None:
    """Time stock Keras, turbo and hand-written torch, side by side.

    Runs all WORKLOADs unless some are named. Fails if turbo computes something else than
    stock Keras: other token ids, or numbers further away than rounding.
    """
    if isolate and overhead:
        raise click.UsageError("Choose one of --isolate and --overhead.")
    if plot_path is not None:
        _check_plot(isolate or overhead)
    _import_keras()
    from keras_turbo.bench.workloads import WORKLOADS

    if list_only:
        for workload in WORKLOADS.values():
            click.echo(f"{workload.name:15} {workload.about}")
        return
    chosen = _choose(workloads, quick)
    import torch

    torch.set_num_threads(threads)
    count = rounds or (QUICK_ROUNDS if quick else 30)
    try:
        if isolate:
            problems = _isolate(chosen, count, json_path)
        elif overhead:
            problems = _overhead(chosen, count, json_path)
        else:
            problems = _compare(chosen, count, not no_breaks, json_path, plot_path)
    except RuntimeError as error:
        if not str(error).startswith("keras_turbo"):
            raise
        raise click.ClickException(str(error)) from error
    if problems:
        raise click.ClickException("; ".join(problems))


def _check_plot(other_table: bool) -> None:
    if other_table:
        raise click.UsageError("--plot draws the main table, not --isolate or --overhead.")
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise click.ClickException(
            "--plot needs matplotlib, which is not installed: pip install 'keras-turbo[bench]'"
        )


def _import_keras() -> None:
    """Import Keras on the torch backend, or say why that is impossible."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    if keras.config.backend() != "torch":
        raise click.ClickException(
            f"The Keras backend is '{keras.config.backend()}'; set KERAS_BACKEND=torch."
        )


def _choose(names: Sequence[str], quick: bool) -> list[Workload]:
    from keras_turbo.bench.workloads import WORKLOADS

    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise click.UsageError(
            f"No such workload: {', '.join(unknown)}. Choose from {', '.join(WORKLOADS)}."
        )
    if names:
        return [WORKLOADS[name] for name in dict.fromkeys(names)]
    return [workload for workload in WORKLOADS.values() if workload.quick or not quick]


def _compare(
    chosen: Sequence[Workload],
    rounds: int,
    breaks: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> list[str]:
    """The main table: every workload against stock Keras and hand-written torch."""
    from keras_turbo.bench import report, result
    from keras_turbo.bench.case import prepare

    results = _each(
        chosen, rounds, lambda w, tick: [result.run_case(prepare(w), rounds, breaks, tick)]
    )
    _show(report.results_table(results))
    for row in results:
        for note in row.notes:
            click.echo(f"{row.workload}: {note}")
    if json_path is not None:
        result.write(json_path, result.document(rounds, workloads=results))
    if plot_path is not None:
        from keras_turbo.bench.plot import plot

        plot(results, plot_path)
    return [f"{row.workload}: {problem}" for row in results for problem in row.problems]


def _isolate(chosen: Sequence[Workload], rounds: int, json_path: Path | None) -> list[str]:
    """The table of rule families and passes."""
    from keras_turbo.bench import isolate, report, result
    from keras_turbo.bench.case import prepare

    parts = _each(chosen, rounds, lambda w, tick: isolate.isolate(prepare(w), rounds, tick))
    _show(report.isolate_table(parts))
    if json_path is not None:
        result.write(json_path, result.document(rounds, isolate=parts))
    return []


def _overhead(chosen: Sequence[Workload], rounds: int, json_path: Path | None) -> list[str]:
    """The table of what turbo itself costs."""
    from keras_turbo.bench import overhead, report, result
    from keras_turbo.bench.case import prepare

    costs = _each(chosen, rounds, lambda w, tick: [overhead.overhead(prepare(w), rounds, tick)])
    _show(report.overhead_table(costs))
    if json_path is not None:
        result.write(json_path, result.document(rounds, overhead=costs))
    return []


def _each(
    chosen: Sequence[Workload],
    rounds: int,
    work: Callable[[Workload, Callable[[], None]], list[Any]],
) -> list[Any]:
    """Do the work for every workload, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    import keras_turbo

    columns = (
        TextColumn("{task.description:15}"),
        BarColumn(),
        TextColumn("round {task.fields[round]}"),
        TimeElapsedColumn(),
    )
    rows: list[Any] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen) * rounds, round=0)
        for i, workload in enumerate(chosen):
            done = 0

            def tick() -> None:
                nonlocal done
                done += 1
                # A part more than planned for, as --isolate has them, moves no further.
                completed = i * rounds + min(done, rounds)
                progress.update(task, completed=completed, round=done)

            progress.update(task, description=workload.name, round=0)
            rows += work(workload, tick)
            keras_turbo.disable()
    return rows


def _show(table: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        # A pipe or a file has no width to fit into.
        console = Console(width=160)
    console.print(table)
