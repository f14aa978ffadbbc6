"""Rules for the `keras.layers` wrappers of sequences: Bidirectional and TimeDistributed."""

from __future__ import annotations

from typing import Any

import torch
from keras import layers

from keras_turbo import compat, registry
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule, trace_call

trace_call(layers.Bidirectional)

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
