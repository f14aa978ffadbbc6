"""Rules for `keras.layers` normalization layers.

Inference of BatchNormalization is one fused kernel; its training, whose statistics follow
Keras's own formula, and the other layers are Keras's operations, traced.
"""

from __future__ import annotations

from typing import Any

import torch
from keras import layers

from keras_turbo import compat
from keras_turbo.registry import rule, trace_call
from keras_turbo.rules.matmul import cast

trace_call(
    layers.GroupNormalization,
    layers.LayerNormalization,
    layers.RMSNormalization,
    layers.UnitNormalization,
)


@rule(layers.BatchNormalization)
def batch_normalization(
    ctx: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None
) -> Any:
    """Normalization by the batch's statistics in training, by the moving ones otherwise."""
    axis = ctx.read(layer, "axis")
    rank = inputs.ndim
    channel = axis % rank
    frozen = not (training and ctx.read(layer, "trainable"))
    if not frozen or channel not in (1, rank - 1) or rank > 5 or not _floating(inputs):
        return ctx.trace(ctx.view(layer).call, inputs, training=training, mask=mask)
    dtype = compat.result_type(inputs.dtype, torch.float32)
    weights = []
    for name, used in (
        ("gamma", ctx.read(layer, "scale")),
        ("beta", ctx.read(layer, "center")),
        ("moving_mean", True),
        ("moving_variance", True),
    ):
        variable = ctx.variable(ctx.read(layer, name)) if used else None
        weights.append(None if variable is None else cast(variable, dtype))
    x = cast(inputs, dtype)
    back = None
    if channel != 1:
        x = x.permute((0, rank - 1, *range(1, rank - 1)))
        back = (0, *range(2, rank), 1)
    outputs = torch.batch_norm(
        x, *weights, False, 0.0, ctx.read(layer, "epsilon"), torch.backends.cudnn.enabled
    )
    if back is not None:
        outputs = outputs.permute(back)
    return cast(outputs, compat.to_torch_dtype(ctx.read(layer, "compute_dtype")))


def _floating(x: Any) -> bool:
    return x.dtype.is_floating_point
