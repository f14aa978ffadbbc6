"""Whole recurrences as functions of tensors, which programs of recurrent layers call.

They are torch alone. Where nothing is to be differentiated, the long short-term memory is
oneDNN's one kernel, and the other loops write into memory that is there. Where gradients are
wanted, the backward passes of `rnn_gradients` know the formulas: the weights' gradients are
one product over all steps. Time is the second axis of inputs and outputs, as in Keras; a
recurrence that runs backwards starts at the end and leaves its outputs where their inputs are.
A step that a mask excludes keeps its state.
"""

from __future__ import annotations

from typing import Any

import torch

from keras_turbo import compat

Tensor = torch.Tensor
Maybe = Tensor | None
_LSTM = 2
"""oneDNN's number for this kind of recurrence, as torch hands it on."""


def time_major(x: Tensor) -> Tensor:
    """A batch of sequences with the time axis first, in memory too."""
    x = x.transpose(0, 1).contiguous()
    if x.shape[0] == 0:
        raise ValueError("a sequence without steps")
    return x


def project(x: Tensor, kernel: Tensor, bias: Maybe) -> Tensor:
    """The inputs' share of all gates at all steps."""
    flat = x.flatten(0, 1)
    gates = torch.mm(flat, kernel) if bias is None else torch.addmm(bias, flat, kernel)
    return gates.view(*x.shape[:2], kernel.shape[1])


def step_mask(mask: Tensor) -> Tensor:
    """A mask with time first, and an axis more, for comparison with a step's state."""
    return mask.transpose(0, 1).unsqueeze(-1)


def order_of(count: int, backwards: bool) -> range:
    """The steps in the order in which they are taken."""
    return range(count - 1, -1, -1) if backwards else range(count)


def lstm_gates(x: Tensor, kernel: Tensor, bias: Maybe, masks: Maybe) -> Tensor:
    """The inputs' share of the gates; a step that does not count keeps its memory."""
    gates = project(x, kernel, bias)
    if masks is None:
        return gates
    off, units = ~masks, kernel.shape[1] // 4
    gates.masked_fill_(off, 0.0)
    gates[..., :units].masked_fill_(off, -torch.inf)
    gates[..., units : 2 * units].masked_fill_(off, torch.inf)
    return gates


def gru_gates(x: Tensor, kernel: Tensor, bias: Maybe, masks: Maybe) -> Tensor:
    """The inputs' share of the gates; the update gate of a step that does not count is shut."""
    gates = project(x, kernel, bias)
    if masks is None:
        return gates
    off = ~masks
    gates.masked_fill_(off, 0.0)
    gates[..., : kernel.shape[1] // 3].masked_fill_(off, torch.inf)
    return gates


def _zeros(x: Tensor, units: int) -> Tensor:
    return x.new_zeros((x.shape[1], units))


def _one_kernel(x: Tensor, kernel: Tensor, h: Tensor, c: Tensor) -> bool:
    """Whether oneDNN can do it, which looks at no size itself."""
    sizes = x.shape[1], kernel.shape[1] // 4
    return (
        x.dtype == torch.float32
        and x.is_cpu
        and x.numel() > 0
        and compat.onednn_enabled()
        and x.shape[2] == kernel.shape[0]
        and h.shape == sizes
        and c.shape == sizes
    )


def _one_kernel_lstm(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    states: tuple[Tensor, Tensor],
    backwards: bool,
    training: bool,
) -> tuple[Tensor, ...]:
    units = recurrent.shape[0]
    zeros = kernel.new_zeros(4 * units)
    h, c = (state.contiguous().unsqueeze(0) for state in states)
    given = x, kernel.t(), recurrent.t(), zeros if bias is None else bias, zeros, h, c
    rest = backwards, [], _LSTM, units, 1, True, False, False, training
    layer: Any = torch.mkldnn_rnn_layer  # type: ignore[attr-defined]
    if not training:
        outputs, h, c, _ = layer(*given, *rest)
        return outputs, h.squeeze(0), c.squeeze(0)
    # Torch keeps what a backward pass needs where gradients are on, whatever needs one.
    with torch.enable_grad():
        outputs, h, c, kept = layer(*(tensor.detach() for tensor in given), *rest)
    return outputs, h.squeeze(0), c.squeeze(0), kept


def one_kernel_gradients(
    tensors: Any, backwards: bool, results: Any, grads: Any
) -> tuple[Any, ...]:
    """The gradients of what oneDNN ran."""
    x, kernel, recurrent, bias, h, c, _ = tensors
    outputs, last, memory, kept = results
    units = recurrent.shape[0]
    zeros = kernel.new_zeros(4 * units)
    h = (_zeros(x, units) if h is None else h).contiguous().unsqueeze(0)
    c = (_zeros(x, units) if c is None else c).contiguous().unsqueeze(0)
    d_outputs = torch.zeros_like(outputs) if grads[0] is None else grads[0].contiguous()
    d_h, d_c = (
        torch.zeros_like(h) if grad is None else grad.contiguous().unsqueeze(0)
        for grad in grads[1:]
    )
    dx, d_kernel, d_recurrent, d_bias, _, d_h, d_c = torch.ops.aten.mkldnn_rnn_layer_backward(
        *(x, kernel.t(), recurrent.t(), zeros if bias is None else bias, zeros, h, c),
        *(outputs, last.unsqueeze(0), memory.unsqueeze(0), d_outputs, d_h, d_c, backwards),
        *(_LSTM, units, 1, True, True, False, [], False, kept),
    )
    return dx, d_kernel.t(), d_recurrent.t(), d_bias, d_h.squeeze(0), d_c.squeeze(0), None


def run_lstm(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    h: Maybe,
    c: Maybe,
    mask: Maybe,
    backwards: bool,
    training: bool = False,
) -> tuple[Tensor, ...]:
    """A long short-term memory over time-major inputs, for calls without gradients.

    With `training`, oneDNN's result is followed by the memory that its backward pass needs.
    """
    units = recurrent.shape[0]
    h = _zeros(x, units) if h is None else h
    c = _zeros(x, units) if c is None else c
    if mask is None and _one_kernel(x, kernel, h, c):
        return _one_kernel_lstm(x, kernel, recurrent, bias, (h, c), backwards, training)
    masks = None if mask is None else step_mask(mask)
    gates = lstm_gates(x, kernel, bias, masks).unbind(0)
    outputs = x.new_empty((*x.shape[:2], units))
    places = outputs.unbind(0)
    keeps = None if masks is None else masks.unbind(0)
    s, g, new = torch.empty_like(gates[0]), torch.empty_like(h), torch.empty_like(h)
    i, f, _, o = s.chunk(4, 1)
    z = torch.empty_like(s)
    z_g = z[:, 2 * units : 3 * units]
    c = c.clone(memory_format=torch.contiguous_format)
    for t in order_of(len(gates), backwards):
        torch.addmm(gates[t], h, recurrent, out=z)
        torch.sigmoid(z, out=s)
        torch.tanh(z_g, out=g)
        c.mul_(f).addcmul_(i, g)
        torch.tanh(c, out=new)
        place = places[t]
        if keeps is None:
            torch.mul(o, new, out=place)
        else:
            torch.where(keeps[t], new.mul_(o), h, out=place)
        h = place
    return outputs, h.clone(), c


def run_gru(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    recurrent_bias: Maybe,
    h: Maybe,
    mask: Maybe,
    backwards: bool,
    _training: bool = False,
) -> tuple[Tensor, Tensor]:
    """A gated recurrence over time-major inputs, for calls without gradients."""
    units = recurrent.shape[0]
    h = _zeros(x, units) if h is None else h
    gates = gru_gates(x, kernel, bias, None if mask is None else step_mask(mask))
    updates, candidates = gates[..., : 2 * units].unbind(0), gates[..., 2 * units :].unbind(0)
    outputs = x.new_empty((*x.shape[:2], units))
    places = outputs.unbind(0)
    inner = torch.empty_like(gates[0])
    inner_zr, inner_h = inner[:, : 2 * units], inner[:, 2 * units :]
    z_r, new = inner.new_empty((len(inner), 2 * units)), torch.empty_like(h)
    z, r = z_r.chunk(2, 1)
    for t in order_of(len(places), backwards):
        if recurrent_bias is None:
            torch.mm(h, recurrent, out=inner)
        else:
            torch.addmm(recurrent_bias, h, recurrent, out=inner)
        torch.add(updates[t], inner_zr, out=z_r)
        z_r.sigmoid_()
        torch.addcmul(candidates[t], r, inner_h, out=new)
        new.tanh_()
        h = torch.lerp(new, h, z, out=places[t])
    return outputs, h.clone()


def run_simple(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    h: Maybe,
    mask: Maybe,
    backwards: bool,
    _training: bool = False,
) -> tuple[Tensor, Tensor]:
    """`tanh(x @ kernel + bias + h @ recurrent)` step by step, for calls without gradients."""
    h = _zeros(x, recurrent.shape[0]) if h is None else h
    gates = project(x, kernel, bias).unbind(0)
    outputs = x.new_empty((*x.shape[:2], recurrent.shape[0]))
    places = outputs.unbind(0)
    keeps = None if mask is None else step_mask(mask).unbind(0)
    for t in order_of(len(places), backwards):
        place = places[t]
        torch.addmm(gates[t], h, recurrent, out=place).tanh_()
        if keeps is not None:
            torch.where(keeps[t], place, h, out=place)
        h = place
    return outputs, h.clone()


def plain_lstm(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    h: Maybe,
    c: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`run_lstm` as operations that can be differentiated and traced any way."""
    units = recurrent.shape[0]
    h = _zeros(x, units) if h is None else h
    c = _zeros(x, units) if c is None else c
    gates = project(x, kernel, bias).unbind(0)
    keeps = None if mask is None else step_mask(mask).unbind(0)
    outputs: list[Any] = [None] * len(gates)
    for t in order_of(len(gates), backwards):
        i, f, g, o = (gates[t] + torch.mm(h, recurrent)).chunk(4, 1)
        memory = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        state = torch.sigmoid(o) * torch.tanh(memory)
        if keeps is not None:
            memory, state = torch.where(keeps[t], memory, c), torch.where(keeps[t], state, h)
        c, h = memory, state
        outputs[t] = h
    return torch.stack(outputs), h, c


def plain_gru(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    recurrent_bias: Maybe,
    h: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    """`run_gru` as operations that can be differentiated and traced any way."""
    h = _zeros(x, recurrent.shape[0]) if h is None else h
    gates = project(x, kernel, bias).unbind(0)
    keeps = None if mask is None else step_mask(mask).unbind(0)
    outputs: list[Any] = [None] * len(gates)
    for t in order_of(len(gates), backwards):
        inner = torch.mm(h, recurrent)
        if recurrent_bias is not None:
            inner = inner + recurrent_bias
        (x_z, x_r, x_h), (h_z, h_r, h_h) = gates[t].chunk(3, 1), inner.chunk(3, 1)
        z, r = torch.sigmoid(x_z + h_z), torch.sigmoid(x_r + h_r)
        state = z * h + (1.0 - z) * torch.tanh(x_h + r * h_h)
        h = state if keeps is None else torch.where(keeps[t], state, h)
        outputs[t] = h
    return torch.stack(outputs), h


def plain_simple(
    x: Tensor,
    kernel: Tensor,
    recurrent: Tensor,
    bias: Maybe,
    h: Maybe,
    mask: Maybe,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    """`run_simple` as operations that can be differentiated and traced any way."""
    h = _zeros(x, recurrent.shape[0]) if h is None else h
    gates = project(x, kernel, bias).unbind(0)
    keeps = None if mask is None else step_mask(mask).unbind(0)
    outputs: list[Any] = [None] * len(gates)
    for t in order_of(len(gates), backwards):
        state = torch.tanh(gates[t] + torch.mm(h, recurrent))
        h = state if keeps is None else torch.where(keeps[t], state, h)
        outputs[t] = h
    return torch.stack(outputs), h
