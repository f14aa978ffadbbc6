"""The gradients of the recurrences of `rnn_kernels`.

A backward pass has all states before it, so that it computes the gates of all steps at once
and goes back through time with what depends on the step after it and nothing else: a product
and a few multiplications by factors that are ready. The weights' gradients are one product
each. What oneDNN ran forwards, it runs backwards too.
"""

from __future__ import annotations

from typing import Any

import torch

from keras_turbo.rules import rnn_kernels as kernels
from keras_turbo.rules.rnn_kernels import Maybe, Tensor, order_of, step_mask


def lstm_gradients(tensors: Any, backwards: bool, results: Any, grads: Any) -> tuple[Any, ...]:
    """The gradients of all tensors that `lstm` takes."""
    outputs = results[0]
    x, kernel, recurrent, bias, h, c, mask = tensors
    if len(results) > 3:
        return kernels.one_kernel_gradients(tensors, backwards, results, grads)
    d_outputs, d_h, d_c = grads
    units = recurrent.shape[0]
    masks = None if mask is None else step_mask(mask)
    before = _before(outputs, h, backwards)
    gates = kernels.lstm_gates(x, kernel, bias, masks)
    gates.flatten(0, 1).addmm_(before.flatten(0, 1), recurrent)
    s, g = torch.sigmoid(gates), torch.tanh(gates[..., 2 * units : 3 * units])
    i, f, _, o = s.chunk(4, -1)
    memories = _memories(i * g, f, c, backwards)
    shown = torch.tanh(memories)
    # The share of each gate in its gradient, which the loop multiplies by the rest.
    deltas = torch.sub(s, s * s, out=gates)
    d_i, d_f, d_g, d_o = deltas.chunk(4, -1)
    d_i.mul_(g)
    d_f.mul_(_before(memories, c, backwards))
    torch.mul(i, 1 - g * g, out=d_g)
    d_o.mul_(shown)
    through = o * (1 - shown * shown)
    skips = None
    if masks is not None:
        through.masked_fill_(~masks, 0.0)
        d_o.masked_fill_(~masks, 0.0)
        skips = (~masks).to(x.dtype).unbind(0)
    of_memory = deltas.unflatten(-1, (4, units))[:, :, :3].unbind(0)
    of_output, flat, fs, through_t = d_o.unbind(0), deltas.unbind(0), f.unbind(0), through
    through_t = through.unbind(0)
    back = recurrent.t()
    above = _Above(d_outputs, d_h, outputs)
    dc = torch.zeros_like(memories[0]) if d_c is None else d_c.clone()
    order = order_of(len(flat), not backwards)
    dh = above.first(order[0])
    for t, following in zip(order, [*order[1:], None], strict=True):
        dc.addcmul_(dh, through_t[t])
        of_memory[t].mul_(dc.unsqueeze(1))
        of_output[t].mul_(dh)
        dc.mul_(fs[t])
        dh = above.next(following, dh, None if skips is None else skips[t], flat[t], back)
    return *_of_weights(x, kernel, before, deltas, bias), dh, dc, None


def gru_gradients(tensors: Any, backwards: bool, results: Any, grads: Any) -> tuple[Any, ...]:
    """The gradients of all tensors that `gru` takes."""
    outputs = results[0]
    x, kernel, recurrent, bias, recurrent_bias, h, mask = tensors
    d_outputs, d_h = grads
    units = recurrent.shape[0]
    before = _before(outputs, h, backwards)
    gates = kernels.gru_gates(x, kernel, bias, None if mask is None else step_mask(mask))
    inner = kernels.project(before, recurrent, recurrent_bias)
    inner_h = inner[..., 2 * units :]
    z_r = torch.sigmoid(gates[..., : 2 * units] + inner[..., : 2 * units])
    z, r = z_r.chunk(2, -1)
    new = torch.addcmul(gates[..., 2 * units :], r, inner_h).tanh_()
    of_new = (1 - z) * (1 - new * new)
    deltas = gates
    d_z, d_r, d_h_inner = deltas.chunk(3, -1)
    torch.mul(before - new, z * (1 - z), out=d_z)
    torch.mul(of_new * inner_h, r * (1 - r), out=d_r)
    torch.mul(of_new, r, out=d_h_inner)
    parts, flat, zs = deltas.unflatten(-1, (3, units)).unbind(0), deltas.unbind(0), z.unbind(0)
    back = recurrent.t()
    above = _Above(d_outputs, d_h, outputs)
    order = order_of(len(flat), not backwards)
    dh = above.first(order[0])
    all_dh = torch.empty_like(outputs)
    kept = all_dh.unbind(0)
    for t, following in zip(order, [*order[1:], None], strict=True):
        kept[t].copy_(dh)
        parts[t].mul_(dh.unsqueeze(1))
        dh = above.next(following, dh, zs[t], flat[t], back)
    of_recurrent = before.flatten(0, 1).t() @ deltas.flatten(0, 1)
    d_recurrent_bias = deltas.sum((0, 1)) if recurrent_bias is not None else None
    torch.mul(all_dh, of_new, out=d_h_inner)
    dx, d_kernel, _, d_bias = _of_weights(x, kernel, None, deltas, bias)
    return dx, d_kernel, of_recurrent, d_bias, d_recurrent_bias, dh, None


def simple_gradients(tensors: Any, backwards: bool, results: Any, grads: Any) -> tuple[Any, ...]:
    """The gradients of all tensors that `simple` takes."""
    outputs = results[0]
    x, kernel, recurrent, bias, h, mask = tensors
    d_outputs, d_h = grads
    before = _before(outputs, h, backwards)
    deltas, skips = 1 - outputs * outputs, None
    if mask is not None:
        off = ~step_mask(mask)
        deltas.masked_fill_(off, 0.0)
        skips = off.to(x.dtype).unbind(0)
    flat, back = deltas.unbind(0), recurrent.t()
    above = _Above(d_outputs, d_h, outputs)
    order = order_of(len(flat), not backwards)
    dh = above.first(order[0])
    for t, following in zip(order, [*order[1:], None], strict=True):
        flat[t].mul_(dh)
        dh = above.next(following, dh, None if skips is None else skips[t], flat[t], back)
    return *_of_weights(x, kernel, before, deltas, bias), dh, None


class _Above:
    """The gradients that reach each step's state from what was made of it outside the loop.

    Args:
        d_outputs: those of all outputs, or None.
        d_last: that of the last state, or None.
        outputs: all outputs, for their shape.
    """

    def __init__(self, d_outputs: Maybe, d_last: Maybe, outputs: Tensor) -> None:
        self.steps = None if d_outputs is None else d_outputs.unbind(0)
        self.last = d_last
        self.like = outputs[0]

    def first(self, t: int) -> Tensor:
        """The gradient of the state that comes last in time."""
        if self.steps is None:
            return torch.zeros_like(self.like) if self.last is None else self.last
        return self.steps[t] if self.last is None else self.steps[t] + self.last

    def next(self, t: int | None, dh: Tensor, kept: Maybe, delta: Tensor, back: Tensor) -> Tensor:
        """The gradient of the state before, at step `t`; None stands for the initial state.

        Args:
            t: the step.
            dh: the gradient of the state after it.
            kept: the share of it that went over unchanged, or None.
            delta: the gradients of the gates after it.
            back: the recurrent kernel, turned.
        """
        base = None if self.steps is None or t is None else self.steps[t]
        if kept is not None:
            base = kept * dh if base is None else torch.addcmul(base, kept, dh)
        return torch.mm(delta, back) if base is None else torch.addmm(base, delta, back)


def _before(states: Tensor, first: Maybe, backwards: bool) -> Tensor:
    """The state before each step."""
    first = torch.zeros_like(states[:1]) if first is None else first.unsqueeze(0)
    return torch.cat((states[1:], first) if backwards else (first, states[:-1]))


def _memories(new: Tensor, kept: Tensor, first: Maybe, backwards: bool) -> Tensor:
    """The memory after each step: `kept` of the one before, and what is new."""
    memories = torch.empty_like(new)
    places, news, keeps = memories.unbind(0), new.unbind(0), kept.unbind(0)
    memory = torch.zeros_like(places[0]) if first is None else first
    for t in order_of(len(places), backwards):
        memory = torch.addcmul(news[t], keeps[t], memory, out=places[t])
    return memories


def _of_weights(
    x: Tensor, kernel: Tensor, before: Maybe, deltas: Tensor, bias: Maybe
) -> tuple[Any, ...]:
    """The gradients of the inputs, the kernels and the bias from those of the gates."""
    flat = deltas.flatten(0, 1)
    return (
        (flat @ kernel.t()).view(x.shape),
        _of_kernel(kernel, x, flat),
        None if before is None else _of_kernel(kernel, before, flat),
        None if bias is None else flat.sum(0),
    )


def _of_kernel(kernel: Tensor, inputs: Tensor, deltas: Tensor) -> Tensor:
    """A kernel's gradient over all steps, in the kernel's memory order."""
    inputs = inputs.flatten(0, 1)
    if kernel.stride(0) == 1 and kernel.shape[0] > 1:
        return (deltas.t() @ inputs).t()
    return inputs.t() @ deltas
