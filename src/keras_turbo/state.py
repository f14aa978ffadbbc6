"""Snapshots: everything that a call of a model may change, taken before and put back after.

`verify` runs a model twice from the same state, and leaves it as it was: variables, recorded
losses, plain attributes of the layers, and every random number generator in play. Lowering
alone writes no variable, but runs the code of layers without a rule on symbolic inputs.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from keras_turbo import compat

_PLAIN = (bool, int, float, str, type(None))


class Snapshot:
    """The state of a model and of the random number generators at one moment.

    Args:
        model: a layer or model.
        values: whether the values of its variables are part of it.

    Attributes:
        variables: all variables of the model, metrics and seeds included; none without
            `values`.
        values: their values, in the same order, as detached copies.
    """

    def __init__(self, model: Any, values: bool = True) -> None:
        found = [*model.variables, *model.metrics_variables] if values else []
        self.variables = list({id(variable): variable for variable in found}.values())
        self.values = [variable._value.detach().clone() for variable in self.variables]
        self._layers = [(layer, _plain(layer)) for layer in model._flatten_layers()]
        self._losses = [
            (layer, list(layer._losses), set(layer._loss_ids)) for layer, _ in self._layers
        ]
        self._random = _random_state()

    def current(self) -> list[torch.Tensor]:
        """The variables' values now; an unchanged one is the snapshot's own tensor."""
        return [
            old if _same(variable._value, old) else variable._value.detach().clone()
            for variable, old in zip(self.variables, self.values, strict=True)
        ]

    def restore(self) -> None:
        """Put everything back.

        What did not change is not written, so that a backward pass of the caller's that is
        still to come finds its saved tensors valid.
        """
        with torch.no_grad():
            for variable, old in zip(self.variables, self.values, strict=True):
                if not _same(variable._value, old):
                    variable._value.copy_(old)
        for layer, plain in self._layers:
            attributes = vars(layer)
            for name in _plain(layer).keys() - plain.keys():
                del attributes[name]
            attributes.update(plain)
        for layer, losses, ids in self._losses:
            layer._losses[:] = losses
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)
        _restore_random_state(self._random)


def _plain(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if type(value) in _PLAIN}


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN counting as equal to itself."""
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(((a == b) | (a.isnan() & b.isnan())).all())


def _random_state() -> tuple[Any, ...]:
    generator = compat.ambient().get(compat.GLOBAL_SEED_GENERATOR)
    return (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        generator,
        None if generator is None else generator.state._value.detach().clone(),
    )


def _restore_random_state(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda, generator, seed = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
    if generator is None:
        compat.ambient().pop(compat.GLOBAL_SEED_GENERATOR, None)
        return
    with torch.no_grad():
        generator.state._value.copy_(seed)
