"""What turbo itself costs: the hit path around a program, and lowering.

The hit path is `model(x)` minus the program called by hand, paired as all measurements
are; the lowering time is that of a whole model, divided by its layers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from keras_turbo.bench import measure
from keras_turbo.bench.case import Case, UnavailableError, turbo_on


@dataclass(frozen=True)
class Overhead:
    """What turbo costs beside the torch operations.

    Attributes:
        workload: the workload it was measured on.
        call: seconds of `model(x)`.
        program: seconds of the program alone.
        hit_path: the median of their paired differences, in seconds.
        noise: the median difference of the program from itself, one round later.
        lowering: seconds to lower the model, once everything is imported.
        layers: how many layers were lowered.
    """

    workload: str
    call: float
    program: float
    hit_path: float
    noise: float
    lowering: float
    layers: int


def overhead(case: Case, rounds: int, tick: Callable[[], None] = measure.nothing) -> Overhead:
    """Measure the hit path and the lowering of a case.

    Raises:
        UnavailableError: if the model runs no program.
    """
    from keras_turbo.program import build

    turbo_on()
    model, x = case.turbo_model, case.x
    model(x)
    programs = model._keras_turbo.programs if model._keras_turbo else ()
    if not programs:
        raise UnavailableError(f"{case.workload.name}: the model was not lowered")
    program = programs[0]
    run = program.run_without_gradients
    contenders = [measure.Contender(lambda: model(x)), measure.Contender(lambda: run(x))]
    called, ran = measure.measure(contenders, rounds, tick=tick)
    changes = [abs(a - b) for a, b in itertools.pairwise(ran)]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        build(model, program.kind)
        times.append(time.perf_counter() - start)
    return Overhead(
        case.workload.name,
        statistics.median(called),
        statistics.median(ran),
        measure.difference(called, ran),
        statistics.median(changes) if changes else float("inf"),
        statistics.median(times),
        len(program.rows),
    )
