"""Rules for `keras.layers` core layers: Dense, EinsumDense, Embedding and simple wrappers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from keras import layers
from keras.src.backend.common import dtypes

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule
from keras_turbo.rules.matmul import matmul, product_and_bias


@rule(layers.Dense)
def dense(ctx: Any, layer: Any, inputs: Any, training: Any = None) -> Any:
    """`activation(inputs @ kernel + bias)`."""
    _no_lora(ctx, layer)
    kernel = ctx.variable(ctx.read(layer, "_kernel"))
    bias = ctx.variable(ctx.read(layer, "bias"))
    outputs = product_and_bias(ctx, inputs, kernel, bias)
    return ctx.apply(ctx.read(layer, "activation"), outputs)


def _no_lora(ctx: Any, layer: Any) -> None:
    if ctx.read(layer, "lora_enabled"):
        raise Decline(Reason.UNSUPPORTED, "LoRA")


@rule(layers.Activation)
def activation(ctx: Any, layer: Any, inputs: Any) -> Any:
    """Any activation as a layer."""
    return ctx.apply(ctx.read(layer, "activation"), inputs)


@rule(layers.Identity)
def identity(ctx: Any, layer: Any, inputs: Any) -> Any:
    """The input itself."""
    return inputs


__all__ = ["compat", "dtypes", "functools", "matmul", "torch"]
