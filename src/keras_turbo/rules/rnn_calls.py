"""The functions that programs of recurrent layers call, and which of the kernels they choose.

A program names one of these per recurrence; its result has Keras's axis order, batch and then
time. Outputs of a recurrence that runs backwards stand where their inputs do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import compat
from keras_turbo.rules.rnn_functions import Gru, Lstm, Simple
from keras_turbo.rules.rnn_kernels import (
    Maybe,
    Tensor,
    plain_gru,
    plain_lstm,
    plain_simple,
    run_gru,
    run_lstm,
    run_simple,
    time_major,
)


def lstm(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    h: Maybe,
    c: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """All outputs, the last state and the last memory; states of None are zeros."""
    args = time_major(x), kernel, recurrent, bias, h, c, mask, backwards
    outputs, last, memory = _choose(plain_lstm, run_lstm, Lstm)(*args)
    return outputs.transpose(0, 1), last, memory


def gru(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    recurrent_bias: Maybe,
    h: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    """All outputs and the last state of a gated recurrence that resets after its product."""
    args = time_major(x), kernel, recurrent, bias, recurrent_bias, h, mask, backwards
    outputs, last = _choose(plain_gru, run_gru, Gru)(*args)
    return outputs.transpose(0, 1), last


def simple(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    h: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    """All outputs and the last state of a recurrence with nothing but a tanh."""
    args = time_major(x), kernel, recurrent, bias, h, mask, backwards
    outputs, last = _choose(plain_simple, run_simple, Simple)(*args)
    return outputs.transpose(0, 1), last


def cudnn_lstm(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    h: Maybe,
    c: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`lstm` by cuDNN, in the call that stock Keras makes there."""
    x = x.flip(1) if backwards else x
    h, c = (_state(x, recurrent, item) for item in (h, c))
    weights = [kernel.t().contiguous(), recurrent.t().contiguous(), bias, torch.zeros_like(bias)]
    outputs, h, c = torch.lstm(
        x, (h, c), weights, True, 1, 0.0, torch.is_grad_enabled(), False, True
    )
    return outputs.flip(1) if backwards else outputs, h.squeeze(0), c.squeeze(0)


def cudnn_gru(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Tensor,
    recurrent_bias: Tensor,
    h: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    """`gru` by cuDNN, in the call that stock Keras makes there."""
    x = x.flip(1) if backwards else x
    pairs = kernel.t(), recurrent.t(), bias, recurrent_bias
    weights = [torch.cat([item.chunk(3)[i] for i in (1, 0, 2)]) for item in pairs]
    outputs, h = torch.gru(
        x,
        _state(x, recurrent, h),
        weights,
        True,
        1,
        0.0,
        torch.is_grad_enabled(),
        False,
        True,
    )
    return outputs.flip(1) if backwards else outputs, h.squeeze(0)


def _state(x: Tensor, recurrent: Tensor, state: Maybe) -> Tensor:
    state = x.new_zeros((x.shape[0], recurrent.shape[0])) if state is None else state
    return state.unsqueeze(0)


def _shape(states: int) -> Callable[..., Any]:
    """What a recurrence returns, for meta tensors."""

    def meta(x: Tensor, kernel: Tensor, recurrent: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        (batch, steps, features), units = x.shape, recurrent.shape[0]
        given = [state for state in rest[-2 - states : -2] if state is not None]
        if features != kernel.shape[0] or any(s.shape != (batch, units) for s in given):
            raise ValueError("inputs or states of another size than the kernels have")
        outputs = x.new_empty((steps, batch, units)).transpose(0, 1)
        return outputs, *(x.new_empty((batch, units)) for _ in range(states))

    return meta


for _function, _states in ((lstm, 2), (gru, 1), (simple, 1), (cudnn_lstm, 2), (cudnn_gru, 1)):
    _function.meta = _shape(_states)  # type: ignore[attr-defined]


def _choose(plain: Callable[..., Any], run: Callable[..., Any], fast: Any) -> Callable[..., Any]:
    """What to run: the plain loop for a compiler, else with or without a backward pass."""
    if torch.compiler.is_compiling() or compat.forward_mode_active():
        return plain
    return fast.apply if torch.is_grad_enabled() else run
