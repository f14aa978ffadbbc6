"""Rules for `keras.layers` normalization layers.

Inference of BatchNormalization is one fused kernel; its training, whose statistics follow
Keras's own formula, and the other layers are Keras's operations, traced.
"""

from __future__ import annotations

from typing import Any

import torch
from keras import layers

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
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
    learning = training and ctx.read(layer, "trainable")
    unusual = (learning and mask is not None) or _renormalizes(ctx, layer)
    if unusual or not 2 <= rank <= 5 or not _floating(inputs):
        return ctx.trace(ctx.view(layer).call, inputs, training=training, mask=mask)
    dtype = compat.result_type(inputs.dtype, torch.float32)
    gamma, beta, mean, variance = (
        cast(ctx.variable(ctx.read(layer, name)), dtype) if used else None
        for name, used in (
            ("gamma", ctx.read(layer, "scale")),
            ("beta", ctx.read(layer, "center")),
            ("moving_mean", True),
            ("moving_variance", True),
        )
    )
    x, epsilon = cast(inputs, dtype), ctx.read(layer, "epsilon")
    if learning:
        outputs = _learn(ctx, layer, x, channel, (gamma, beta, mean, variance), epsilon)
    elif channel in (1, rank - 1):
        outputs = _fused(x, channel, (gamma, beta, mean, variance), epsilon)
    else:
        outputs = _normalize(x, channel, (gamma, beta, mean, variance), epsilon)
    return cast(outputs, compat.to_torch_dtype(ctx.read(layer, "compute_dtype")))


def _learn(
    ctx: Any, layer: Any, x: Any, channel: int, weights: tuple[Any, ...], epsilon: float
) -> Any:
    """Normalize by the batch's statistics and move the moving ones towards them."""
    if ctx.read(layer, "synchronized"):
        raise Decline(Reason.UNSUPPORTED, "synchronized statistics")
    gamma, beta, moving_mean, moving_variance = weights
    axes = [axis for axis in range(x.ndim) if axis != channel]
    mean = torch.mean(x, axes)
    variance = torch.mean(torch.square(x), axes) - torch.square(mean)
    kept = ctx.read(layer, "momentum")
    for name, moving, now in (
        ("moving_mean", moving_mean, mean),
        ("moving_variance", moving_variance, variance),
    ):
        ctx.assign(getattr(layer, name), moving * kept + now * (1.0 - kept))
    return _normalize(x, channel, (gamma, beta, mean, variance), epsilon)


def _normalize(x: Any, channel: int, weights: tuple[Any, ...], epsilon: float) -> Any:
    """Keras's own sequence of operations, with statistics that may carry gradients."""
    gamma, beta, mean, variance = (_along(item, channel, x.ndim) for item in weights)
    scale = torch.rsqrt(variance + epsilon)
    outputs = (x - mean) * (scale if gamma is None else scale * gamma)
    return outputs if beta is None else outputs + beta


def _along(weight: Any, channel: int, rank: int) -> Any:
    """A weight per channel, shaped to broadcast along that axis."""
    if weight is None or channel == rank - 1:
        return weight
    return weight.reshape([-1 if axis == channel else 1 for axis in range(rank)])


def _fused(x: Any, channel: int, weights: tuple[Any, ...], epsilon: float) -> Any:
    """One kernel for all of it, with the moving statistics."""
    rank, back = x.ndim, None
    if channel != 1:
        x = x.permute((0, rank - 1, *range(1, rank - 1)))
        back = (0, *range(2, rank), 1)
    gamma, beta, mean, variance = weights
    cudnn = torch.backends.cudnn.enabled
    outputs = torch.batch_norm(x, gamma, beta, mean, variance, False, 0.0, epsilon, cudnn)
    return outputs if back is None else outputs.permute(back)


def _renormalizes(ctx: Any, layer: Any) -> bool:
    ctx.depend(layer, "renorm")
    return getattr(layer, "renorm", False)


def _floating(x: Any) -> bool:
    return x.dtype.is_floating_point
