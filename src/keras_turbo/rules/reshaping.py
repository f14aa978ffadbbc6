"""Rules for `keras.layers` reshaping layers; all but Flatten are Keras's own code, traced."""

from __future__ import annotations

from typing import Any

import torch
from keras import layers

from keras_turbo.registry import rule, trace_call

trace_call(
    layers.Cropping1D,
    layers.Cropping2D,
    layers.Cropping3D,
    layers.Permute,
    layers.RepeatVector,
    layers.Reshape,
    layers.UpSampling1D,
    layers.UpSampling2D,
    layers.UpSampling3D,
    layers.ZeroPadding1D,
    layers.ZeroPadding2D,
    layers.ZeroPadding3D,
)


@rule(layers.Flatten)
def flatten(ctx: Any, layer: Any, inputs: Any) -> Any:
    """All axes but the first as one, also where the batch is empty."""
    rank = inputs.ndim
    if ctx.read(layer, "_channels_first") and rank > 1:
        inputs = torch.permute(inputs, (0, *range(2, rank), 1))
    if rank <= 2:
        return torch.reshape(inputs, (*inputs.shape, 1)[:2])
    return torch.flatten(inputs, 1)
