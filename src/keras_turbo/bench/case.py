"""One workload made real: three models with the same weights, and the proof that they agree.

The stock model is a model of its own, which turbo never sees: lowering re-strides weights
in place, and stock Keras must be timed on weights as stock Keras lays them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import torch

import keras_turbo
from keras_turbo.bench import models
from keras_turbo.bench.workloads import Workload

TOLERANCE = 1e-5
"""The largest max|a-b| / max(1, max|b|) of a float32 model that counts as equal."""


class UnavailableError(Exception):
    """Raised where turbo does not run, so that there is nothing to measure."""


@dataclass
class Case:
    """A workload that is ready to run.

    Attributes:
        workload: what it is.
        stock_model: the Keras model that only ever runs stock.
        turbo_model: a second Keras model with equal weights.
        reference: the hand-written torch model with equal weights.
        x: the input of the Keras models.
        reference_x: the same input for the hand-written model.
    """

    workload: Workload
    stock_model: Any
    turbo_model: Any
    reference: Any
    x: torch.Tensor
    reference_x: torch.Tensor

    def stock(self) -> torch.Tensor:
        return self.workload.run(self.stock_model, self.x)

    def turbo(self) -> torch.Tensor:
        return self.workload.run(self.turbo_model, self.x)

    def hand(self) -> torch.Tensor:
        return self.workload.run(self.reference, self.reference_x)


def prepare(workload: Workload, seed: int = 0) -> Case:
    """Build the three models of a workload and draw its input."""
    keras.utils.set_random_seed(seed)
    stock_model = workload.keras_model()
    models.randomise(stock_model, seed)
    turbo_model = twin(workload, stock_model)
    reference = workload.reference().eval()
    reference.copy_from(stock_model)
    x = workload.inputs(torch.Generator().manual_seed(seed))
    return Case(workload, stock_model, turbo_model, reference, x, workload.to_reference(x))


def twin(workload: Workload, model: Any) -> Any:
    """A second Keras model of a workload with the weights of the first."""
    other = workload.keras_model()
    for target, source in zip(other.variables, model.variables, strict=True):
        target.assign(source)
    return other


def turbo_on() -> None:
    """Switch turbo on for the measurement.

    Raises:
        UnavailableError: if it cannot be, for the reason that `enable` printed.
    """
    # The check against stock Keras is made here, once, and not at each lowering.
    keras_turbo.enable(check="off")
    if not keras_turbo.is_enabled():
        raise UnavailableError("keras_turbo cannot be enabled here; `keras-turbo doctor` says why.")


def errors(case: Case) -> tuple[float, float]:
    """How far turbo and the hand-written model are from stock Keras.

    Returns:
        max|a-b| / max(1, max|b|) of both; infinite for token ids that differ.
    """
    with torch.no_grad():
        keras_turbo.disable()
        expected = case.stock()
        hand = case.workload.to_keras(case.hand())
        turbo_on()
        turbo = case.turbo()
    return distance(turbo, expected), distance(hand, expected)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|a-b| / max(1, max|b|), infinite where shapes, dtypes or integers differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(got, want) else float("inf")
    largest = max(1.0, float(want.abs().max()))
    return float((got.double() - want.double()).abs().max()) / largest


def disagreements(turbo_error: float, hand_error: float) -> list[str]:
    """What is wrong with a case, in words; empty if all three models agree."""
    problems = []
    for who, error in (("turbo", turbo_error), ("the hand-written model", hand_error)):
        if error == float("inf"):
            problems.append(f"{who} gives other ids, shapes or dtypes than stock Keras")
        elif not error <= TOLERANCE:
            problems.append(f"{who} differs from stock Keras by {error:.2g}")
    return problems
