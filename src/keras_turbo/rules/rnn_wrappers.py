"""Rules for the `keras.layers` wrappers of sequences: Bidirectional and TimeDistributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from keras import layers

from keras_turbo import compat, registry
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule

_PER_SAMPLE = (
    layers.Activation,
    layers.AveragePooling1D,
    layers.AveragePooling2D,
    layers.AveragePooling3D,
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.Dense,
    layers.DepthwiseConv1D,
    layers.DepthwiseConv2D,
    layers.ELU,
    layers.EinsumDense,
    layers.Flatten,
    layers.GlobalAveragePooling2D,
    layers.GlobalAveragePooling3D,
    layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D,
    layers.GlobalMaxPooling3D,
    layers.LayerNormalization,
    layers.LeakyReLU,
    layers.MaxPooling1D,
    layers.MaxPooling2D,
    layers.MaxPooling3D,
    layers.Permute,
    layers.ReLU,
    layers.Rescaling,
    layers.Reshape,
    layers.SeparableConv1D,
    layers.SeparableConv2D,
)
"""Layers that treat every sample alike and draw no numbers: all steps can be one batch."""


@rule(layers.Bidirectional)
def bidirectional(
    ctx: Any,
    layer: Any,
    sequences: Any,
    initial_state: Any = None,
    mask: Any = None,
    training: Any = None,
) -> Any:
    """Two recurrent layers, one of them from the end, and their outputs merged.

    Recurrences keep time first in memory; what comes in and what is merged is laid out so
    once, and not by each of them.
    """
    if sequences.device.type != "cpu":
        # Stock Keras may run both directions in one call there.
        given = {"initial_state": initial_state, "mask": mask, "training": training}
        return ctx.trace(ctx.view(layer).call, sequences, **given)
    first, second = ctx.read(layer, "forward_layer"), ctx.read(layer, "backward_layer")
    kwargs: dict[str, Any] = {}
    if first._call_has_training_arg:
        kwargs["training"] = training
    if first._call_has_mask_arg:
        kwargs["mask"] = mask
    states: tuple[Any, Any] = None, None
    if initial_state is not None:
        half = len(initial_state) // 2
        states = initial_state[:half], initial_state[half:]
    sequences = _time_first(sequences)
    y = ctx.call(first, sequences, initial_state=states[0], **kwargs)
    y_rev = ctx.call(second, sequences, initial_state=states[1], **kwargs)
    after: tuple[Any, ...] = ()
    if ctx.read(layer, "return_state"):
        after = (*y[1:], *y_rev[1:])
        y, y_rev = y[0], y_rev[0]
    dtype = compat.to_torch_dtype(ctx.read(layer, "compute_dtype"))
    y, y_rev = (item if item.dtype == dtype else item.to(dtype) for item in (y, y_rev))
    if ctx.read(layer, "return_sequences"):
        y_rev = torch.flip(y_rev, (1,))
    mode = ctx.read(layer, "merge_mode")
    if mode is None:
        return (y, y_rev, *after)
    output = _MERGES[mode](y, y_rev)
    return (output, *after) if after else output


def _time_first(x: Any) -> Any:
    """The same sequences, with the time axis first in memory."""
    if x.ndim != 3:
        return x
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    turned._keras_mask = getattr(x, "_keras_mask", None)
    return turned


def _concatenate(y: Any, y_rev: Any) -> Any:
    if y.ndim != 3:
        return torch.cat((y, y_rev), -1)
    return torch.cat((y.transpose(0, 1), y_rev.transpose(0, 1)), -1).transpose(0, 1)


_MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "concat": _concatenate,
    "sum": lambda y, y_rev: y + y_rev,
    "ave": lambda y, y_rev: (y + y_rev) / 2,
    "mul": lambda y, y_rev: y * y_rev,
}


@rule(layers.TimeDistributed)
def time_distributed(
    ctx: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """The wrapped layer on all time steps, as one batch where the layer treats samples alike."""
    wrapped = ctx.read(layer, "layer")
    found = registry.find(wrapped)
    if inputs.ndim < 3 or (mask is not None and mask.ndim < 2):
        raise Decline(Reason.SHAPE, "stock Keras words the error")
    if mask is not None:
        _same_steps(inputs, mask)
    if not wrapped.built:
        raise Decline(Reason.NOT_BUILT, wrapped.name)
    ctx.depend(wrapped, "call", "_dtype_policy", "built")
    takes = wrapped._call_has_training_arg
    given = {"training": training} if takes else {}
    if type(wrapped) in _PER_SAMPLE:
        batch, steps = inputs.shape[:2]
        outputs = found.function(ctx, wrapped, torch.flatten(inputs, 0, 1), **given)
        return torch.reshape(outputs, (batch, steps, *outputs.shape[1:]))
    outputs = []
    for i in range(inputs.shape[1]):
        if wrapped._call_has_mask_arg and mask is not None:
            given["mask"] = mask[:, i]
        outputs.append(found.function(ctx, wrapped, inputs[:, i], **given))
    if any(compat.tree.is_nested(output) for output in outputs):
        raise Decline(Reason.STRUCTURE, "a wrapped layer with several outputs")
    return torch.stack(outputs).transpose(0, 1)


def _same_steps(inputs: Any, mask: Any) -> None:
    for axis in (0, 1):
        if inputs.shape[axis] != mask.shape[axis]:
            raise Decline(Reason.SHAPE, "a mask of another shape than its inputs")
