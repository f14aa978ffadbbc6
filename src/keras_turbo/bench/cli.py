"""The command `keras-turbo bench`: options in, tables, files and an exit code out.

Keras and torch are imported when the command runs, so that `--help` is quick and the
backend can still be chosen.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from keras_turbo.bench.case import Case
    from keras_turbo.bench.workloads import Workload

ROUNDS, QUICK_ROUNDS = 30, 10


@click.command(name="bench")
@click.argument("workloads", nargs=-1, metavar="[WORKLOAD]...")
@click.option("--quick", is_flag=True, help="Only the small workloads, and few rounds.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help=f"Samples of each: {ROUNDS}, or {QUICK_ROUNDS} if --quick.",
)
@click.option(
    "--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Torch threads."
)
@click.option("--isolate", is_flag=True, help="Time each rule family and each pass instead.")
@click.option("--overhead", is_flag=True, help="Time the hit path and lowering instead.")
@click.option(
    "--compile", "compiling", is_flag=True, help="Time compiled models and compiling instead."
)
@click.option("--no-breaks", is_flag=True, help="Do not count graph breaks.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write results here.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw a PNG here.")
@click.option("--list", "list_only", is_flag=True, help="List the workloads and stop.")
def bench(**options: Any) -> None:
    """Time stock Keras, turbo and hand-written torch, side by side.

    Runs all WORKLOADs unless some are named. Fails if turbo computes something else than
    stock Keras: other token ids, or numbers further away than rounding.
    """
    _bench(Options(**options))


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    workloads: tuple[str, ...]
    quick: bool
    rounds: int | None
    threads: int
    isolate: bool
    overhead: bool
    compiling: bool
    no_breaks: bool
    json_path: Path | None
    plot_path: Path | None
    list_only: bool

    @property
    def count(self) -> int:
        """How many rounds to run."""
        return self.rounds or (QUICK_ROUNDS if self.quick else ROUNDS)


@dataclass(frozen=True)
class Run:
    """One run of the command: the options, the workloads, and the machine at its start."""

    options: Options
    workloads: list[Workload]
    machine: dict[str, Any]


def _bench(options: Options) -> None:
    if options.isolate + options.overhead + options.compiling > 1:
        raise click.UsageError("Choose one of --isolate, --overhead and --compile.")
    if options.plot_path is not None:
        _check_plot(options)
    _import_keras()
    from keras_turbo.bench.workloads import WORKLOADS

    if options.list_only:
        for workload in WORKLOADS.values():
            click.echo(f"{workload.name:15} {workload.about}")
        return
    # Compiled workloads have names of their own, and are built where they are measured.
    chosen = [] if options.compiling else _choose(options)
    import torch

    from keras_turbo.bench.result import machine

    torch.set_num_threads(options.threads)
    # Described before anything runs: afterwards the load would be our own.
    run = Run(options, chosen, machine())
    _warn_if_busy(run)
    if options.compiling:
        problems = _compiled(run)
    else:
        work = _isolate if options.isolate else _overhead if options.overhead else _compare
        problems = work(run)
    if problems:
        raise click.ClickException("; ".join(problems))


def _check_plot(options: Options) -> None:
    """Refuse `--plot` before anything is measured in vain."""
    if options.isolate or options.overhead or options.compiling:
        raise click.UsageError("--plot draws the main table, and no other.")
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


def _warn_if_busy(run: Run) -> None:
    """Say so if other programs use the processor: two threads then wait for each other."""
    load, cores = run.machine["load"], run.machine["cores"]
    if load is not None and load > cores / 2:
        text = f"The machine is busy (load {load:.1f} on {cores} cores): do not trust the times."
        click.echo(text, err=True)


def _choose(options: Options) -> list[Workload]:
    from keras_turbo.bench.workloads import WORKLOADS

    names = options.workloads
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        raise click.UsageError(
            f"No such workload: {', '.join(unknown)}. Choose from {', '.join(WORKLOADS)}."
        )
    if names:
        return [WORKLOADS[name] for name in dict.fromkeys(names)]
    return [w for w in WORKLOADS.values() if w.quick or not options.quick]


def _compare(run: Run) -> list[str]:
    """The main table: every workload against stock Keras and hand-written torch."""
    from keras_turbo.bench import report, result

    results = _each(
        run,
        lambda case, tick: [
            result.run_case(case, run.options.count, not run.options.no_breaks, tick)
        ],
    )
    _show(report.results_table(results))
    for row in results:
        for note in row.notes:
            click.echo(f"{row.workload}: {note}")
    _write(run, workloads=results)
    if run.options.plot_path is not None:
        from keras_turbo.bench.plot import plot

        plot(results, run.options.plot_path)
    return [f"{row.workload}: {problem}" for row in results for problem in row.problems]


def _isolate(run: Run) -> list[str]:
    """The table of rule families and passes."""
    from keras_turbo.bench import isolate, report

    parts = _each(run, lambda case, tick: isolate.isolate(case, run.options.count, tick))
    _show(report.isolate_table(parts))
    _write(run, isolate=parts)
    return []


def _overhead(run: Run) -> list[str]:
    """The table of what turbo itself costs."""
    from keras_turbo.bench import overhead, report

    costs = _each(run, lambda case, tick: [overhead.overhead(case, run.options.count, tick)])
    _show(report.overhead_table(costs))
    _write(run, overhead=costs)
    return []


def _compiled(run: Run) -> list[str]:
    """The table of compiled models."""
    from keras_turbo.bench import compiling, report
    from keras_turbo.bench.case import UnavailableError

    names = run.options.workloads or tuple(compiling.CASES)
    unknown = [name for name in names if name not in compiling.CASES]
    if unknown:
        raise click.UsageError(
            f"No such compiled workload: {', '.join(unknown)}. "
            f"Choose from {', '.join(compiling.CASES)}."
        )
    try:
        rows = compiling.run_all(names, run.options.count, lambda name: click.echo(name, err=True))
    except UnavailableError as error:
        raise click.ClickException(str(error)) from error
    _show(report.compiled_table(rows))
    _write(run, compiled=rows)
    return [f"{row.workload}: {problem}" for row in rows for problem in row.problems]


def _write(run: Run, **sections: Sequence[Any]) -> None:
    from keras_turbo.bench import result

    path = run.options.json_path
    if path is not None:
        result.write(path, result.document(run.machine, run.options.count, **sections))


def _each(
    run: Run,
    work: Callable[[Case, Callable[[], None]], list[Any]],
) -> list[Any]:
    """Do the work for every workload, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    import keras_turbo
    from keras_turbo.bench.case import UnavailableError, prepare

    columns = (
        TextColumn("{task.description:15}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} rounds"),
        TimeElapsedColumn(),
    )
    rows: list[Any] = []
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for workload in run.workloads:
            case = prepare(workload)
            rounds = run.options.count * (_isolate_steps(case) if run.options.isolate else 1)
            task = progress.add_task(workload.name, total=rounds)
            try:
                rows += work(case, lambda task=task: progress.advance(task))
            except UnavailableError as error:
                raise click.ClickException(str(error)) from error
            finally:
                keras_turbo.disable()
    return rows


def _isolate_steps(case: Case) -> int:
    """How many parts `--isolate` times for a case."""
    from keras_turbo.bench.isolate import plan

    return len(plan(case.stock_model))


def _show(table: Any) -> None:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        # A pipe or a file has no width to fit into.
        console = Console(width=160)
    console.print(table)
