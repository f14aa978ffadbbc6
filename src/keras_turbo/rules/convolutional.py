"""Rules for `keras.layers` convolutions.

The kernel keeps Keras's shape but is laid out in memory as torch's kernels want it, so that
the permuted view costs nothing; the activation runs before the axes go back, on memory
that the convolution owns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from keras import layers

from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule, trace_call
from keras_turbo.rules.activations import is_elementwise

_CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}

trace_call(layers.DepthwiseConv1D, layers.SeparableConv1D)


@rule(layers.Conv1D, layers.Conv2D, layers.Conv3D)
def conv(ctx: Any, layer: Any, inputs: Any) -> Any:
    """Convolution, bias and activation."""
    if ctx.read(layer, "lora_enabled"):
        raise Decline(Reason.UNSUPPORTED, "LoRA")
    rank = ctx.read(layer, "rank")
    kernel = ctx.read(layer, "_kernel")
    last = ctx.read(layer, "data_format") == "channels_last"
    ctx.prefer_layout(kernel, _storage_order(rank, last))
    weight = ctx.variable(kernel).permute(_torch_order(rank))
    bias = ctx.variable(ctx.read(layer, "bias")) if ctx.read(layer, "use_bias") else None
    x = _channels_first(inputs, rank) if last else inputs
    padding = ctx.read(layer, "padding")
    dilation = ctx.read(layer, "dilation_rate")
    if padding == "causal":
        left = dilation[0] * (weight.shape[2] - 1)
        x, padding = F.pad(x, (left, 0)), "valid"
    return _finish(ctx, layer, x, weight, bias, padding, ctx.read(layer, "strides"), dilation, last)


@rule(layers.DepthwiseConv2D)
def depthwise_conv(ctx: Any, layer: Any, inputs: Any) -> Any:
    """Convolution of every channel on its own."""
    kernel = ctx.read(layer, "kernel")
    last = ctx.read(layer, "data_format") == "channels_last"
    ctx.prefer_layout(kernel, (2, 3, 0, 1))
    weight = _depthwise_weight(ctx.variable(kernel))
    bias = ctx.variable(ctx.read(layer, "bias")) if ctx.read(layer, "use_bias") else None
    x = _channels_first(inputs, 2) if last else inputs
    padding, strides = ctx.read(layer, "padding"), ctx.read(layer, "strides")
    dilation = ctx.read(layer, "dilation_rate")
    return _finish(ctx, layer, x, weight, bias, padding, strides, dilation, last)


@rule(layers.SeparableConv2D)
def separable_conv(ctx: Any, layer: Any, inputs: Any) -> Any:
    """A depthwise convolution followed by a pointwise one."""
    depthwise = ctx.read(layer, "depthwise_kernel")
    pointwise = ctx.read(layer, "pointwise_kernel")
    last = ctx.read(layer, "data_format") == "channels_last"
    ctx.prefer_layout(depthwise, (2, 3, 0, 1))
    ctx.prefer_layout(pointwise, _storage_order(2, last))
    first = _depthwise_weight(ctx.variable(depthwise))
    second = ctx.variable(pointwise).permute(_torch_order(2))
    bias = ctx.variable(ctx.read(layer, "bias")) if ctx.read(layer, "use_bias") else None
    x = _channels_first(inputs, 2) if last else inputs
    padding, strides = ctx.read(layer, "padding"), ctx.read(layer, "strides")
    dilation = ctx.read(layer, "dilation_rate")
    x = _convolve(x, first, None, padding, strides, dilation)
    return _finish(ctx, layer, x, second, bias, "valid", (1, 1), dilation, last)


def _storage_order(rank: int, last: bool) -> tuple[int, ...]:
    """Axes of a Keras kernel `(*spatial, in, out)` in the memory order of torch's kernels."""
    spatial = tuple(range(rank))
    if last and rank > 1:
        return (rank + 1, *spatial, rank)
    return (rank + 1, rank, *spatial)


def _torch_order(rank: int) -> tuple[int, ...]:
    return (rank + 1, rank, *range(rank))


def _channels_first(x: Any, rank: int) -> Any:
    return x.permute((0, rank + 1, *range(1, rank + 1)))


def _depthwise_weight(kernel: Any) -> Any:
    height, width, channels, multiplier = kernel.shape
    weight = kernel.permute((2, 3, 0, 1))
    return weight.reshape((channels * multiplier, 1, height, width))


def _convolve(x: Any, weight: Any, bias: Any, padding: str, strides: Any, dilation: Any) -> Any:
    rank = weight.ndim - 2
    channels, kernel_channels = x.shape[1], weight.shape[1]
    if not isinstance(channels, int) or channels % kernel_channels:
        raise Decline(Reason.SHAPE, f"{channels} channels for a kernel of {kernel_channels}")
    strides = _per_axis(strides, rank)
    dilation = _per_axis(dilation, rank)
    amounts: Any = 0
    if padding == "same":
        pairs = [
            _same_padding(x.shape[i + 2], weight.shape[i + 2], strides[i], dilation[i])
            for i in range(rank)
        ]
        if all(left == right for left, right in pairs):
            amounts = tuple(left for left, _ in pairs)
        else:
            x = F.pad(x, tuple(n for pair in reversed(pairs) for n in pair))
    groups = channels // kernel_channels
    return _CONVOLUTIONS[rank](x, weight, bias, strides, amounts, dilation, groups)


def _finish(
    ctx: Any,
    layer: Any,
    x: Any,
    weight: Any,
    bias: Any,
    padding: str,
    strides: Any,
    dilation: Any,
    last: bool,
) -> Any:
    """Convolve, add the bias, activate, and put the axes back."""
    # In training the bias stays an addition of its own, as in stock Keras: a fused one
    # rounds differently, and adaptive optimizers amplify that.
    fused = None if ctx.training else bias
    outputs = _convolve(x, weight, fused, padding, strides, dilation)
    if bias is not None and fused is None:
        outputs = outputs + bias.reshape((-1,) + (1,) * (weight.ndim - 2))
    function = ctx.read(layer, "activation")
    if is_elementwise(function):
        outputs, function = ctx.apply(function, outputs), None
    if last:
        rank = weight.ndim - 2
        outputs = outputs.permute((0, *range(2, rank + 2), 1))
    return ctx.apply(function, outputs)


def _per_axis(value: Any, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _same_padding(size: Any, kernel: int, stride: int, dilation: int) -> tuple[Any, Any]:
    """The padding before and after one axis that Keras's `same` means."""
    extent = (kernel - 1) * dilation + 1
    if stride == 1:
        total = extent - 1
    else:
        steps = (size + stride - 1) // stride
        total = max(0, (steps - 1) * stride + extent - size)
    return total // 2, total - total // 2
