"""Rules for `keras.layers` regularization layers: dropout, noise, activity penalties.

A layer with a seed draws from a generator seeded by its Keras seed state, a layer without
one from torch's own generator; both as stock Keras does, so that the same seed gives the
same masks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from keras import layers

from keras_turbo.registry import rule, trace_call
from keras_turbo.rules.draws import bernoulli, normal

trace_call(layers.ActivityRegularization)


def dropout(ctx: Any, x: Any, rate: float, noise_shape: Any, seed_generator: Any) -> Any:
    """`keras.random.dropout` of a traced tensor."""
    ctx.random()
    if rate == 1.0:
        return torch.zeros_like(x)
    if rate == 0.0:
        return x
    if seed_generator._initial_seed is None and noise_shape is None:
        return torch.dropout(x, rate, True)
    keep = 1.0 - rate
    if noise_shape is None:
        shape = x.shape
    else:
        shape = [x.shape[i] if n is None else n for i, n in enumerate(noise_shape)]
    state, draw = ctx.draw_seed(seed_generator)
    probabilities = x.new_full(tuple(shape), keep, dtype=torch.float32)
    kept = ctx.tracer.create_proxy(
        "call_function", bernoulli, (probabilities, state, draw), {}
    ).bool()
    if noise_shape is not None:
        kept = torch.broadcast_to(kept, x.shape)
    return torch.where(kept, x / keep, torch.zeros_like(x))


@rule(layers.Dropout)
def dropout_layer(ctx: Any, layer: Any, inputs: Any, training: Any = False) -> Any:
    """Dropout."""
    rate = ctx.read(layer, "rate")
    noise_shape = ctx.read(layer, "noise_shape")
    if not training or not rate > 0:
        return inputs
    return dropout(ctx, inputs, rate, noise_shape, ctx.read(layer, "seed_generator"))


@rule(layers.SpatialDropout1D, layers.SpatialDropout2D, layers.SpatialDropout3D)
def spatial_dropout(ctx: Any, layer: Any, inputs: Any, training: Any = False) -> Any:
    """Dropout of whole feature maps."""
    rate = ctx.read(layer, "rate")
    if not training or not rate > 0:
        return inputs
    noise_shape = ctx.view(layer)._get_noise_shape(inputs)
    return dropout(ctx, inputs, rate, noise_shape, ctx.read(layer, "seed_generator"))


@rule(layers.GaussianDropout)
def gaussian_dropout(ctx: Any, layer: Any, inputs: Any, training: Any = False) -> Any:
    """Multiplication by noise around one."""
    rate = ctx.read(layer, "rate")
    if not training or not rate > 0:
        return inputs
    return inputs * _noise(ctx, layer, inputs, 1.0, math.sqrt(rate / (1.0 - rate)))


@rule(layers.GaussianNoise)
def gaussian_noise(ctx: Any, layer: Any, inputs: Any, training: Any = False) -> Any:
    """Addition of noise around zero."""
    stddev = ctx.read(layer, "stddev")
    if not training or not stddev > 0:
        return inputs
    return inputs + _noise(ctx, layer, inputs, 0.0, stddev)


def _noise(ctx: Any, layer: Any, x: Any, mean: float, stddev: float) -> Any:
    from keras_turbo.compat import to_torch_dtype

    ctx.random()
    state, draw = ctx.draw_seed(ctx.read(layer, "seed_generator"))
    dtype = to_torch_dtype(ctx.read(layer, "compute_dtype"))
    return ctx.tracer.create_proxy(
        "call_function", normal, (x, mean, stddev, dtype, state, draw), {}
    )
