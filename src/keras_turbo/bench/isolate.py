"""`--isolate`: what each rule family and each pass is worth, alone and added up.

A configuration is a set of families and passes. A model is lowered under it once, at its
first call; its inline caches then hold exactly what the configuration gives, so that the
rest of the package needs no switch, and `measure` can time "stock", "this alone" and "this
and all before" in turns.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from keras_turbo import api, passes, registry, rules
from keras_turbo.bench import measure
from keras_turbo.bench.case import Case, turbo_on, twin


@dataclass(frozen=True)
class Part:
    """One row: a rule family or a pass, against stock Keras.

    Attributes:
        workload: the workload it was measured on.
        part: "family NAME" or "pass NAME".
        stock, alone, cumulated: medians in seconds per call.
        alone_to_stock, cumulated_to_stock: medians of paired ratios.
        noise: how far such a ratio is from 1 for one thing measured against itself.
    """

    workload: str
    part: str
    stock: float
    alone: float
    cumulated: float
    alone_to_stock: float
    cumulated_to_stock: float
    noise: float


@dataclass(frozen=True)
class Configuration:
    """The rule families and the passes that are in force."""

    families: frozenset[str]
    passes: tuple[str, ...]


def family_of(cls: type) -> str:
    """The rule family of a Keras class: the Keras folder that it comes from."""
    return next((part for part in cls.__module__.split(".") if part in rules.FAMILIES), "")


def families_of(model: Any) -> list[str]:
    """The families that a model has layers of, in the order in which they are added up."""
    present = {family_of(type(layer)) for layer in model._flatten_layers()}
    return [family for family in rules.FAMILIES if family in present]


@contextlib.contextmanager
def only(configuration: Configuration) -> Iterator[None]:
    """Lower under a configuration; what is lowered inside the block stays as it is.

    Args:
        configuration: classes of no family, such as a user's own, keep their rules.
    """
    table, usual, quiet = registry._rules, passes.PASSES, passes.WITHOUT_GRADIENTS
    everything = dict(table)
    wanted = configuration.families | {""}
    try:
        table.clear()
        table.update({c: r for c, r in everything.items() if family_of(c) in wanted})
        passes.PASSES = tuple(p for p in usual if p.__name__ in configuration.passes)
        passes.WITHOUT_GRADIENTS = tuple(p for p in quiet if p.__name__ in configuration.passes)
        yield
    finally:
        table.clear()
        table.update(everything)
        passes.PASSES, passes.WITHOUT_GRADIENTS = usual, quiet


def all_passes() -> list[str]:
    """The names of all passes, each once, in the order in which they run."""
    every = (*passes.PASSES, *passes.WITHOUT_GRADIENTS)
    return list(dict.fromkeys(rewrite.__name__ for rewrite in every))


def plan(model: Any) -> list[tuple[str, Configuration, Configuration]]:
    """For each part its name, the configuration of it alone, and of it and all before.

    A pass alone is measured with all families: without a program there is nothing to rewrite.
    """
    used = families_of(model)
    everything = frozenset(rules.FAMILIES)
    names = all_passes()
    parts = []
    for i, family in enumerate(used):
        before = frozenset(used[: i + 1])
        parts.append(
            (
                f"family {family}",
                Configuration(frozenset({family}), ()),
                Configuration(before, ()),
            )
        )
    for i, name in enumerate(names):
        parts.append(
            (
                f"pass {name}",
                Configuration(everything, (name,)),
                Configuration(everything, tuple(names[: i + 1])),
            )
        )
    return parts


def lowered(case: Case, configuration: Configuration) -> Any:
    """A new Keras model of a case, lowered under a configuration."""
    model = twin(case.workload, case.stock_model)
    with only(configuration), torch.no_grad():
        case.workload.run(model, case.x)
    return model


def isolate(case: Case, rounds: int, tick: Callable[[], None] = measure.nothing) -> list[Part]:
    """Time every part of a case.

    Stock Keras runs under `stock()` here, and not after `disable()`, which would throw the
    programs away; that adds about 1 us per layer to it.
    """
    turbo_on()
    parts = []
    run, x = case.workload.run, case.x

    def stock() -> None:
        with api.stock():
            run(case.stock_model, x)

    for name, alone, cumulated in plan(case.stock_model):
        first, second = lowered(case, alone), lowered(case, cumulated)
        contenders = [
            measure.Contender(stock),
            measure.Contender(lambda model=first: run(model, x)),
            measure.Contender(lambda model=second: run(model, x)),
        ]
        times = measure.measure(contenders, rounds, tick=tick)
        parts.append(
            Part(
                case.workload.name,
                name,
                statistics.median(times[0]),
                statistics.median(times[1]),
                statistics.median(times[2]),
                measure.ratio(times[1], times[0]),
                measure.ratio(times[2], times[0]),
                max(map(measure.noise, times)),
            )
        )
    return parts
