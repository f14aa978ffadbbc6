"""The recurrences with their gradients, as autograd functions.

Forward and backward pass are one operation each to whoever records what reaches a kernel:
such a recording then holds for long sequences, too. Gradients of gradients go through the
plain loops, which are differentiable by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from keras_turbo import compat
from keras_turbo.rules import rnn_gradients, rnn_kernels
from keras_turbo.rules.rnn_kernels import Maybe, Tensor

_RUN: dict[str, Callable[..., Any]] = {
    "lstm": rnn_kernels.run_lstm,
    "gru": rnn_kernels.run_gru,
    "simple": rnn_kernels.run_simple,
}
_GRADIENTS: dict[str, Callable[..., Any]] = {
    "lstm": rnn_gradients.lstm_gradients,
    "gru": rnn_gradients.gru_gradients,
    "simple": rnn_gradients.simple_gradients,
}


def forward(kind: str, tensors: Sequence[Maybe], backwards: bool) -> list[Tensor]:
    """A recurrence whose backward pass is to come; the results, and what that pass needs."""
    return list(_RUN[kind](*tensors, backwards, True))


def backward(
    kind: str,
    tensors: Sequence[Maybe],
    results: Sequence[Tensor],
    grads: Sequence[Maybe],
    backwards: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those tensors that need one."""
    found = _GRADIENTS[kind](tensors, backwards, results, grads)
    return [grad for grad, need in zip(found, needs, strict=True) if need]


_library = torch.library.Library("keras_turbo", "FRAGMENT")
_library.define("recurrence(str kind, Tensor?[] tensors, bool backwards) -> Tensor[]")
_library.define(
    "recurrence_backward(str kind, Tensor?[] tensors, Tensor[] results, Tensor?[] grads, "
    "bool backwards, bool[] needs) -> Tensor[]"
)
_library.impl("recurrence", forward, "CompositeExplicitAutograd")
_library.impl("recurrence_backward", backward, "CompositeExplicitAutograd")


class Recurrence(torch.autograd.Function):
    """What the recurrences have in common: tensors and a direction in, several tensors out."""

    kind: ClassVar[str]
    states: ClassVar[int]
    plain: ClassVar[Callable[..., Any]]

    @classmethod
    def start(cls, ctx: Any, *args: Any) -> Any:
        """The forward pass; everything but the direction is kept."""
        *tensors, ctx.backwards = args
        recorded = compat.recording()
        run = torch.ops.keras_turbo.recurrence if recorded else forward
        results = run(cls.kind, tensors, ctx.backwards)
        ctx.set_materialize_grads(False)
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *results)
        return tuple(results[: 1 + cls.states])

    @classmethod
    def finish(cls, ctx: Any, *grads: Any) -> Any:
        """The backward pass, by the plain loop where it is to be differentiated in turn."""
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad[: ctx.count]
        tensors, results = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled():
            found = cls._differentiable(tensors, needs, grads, ctx.backwards)
        else:
            recorded = compat.recording()
            run = torch.ops.keras_turbo.recurrence_backward if recorded else backward
            found = run(cls.kind, tensors, results, list(grads), ctx.backwards, list(needs))
        given = iter(found)
        return (*(next(given) if need else None for need in needs), None)

    @classmethod
    def _differentiable(cls, tensors: Any, needs: Any, grads: Any, backwards: bool) -> Any:
        # Aliases: one input may depend on another one in the graph outside.
        inputs = [t.view_as(t) if need else t for t, need in zip(tensors, needs, strict=True)]
        wanted = [t for t, need in zip(inputs, needs, strict=True) if need]
        results = cls.plain(*inputs, backwards)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None]
        outs, given = [r for r, _ in pairs], [g for _, g in pairs]
        return torch.autograd.grad(outs, wanted, given, create_graph=True, allow_unused=True)


class Lstm(Recurrence):
    """A long short-term memory."""

    kind, states = "lstm", 2
    plain = staticmethod(rnn_kernels.plain_lstm)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return Lstm.start(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Lstm.finish(ctx, *grads)


class Gru(Recurrence):
    """A gated recurrence that resets after its product."""

    kind, states = "gru", 1
    plain = staticmethod(rnn_kernels.plain_gru)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return Gru.start(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Gru.finish(ctx, *grads)


class Simple(Recurrence):
    """A recurrence with nothing but a tanh."""

    kind, states = "simple", 1
    plain = staticmethod(rnn_kernels.plain_simple)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return Simple.start(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return Simple.finish(ctx, *grads)
