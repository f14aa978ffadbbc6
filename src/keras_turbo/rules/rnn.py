"""Rules for `keras.layers` recurrent layers.

What surrounds the loop over time is the same for all: initial states, dropout masks, casts,
states kept between calls. The loop itself is one of the functions of `rnn_calls` where
the layer is a LSTM, GRU or SimpleRNN with Keras's default activations, and the general loop
around a traced step otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras import layers

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule
from keras_turbo.rules import rnn_calls, rnn_cells, rnn_wrappers
from keras_turbo.rules.rnn_loop import loop

__all__ = ["rnn_cells", "rnn_wrappers"]

Inner = Callable[..., Any]


class Run:
    """One call of a recurrent layer, as its loop sees it.

    Attributes:
        ctx: the lowering context.
        layer: the layer.
        cell: its cell.
        x: the inputs, with time as the second axis.
        states: the initial states, in the cell's compute dtype.
        zero: whether these are all zeros.
        mask: which steps count, by batch and time; None if all do.
        training: the training flag.
        masks: the dropout masks by the id of their cell.
    """

    def __init__(self, ctx: Any, layer: Any, x: Any, mask: Any, training: Any) -> None:
        self.ctx, self.layer, self.x, self.training = ctx, layer, x, training
        self.mask: Any = mask
        self.cell = ctx.read(layer, "cell")
        self.states: Any = None
        self.zero = False
        self.masks: dict[int, rnn_cells.Masks] = {}
        self.backwards: bool = ctx.read(layer, "go_backwards")
        self.sequences: bool = ctx.read(layer, "return_sequences")
        self.zeros_for_mask: bool = ctx.read(layer, "zero_output_for_mask")


def _around(
    ctx: Any, layer: Any, x: Any, initial: Any, mask: Any, training: Any, inner: Inner
) -> Any:
    """Everything that `RNN.call` does around the loop."""
    if compat.tree.is_nested(mask):
        mask = compat.tree.flatten(mask)[0]
    run = Run(ctx, layer, x, mask, training)
    stateful = ctx.read(layer, "stateful")
    if mask is not None and run.backwards and ctx.read(layer, "unroll"):
        raise Decline(Reason.UNSUPPORTED, "stock Keras unrolls no masked sequence backwards")
    if stateful:
        expected = ctx.read(layer, "_expected_batch_size")
        if expected is not None and x.shape[0] != expected:
            raise Decline(Reason.SHAPE, "another batch size than the states have")
    run.states = _initial(run, initial, stateful)
    if stateful and not (hasattr(layer, "use_cudnn") and _through_backend(run)):
        # The states are written while a backward pass may still want to see them.
        run.states = compat.tree.map_structure(torch.clone, run.states)
    run.masks = rnn_cells.draw_masks(ctx, run.cell, x[:, 0], run.states)
    with rnn_cells.with_masks(run.masks):
        last, every, states = inner(run)
    dtype = compat.to_torch_dtype(ctx.read(layer, "compute_dtype"))
    states = [compat.tree.map_structure(lambda item: _cast(item, dtype), s) for s in states]
    if stateful:
        kept = compat.tree.flatten(ctx.read(layer, "states"))
        for variable, value in zip(kept, compat.tree.flatten(states), strict=True):
            ctx.assign(variable, value)
    output = _cast(every if run.sequences else last, dtype)
    return (output, *states) if ctx.read(layer, "return_state") else output


def _cast(item: Any, dtype: torch.dtype) -> Any:
    return item if item.dtype == dtype else item.to(dtype)


def _initial(run: Run, initial: Any, stateful: bool) -> Any:
    """The initial states as the loop takes them."""
    ctx, cell = run.ctx, run.cell
    if initial is None and stateful:
        initial = compat.tree.map_structure(ctx.variable, ctx.read(run.layer, "states"))
    elif initial is None:
        initial = _zero_states(run)
        run.zero = True
    if not compat.tree.is_nested(initial):
        initial = [initial]
    if not run.zero and any(
        state.shape[0] != run.x.shape[0] for state in compat.tree.flatten(initial)
    ):
        raise Decline(Reason.SHAPE, "states of another batch size")
    dtype = compat.to_torch_dtype(ctx.read(cell, "compute_dtype"))
    return compat.tree.map_structure(lambda item: _cast(item, dtype), list(initial))


def _zero_states(run: Run) -> Any:
    ctx, layer = run.ctx, run.layer
    own = getattr(type(run.cell), "get_initial_state", None)
    if own is not None and not own.__module__.startswith("keras.src."):
        raise Decline(Reason.OVERRIDE, f"{type(run.cell).__name__}.get_initial_state")
    return ctx.trace(ctx.view(layer).get_initial_state, batch_size=run.x.shape[0])


def _by_cell(run: Run) -> Any:
    """The general loop around the cell's own code."""
    step = rnn_cells.step_of(run.ctx, run.cell, run.training)
    return _loop(run, step, run.x)


def _loop(run: Run, step: Any, x: Any) -> Any:
    return loop(
        run.ctx,
        step,
        x,
        run.states,
        run.mask,
        backwards=run.backwards,
        zeros_for_mask=run.zeros_for_mask,
        sequences=run.sequences,
    )


def _lstm(run: Run) -> Any:
    x = _dropped(run)
    weights = _fused(run, layers.LSTMCell) if x is not None else None
    if weights is None:
        plain = x is not None and _through_backend(run)
        return _projected(run, x, _lstm_step(run)) if plain else _by_cell(run)
    kernel, recurrent, bias = weights
    h, c = (None, None) if run.zero else run.states
    function = rnn_calls.cudnn_lstm if _cudnn(run, bias) else rnn_calls.lstm
    args = (_cast(x, kernel.dtype), kernel, recurrent, bias, h, c, run.mask, run.backwards)
    outputs, h, c = run.ctx.tracer.create_proxy("call_function", function, args, {})
    return *_masked(run, outputs, h), [h, c]


def _gru(run: Run) -> Any:
    after = run.ctx.read(run.cell, "reset_after") if type(run.cell) is layers.GRUCell else False
    x = _dropped(run)
    weights = _fused(run, layers.GRUCell) if x is not None and after else None
    if weights is None:
        plain = x is not None and after and _through_backend(run)
        return _projected(run, x, _gru_step(run)) if plain else _by_cell(run)
    kernel, recurrent, bias = weights
    biases = (None, None) if bias is None else (bias[0], bias[1])
    h = None if run.zero else run.states[0]
    function = rnn_calls.cudnn_gru if _cudnn(run, bias) else rnn_calls.gru
    args = (_cast(x, kernel.dtype), kernel, recurrent, *biases, h, run.mask, run.backwards)
    outputs, h = run.ctx.tracer.create_proxy("call_function", function, args, {})
    return *_masked(run, outputs, h), [h]


def _simple(run: Run) -> Any:
    weights = _fused(run, layers.SimpleRNNCell)
    if weights is None:
        return _by_cell(run)
    kernel, recurrent, bias = weights
    x, masks = run.x, run.masks[id(run.cell)]
    if run.training and masks.inputs is not None:
        x = x * masks.inputs.unsqueeze(1)
    h = None if run.zero else run.states[0]
    args = (_cast(x, kernel.dtype), kernel, recurrent, bias, h, run.mask, run.backwards)
    outputs, h = run.ctx.tracer.create_proxy("call_function", rnn_calls.simple, args, {})
    return *_masked(run, outputs, h), [h]


def _fused(run: Run, kind: type) -> Any:
    """The weights of a cell whose activations are all Keras's default; else None."""
    ctx, cell = run.ctx, run.cell
    if type(cell) is not kind or ctx.read(cell, "activation") is not compat.activations.tanh:
        return None
    gates = kind is not layers.SimpleRNNCell
    if gates and ctx.read(cell, "recurrent_activation") is not compat.activations.sigmoid:
        return None
    if run.training and ctx.read(cell, "recurrent_dropout") > 0:
        return None
    variables = [ctx.read(cell, name) for name in ("kernel", "recurrent_kernel", "bias")]
    if kind is layers.LSTMCell and run.mask is None and run.x.device.type == "cpu":
        # As oneDNN takes them; it copies what lies otherwise, at each call.
        for variable in variables[:2]:
            ctx.prefer_layout(variable, (1, 0))
    weights = [ctx.variable(variable) for variable in variables]
    # Cell by cell, Keras's products of float64 numbers come out as float32.
    exact = gates and _through_backend(run)
    dtype = weights[0].dtype
    if dtype not in ((torch.float32, torch.float64) if exact else (torch.float32,)):
        return None
    if any(state.dtype != dtype for state in run.states):
        return None
    return weights if run.mask is None or run.mask.ndim == 2 else None


def _through_backend(run: Run) -> bool:
    """Whether stock Keras runs a LSTM or GRU in one piece, and not cell by cell."""
    ctx = run.ctx
    wanted = ctx.read(run.layer, "use_cudnn")
    alone = run.mask is None and not ctx.read(run.cell, "recurrent_dropout")
    if type(run.cell) is layers.GRUCell:
        alone = alone and ctx.read(run.cell, "reset_after")
    if wanted is True and not alone:
        raise Decline(Reason.UNSUPPORTED, "use_cudnn=True where cuDNN cannot be used")
    return bool(wanted) and alone


def _cudnn(run: Run, bias: Any) -> bool:
    if run.x.device.type != "cuda" or not torch.backends.cudnn.is_available():
        return False
    unrolled = run.ctx.read(run.layer, "unroll")
    return _through_backend(run) and bias is not None and not unrolled


def _dropped(run: Run) -> Any:
    """The inputs, with the same units dropped at all steps in training.

    Returns:
        None where each gate has a mask of its own.
    """
    backend = _through_backend(run)
    rate = run.ctx.read(run.cell, "dropout")
    if not run.training or not rate > 0 or (rate >= 1 and not backend):
        return run.x
    mask = run.masks[id(run.cell)].inputs
    if not isinstance(mask, list):
        return run.x * mask.unsqueeze(1)
    if backend:
        raise Decline(Reason.UNSUPPORTED, "stock Keras mistakes a mask per gate for one")
    return None


def _masked(run: Run, outputs: Any, last: Any) -> tuple[Any, Any]:
    """The last output and all outputs as Keras gives them for steps that do not count."""
    mask = run.mask
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(torch.bool)
        if run.zeros_for_mask:
            outputs = torch.where(mask.unsqueeze(-1), outputs, torch.zeros_like(outputs))
            end = mask[:, 0 if run.backwards else -1]
            last = torch.where(end.unsqueeze(-1), last, torch.zeros_like(last))
        elif not run.zero:
            seen = mask.flip(1) if run.backwards else mask
            seen = torch.cumsum(seen, 1) > 0
            seen = seen.flip(1) if run.backwards else seen
            outputs = torch.where(seen.unsqueeze(-1), outputs, torch.zeros_like(outputs))
            ever = torch.any(mask, 1)
            last = torch.where(ever.unsqueeze(-1), last, torch.zeros_like(last))
    return last, torch.flip(outputs, (1,)) if run.backwards and run.sequences else outputs


def _projected(run: Run, x: Any, step: Any) -> Any:
    """The loop as stock Keras runs it in one piece: inputs times kernel for all steps at once."""
    ctx, cell = run.ctx, run.cell
    kernel = ctx.variable(ctx.read(cell, "kernel"))
    bias = ctx.variable(ctx.read(cell, "bias"))
    gates = torch.matmul(_cast(x, kernel.dtype).permute((1, 0, 2)), kernel)
    if bias is not None:
        gates = gates + (bias if bias.ndim == 1 else bias[0])
    run.states = [_cast(state, kernel.dtype) for state in run.states]
    return _loop(run, step, gates.permute((1, 0, 2)))


def _lstm_step(run: Run) -> Any:
    ctx, cell = run.ctx, run.cell

    def step(gates: Any, states: Any) -> Any:
        h, c = states
        recurrent = ctx.variable(ctx.read(cell, "recurrent_kernel"))
        gates = gates + torch.matmul(h, recurrent)
        z_i, z_f, z_c, z_o = torch.chunk(gates, 4, 1)
        inner, outer = ctx.read(cell, "recurrent_activation"), ctx.read(cell, "activation")
        kept, new = ctx.apply(inner, z_f) * c, ctx.apply(inner, z_i) * ctx.apply(outer, z_c)
        c = kept + new
        h = ctx.apply(inner, z_o) * ctx.apply(outer, c)
        return h, [h, c]

    return step


def _gru_step(run: Run) -> Any:
    ctx, cell = run.ctx, run.cell

    def step(gates: Any, states: Any) -> Any:
        (h,) = states
        recurrent = ctx.variable(ctx.read(cell, "recurrent_kernel"))
        bias = ctx.variable(ctx.read(cell, "bias"))
        inner = torch.matmul(h, recurrent)
        if bias is not None:
            inner = inner + bias[1]
        (x_z, x_r, x_h), (h_z, h_r, h_h) = torch.chunk(gates, 3, 1), torch.chunk(inner, 3, 1)
        gate = ctx.read(cell, "recurrent_activation")
        z, r = ctx.apply(gate, x_z + h_z), ctx.apply(gate, x_r + h_r)
        h = z * h + (1.0 - z) * ctx.apply(ctx.read(cell, "activation"), x_h + r * h_h)
        return h, [h]

    return step


def _register(inner: Inner, *classes: type) -> None:
    """Register the rule of recurrent layers whose loop is `inner`."""

    @rule(*classes)
    def recurrence(
        ctx: Any,
        layer: Any,
        sequences: Any,
        initial_state: Any = None,
        mask: Any = None,
        training: Any = False,
    ) -> Any:
        """All time steps of a recurrent layer."""
        return _around(ctx, layer, sequences, initial_state, mask, training, inner)


_register(_by_cell, layers.RNN, layers.ConvLSTM1D, layers.ConvLSTM2D, layers.ConvLSTM3D)
_register(_lstm, layers.LSTM)
_register(_gru, layers.GRU)
_register(_simple, layers.SimpleRNN)
