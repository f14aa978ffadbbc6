"""Rules for `keras.layers` recurrent cells, and the dropout masks of a whole sequence.

A cell's `call` is Keras's own code, traced. The masks that Keras caches on a cell for the
length of one sequence are drawn by `draw_masks` in the same order and with the same seeds,
and given to the cell while its step is traced; nothing is written on the cell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from keras import layers

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule
from keras_turbo.rules.regularization import dropout

_given: dict[int, Masks] = {}
"""The masks of the cells whose step is being traced; lowering holds the barrier's lock."""


class Masks:
    """The dropout masks of one cell for one sequence: of its inputs and of its state.

    Each is one tensor, a list with one per gate, or None without dropout.
    """

    def __init__(self, inputs: Any, state: Any) -> None:
        self.inputs = inputs
        self.state = state


class _WithMasks:
    """A stand-in of a cell that has its dropout masks already."""

    def __init__(self, view: Any, masks: Masks) -> None:
        self._view, self._masks = view, masks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def get_dropout_mask(self, _: Any) -> Any:
        return self._masks.inputs

    def get_recurrent_dropout_mask(self, _: Any) -> Any:
        return self._masks.state


@rule(layers.LSTMCell, layers.GRUCell, layers.SimpleRNNCell, compat.ConvLSTMCell)
def cell(ctx: Any, layer: Any, inputs: Any, states: Any, training: Any = False) -> Any:
    """One step of a cell, with the masks of the sequence it is part of."""
    masks = _given.get(id(layer))
    if masks is None:
        if ctx.read(layer, "dropout") > 0 or ctx.read(layer, "recurrent_dropout") > 0:
            raise Decline(Reason.SIDE_EFFECT, "a cell alone keeps its dropout masks")
        masks = Masks(None, None)
    stand_in = _WithMasks(ctx.view(layer), masks)
    return ctx.trace(type(layer).call, stand_in, inputs, states, training=training)


@rule(layers.StackedRNNCells)
def stacked_cells(
    ctx: Any, layer: Any, inputs: Any, states: Any, training: Any = False, **kwargs: Any
) -> Any:
    """One step through all cells, one after the other."""
    if kwargs:
        raise Decline(Reason.STRUCTURE, f"call arguments {sorted(kwargs)}")
    after = []
    for inner, state in zip(ctx.read(layer, "cells"), states, strict=False):
        is_list = compat.tree.is_nested(state)
        given = {"training": training} if _takes_training(inner) else {}
        inputs, new = ctx.call(inner, inputs, list(state) if is_list else [state], **given)
        after.append(new[0] if len(new) == 1 and not is_list else new)
    return inputs, after[0] if len(after) == 1 else after


def _takes_training(layer: Any) -> bool:
    return isinstance(layer, compat.Layer) and layer._call_has_training_arg


def step_of(ctx: Any, layer: Any, training: Any) -> Any:
    """One step of a cell as a function of its inputs and its states."""
    if not isinstance(layer, compat.Layer):
        raise Decline(Reason.NO_RULE, f"the cell is a {type(layer).__name__}, not a layer")
    given = {"training": training} if _takes_training(layer) else {}

    def step(inputs: Any, states: Any) -> Any:
        output, after = ctx.call(layer, inputs, states, **given)
        return output, list(after) if compat.tree.is_nested(after) else [after]

    return step


@contextlib.contextmanager
def with_masks(masks: dict[int, Masks]) -> Iterator[None]:
    """Give cells their masks while a step of theirs is traced."""
    outer = dict(_given)
    _given.update(masks)
    try:
        yield
    finally:
        _given.clear()
        _given.update(outer)


def draw_masks(ctx: Any, layer: Any, inputs: Any, states: Any) -> dict[int, Masks]:
    """Draw the masks that a sequence needs, in training and out of it, as stock Keras does.

    Args:
        ctx: the lowering context.
        layer: the cell.
        inputs: the inputs of one step.
        states: the cell's initial states.

    Returns:
        The masks by the id of their cell.
    """
    state = states[0] if isinstance(states, (list, tuple)) else states
    found = {}
    if isinstance(layer, compat.DropoutRNNCell):
        found[id(layer)] = Masks(
            _draw(ctx, layer, inputs, "dropout", "_dropout_mask"),
            _draw(ctx, layer, state, "recurrent_dropout", "_recurrent_dropout_mask"),
        )
    if isinstance(layer, layers.StackedRNNCells):
        for inner, inner_states in zip(ctx.read(layer, "cells"), states, strict=False):
            found.update(draw_masks(ctx, inner, inputs, inner_states))
            size = _output_size(ctx, inner)
            dtype = compat.to_torch_dtype(inner.compute_dtype)
            inputs = inputs.new_empty((inputs.shape[0], size), dtype=dtype)
    return found


def _output_size(ctx: Any, layer: Any) -> Any:
    size = getattr(ctx.view(layer), "output_size", None)
    if not isinstance(size, int):
        raise Decline(Reason.STRUCTURE, "a cell that does not say its output size")
    return size


def _draw(ctx: Any, layer: Any, like: Any, name: str, kept: str) -> Any:
    rate = ctx.read(layer, name)
    if getattr(layer, kept, None) is not None:
        raise Decline(Reason.SIDE_EFFECT, "a cell that kept dropout masks of an earlier call")
    if not rate > 0:
        return None
    generator = ctx.read(layer, "seed_generator")
    ctx.depend(layer, "dropout_mask_count")
    count = getattr(layer, "dropout_mask_count", None)
    ones = torch.ones_like(like)

    def one() -> Any:
        mask = dropout(ctx, ones, rate, None, generator)
        # Stock Keras draws numbers that nobody uses, too; later ones follow from them.
        if mask.node.target is torch.dropout:
            mask.node.meta["effect"] = True
        return mask

    return one() if count is None else [one() for _ in range(count)]
