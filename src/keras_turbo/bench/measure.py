"""Timing: the same calls in turns, in one process, and medians of paired ratios.

A round times every contender once, in a fixed order (A B C, A B C, ...), so that a slow
moment of the machine falls on all of them alike; ratios are taken within a round. Reports
are made from the lists of seconds per call that `measure` returns.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

MIN_SAMPLE = 0.002
"""Seconds that one sample lasts at least; shorter calls are repeated within the sample."""


def nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Contender:
    """One thing to time.

    Attributes:
        call: the work.
        before: called before each sample, outside the time that is measured; the contender
            is warmed up after it.
    """

    call: Callable[[], object]
    before: Callable[[], None] = nothing


def measure(
    contenders: Sequence[Contender],
    rounds: int,
    min_sample: float = MIN_SAMPLE,
    tick: Callable[[], None] = nothing,
) -> list[list[float]]:
    """Time contenders in turns, under no-grad.

    Args:
        contenders: what to time, in the order of a round.
        rounds: how many samples to take of each.
        min_sample: seconds that a sample lasts at least.
        tick: called after each round.

    Returns:
        For each contender its samples, in seconds per call.
    """
    samples: list[list[float]] = [[] for _ in contenders]
    with torch.no_grad():
        repeats = [_repeats(contender, min_sample) for contender in contenders]
        gc.collect()
        # What exists by now stays; the collections between samples need not look at it.
        gc.freeze()
        try:
            for _ in range(rounds):
                for contender, count, times in zip(contenders, repeats, samples, strict=True):
                    contender.before()
                    _sample(contender.call, count)
                    gc.collect()
                    times.append(_sample(contender.call, count))
                tick()
        finally:
            gc.unfreeze()
    return samples


def _repeats(contender: Contender, min_sample: float) -> int:
    """How often to call within one sample; this is the first warm-up, too."""
    contender.before()
    for _ in range(3):
        contender.call()
    return max(1, math.ceil(min_sample / min(_sample(contender.call, 1) for _ in range(3))))


def _sample(call: Callable[[], object], count: int) -> float:
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count
    finally:
        gc.enable()


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median over the rounds of `a` relative to `b` in the same round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def difference(a: Sequence[float], b: Sequence[float]) -> float:
    """The median over the rounds of `a` minus `b` in the same round."""
    return statistics.median(x - y for x, y in zip(a, b, strict=True))


def noise(samples: Sequence[float]) -> float:
    """How far a ratio can be from 1 when one thing is measured against itself.

    Every sample is paired with the next of the same contender, a whole round later. The
    noise is the far end of the 95% interval of the median of these ratios, from its order
    statistics, so that it is large where few rounds were run.

    Returns:
        The noise as a relative deviation: 0.1 means that a ratio from 1/1.1 to 1.1 says
        nothing. Infinite if there are no two samples.
    """
    ratios = sorted(math.log(b / a) for a, b in itertools.pairwise(samples))
    if not ratios:
        return float("inf")
    lowest = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    return math.expm1(max(abs(ratios[lowest]), abs(ratios[-1 - lowest])))


def is_noise(ratio: float, noise: float) -> bool:
    """Whether a ratio is no further from 1 than one thing measured against itself."""
    return abs(math.log(ratio)) <= math.log1p(noise)
