"""Results: what was measured, on which machine, and the JSON file that keeps it.

`run_case` turns one case into one `Result`; `report` and `plot` show results, and
`document` makes the file of `--json`.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keras
import torch

import keras_turbo
from keras_turbo.bench import measure
from keras_turbo.bench.breaks import graph_breaks
from keras_turbo.bench.case import Case, disagreements, errors, turbo_on

SCHEMA = 1


@dataclass
class Result:
    """One row of the table.

    Attributes:
        workload: its name.
        stock, turbo, hand: medians in seconds per call.
        turbo_to_stock, turbo_to_hand: medians of paired ratios.
        noise: how far such a ratio is from 1 for one thing measured against itself.
        turbo_error, hand_error: max|a-b| against stock Keras.
        graph_breaks: None if Dynamo failed or was not asked.
        notes: what else there is to say.
        problems: what makes the run fail.
    """

    workload: str
    stock: float
    turbo: float
    hand: float
    turbo_to_stock: float
    turbo_to_hand: float
    noise: float
    turbo_error: float
    hand_error: float
    graph_breaks: int | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run_case(
    case: Case,
    rounds: int,
    breaks: bool = True,
    tick: Callable[[], None] = measure.nothing,
    min_sample: float = measure.MIN_SAMPLE,
) -> Result:
    """Check that the three models of a case agree, and time them in turns.

    Stock Keras is timed after `disable()`, which leaves nothing of ours in the way; turbo is
    switched on again, lowered and warmed up outside the time measured.
    """
    keras_turbo.disable()
    turbo_error, hand_error = errors(case)
    notes = _stock_layers(case)
    contenders = [
        measure.Contender(case.stock, keras_turbo.disable),
        measure.Contender(case.turbo, turbo_on),
        measure.Contender(case.hand),
    ]
    stock, turbo, hand = measure.measure(contenders, rounds, min_sample, tick)
    count = None
    if breaks:
        count, why = graph_breaks(case.turbo_model, case.x)
        if why:
            notes.append(f"graph break: {why}" if count else f"Dynamo failed: {why}")
    keras_turbo.disable()
    return Result(
        case.workload.name,
        statistics.median(stock),
        statistics.median(turbo),
        statistics.median(hand),
        measure.ratio(turbo, stock),
        measure.ratio(turbo, hand),
        measure.noise(hand),
        turbo_error,
        hand_error,
        count,
        notes,
        disagreements(turbo_error, hand_error),
    )


def _stock_layers(case: Case) -> list[str]:
    """Which layers of the turbo model ran stock Keras, if any did."""
    cache = getattr(case.turbo_model, "_keras_turbo", None)
    if cache is None or not cache.programs:
        why = f": {cache.declined}" if cache is not None and cache.declined else ""
        return [f"the model has no program of its own{why}"]
    rows = [row for program in cache.programs for row in program.rows if not row.lowered]
    return [f"{row.path} ({row.layer}) ran stock Keras: {row.reason}" for row in rows[:3]]


def machine() -> dict[str, Any]:
    """What the numbers depend on; nothing that names the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "keras": keras.__version__,
        "keras_turbo": keras_turbo.__version__,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def load() -> float | None:
    """How many processes wanted a core during the last minute, where the system says so."""
    try:
        return round(os.getloadavg()[0], 1)
    except (OSError, AttributeError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def document(machine: dict[str, Any], rounds: int, **sections: Sequence[Any]) -> dict[str, Any]:
    """Everything that was measured, as plain data; infinities become null."""
    rows = {name: [_plain(asdict(row)) for row in rows] for name, rows in sections.items() if rows}
    return {"schema": SCHEMA, "machine": machine, "rounds": rounds, **rows}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    infinite = float("inf")
    return {key: None if value == infinite else value for key, value in row.items()}


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a document as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
