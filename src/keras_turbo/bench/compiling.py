"""`--compile`: a compiled Keras model under turbo against a compiled hand-written one.

`cases` supplies two functions per workload that do the same work; here they meet the
compiler. Each is compiled with a cache of its own, so that neither finds the other's
kernels, called with other sizes of batches while Dynamo's counters are watched, and then
timed in turns with the other. Reports are made from the rows that `run_compiled` returns.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import keras_turbo
from keras_turbo.bench import measure
from keras_turbo.bench.case import distance
from keras_turbo.bench.compiling_cases import CASES, Pair

TOLERANCE = 1e-4
"""The largest max|a-b| / max(1, max|b|) between two compiled float32 models."""


@dataclass
class Compiled:
    """One row of the table.

    Attributes:
        workload: its name.
        turbo_compile, hand_compile: seconds of the first call.
        compile_ratio: the first relative to the second.
        turbo, hand: medians in seconds per later call.
        turbo_to_hand: median of paired ratios.
        noise: how far such a ratio is from 1 for one thing measured against itself.
        error: max|a-b| between the two.
        turbo_breaks, hand_breaks: graph breaks.
        turbo_recompiles, hand_recompiles: graphs captured beyond those of the first call, for
            two other sizes of batches and the first size again.
        problems: what makes the run fail.
    """

    workload: str
    turbo_compile: float
    hand_compile: float
    compile_ratio: float
    turbo: float
    hand: float
    turbo_to_hand: float
    noise: float
    error: float
    turbo_breaks: int
    hand_breaks: int
    turbo_recompiles: int
    hand_recompiles: int
    problems: list[str] = field(default_factory=list)


@dataclass
class _Contender:
    """One of the two, compiled: its function, and what became of compiling it."""

    call: Callable[[], Any]
    result: torch.Tensor
    seconds: float
    breaks: int
    recompiles: int


def run_compiled(
    name: str,
    rounds: int,
    tick: Callable[[], None] = measure.nothing,
    min_sample: float = measure.MIN_SAMPLE,
    backend: Any = "inductor",
) -> Compiled:
    """Compile and time both models of a workload.

    Args:
        name: a key of `compiling_cases.CASES`.
        rounds: how many samples to take of each.
        tick: called after each round.
        min_sample: seconds that a sample lasts at least.
        backend: what compiles for Dynamo.
    """
    try:
        pair = CASES[name](backend)
        with _quiet():
            hand = _compile(pair, pair.hand)
            turbo = _compile(pair, pair.turbo)
            times = measure.measure(
                [measure.Contender(turbo.call), measure.Contender(hand.call)],
                rounds,
                min_sample,
                tick,
            )
    finally:
        keras_turbo.disable()
    error = distance(turbo.result, hand.result)
    problems = [] if error <= TOLERANCE else [f"the compiled models differ by {error:.2g}"]
    return Compiled(
        name,
        turbo.seconds,
        hand.seconds,
        turbo.seconds / hand.seconds,
        statistics.median(times[0]),
        statistics.median(times[1]),
        measure.ratio(times[0], times[1]),
        max(map(measure.noise, times)),
        error,
        turbo.breaks,
        hand.breaks,
        turbo.recompiles,
        hand.recompiles,
        problems,
    )


def _compile(pair: Pair, make: Callable[[], Callable[..., Any]]) -> _Contender:
    """Compile one of a pair, and see what other sizes of batches do to it."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    function = make()
    with fresh_cache():
        if pair.backend == "inductor":
            # What the compiler loads once, and prepares once per cache, is no model's time.
            small = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU())
            torch.compile(small)(torch.ones(2, 3)).sum().backward()
        counters.clear()
        # What the other one and earlier workloads left behind is not this one's to collect.
        gc.collect()
        start = time.perf_counter()
        result = function(*pair.batch(1))
        seconds = time.perf_counter() - start
        graphs = counters["stats"]["unique_graphs"]
        for scale in (2, 3, 1):
            function(*pair.batch(scale))
    breaks = sum(counters["graph_break"].values())
    recompiles = counters["stats"]["unique_graphs"] - graphs
    batch = pair.batch(1)
    return _Contender(lambda: function(*batch), result, seconds, breaks, recompiles)


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which compilers keep their warnings to themselves, and end with no trace."""
    import torch._dynamo as dynamo

    dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dynamo.reset()


def run_all(names: Sequence[str], rounds: int, say: Callable[[str], None]) -> list[Compiled]:
    """One row for each workload; `say` hears which one is next."""
    rows = []
    for name in names:
        say(name)
        rows.append(run_compiled(name, rounds))
    return rows
