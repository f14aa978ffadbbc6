"""Rules for `keras.layers` core layers: Dense, EinsumDense, Embedding and simple wrappers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from keras import layers

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule, trace_call
from keras_turbo.rules.matmul import Product, einsum, product_and_bias, product_of


@rule(layers.Dense)
def dense(ctx: Any, layer: Any, inputs: Any, training: Any = None) -> Any:
    """`activation(inputs @ kernel + bias)`."""
    _no_lora(ctx, layer)
    kernel = ctx.read(layer, "_kernel")
    ctx.prefer_layout(kernel, (1, 0))
    kernel, bias = ctx.variable(kernel), ctx.variable(ctx.read(layer, "bias"))
    outputs = product_and_bias(inputs, kernel, bias)
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


@rule(layers.Embedding, mask=lambda ctx, layer, inputs, mask: _embedding_mask(ctx, layer, inputs))
def embedding(ctx: Any, layer: Any, inputs: Any) -> Any:
    """Rows of a table; negative indices count from its end, as in stock Keras."""
    _no_lora(ctx, layer)
    table = ctx.variable(ctx.read(layer, "_embeddings"))
    if inputs.dtype not in (torch.int32, torch.int64):
        inputs = inputs.to(torch.int32)
    rows = table.shape[0]
    indices = torch.add(inputs, inputs < 0, alpha=rows)
    outputs = torch.embedding(table, indices)
    dtype = compat.to_torch_dtype(ctx.read(layer, "compute_dtype"))
    return outputs if outputs.dtype == dtype else outputs.to(dtype)


def _embedding_mask(ctx: Any, layer: Any, inputs: Any) -> Any:
    return torch.ne(inputs, 0) if ctx.read(layer, "mask_zero") else None


@rule(layers.EinsumDense)
def einsum_dense(ctx: Any, layer: Any, inputs: Any, training: Any = None) -> Any:
    """`activation(einsum(equation, inputs, kernel) + bias)`."""
    _no_lora(ctx, layer)
    kernel = ctx.read(layer, "_kernel")
    equation = ctx.read(layer, "equation")
    product = product_of(equation, inputs.ndim)
    floats = inputs.dtype.is_floating_point
    if product is not None and floats:
        rank = len(kernel.shape)
        order = (*range(product.contracted, rank), *range(product.contracted))
        ctx.prefer_layout(kernel, order)
    kernel, bias = ctx.variable(kernel), ctx.variable(ctx.read(layer, "bias"))
    if product is not None and floats and inputs.dtype == kernel.dtype:
        outputs = _as_linear(product, inputs, kernel, bias)
    else:
        outputs = einsum(equation, inputs, kernel)
        if bias is not None:
            outputs = torch.add(outputs, bias)
    return ctx.apply(ctx.read(layer, "activation"), outputs)


def _as_linear(product: Product, x: Any, kernel: Any, bias: Any) -> Any:
    """A matrix product in disguise as one `linear` on views of the input and the kernel."""
    count = product.contracted
    kept = kernel.shape[count:]
    rows, columns = math.prod(kernel.shape[:count]), math.prod(kept)
    if count > 1:
        x = x.flatten(x.ndim - count)
    if len(kernel.shape) > 2:
        kernel = kernel.view(rows, columns)
    inside, outside = None, bias
    if bias is not None and tuple(bias.shape) == tuple(kept):
        inside, outside = bias.view(columns) if bias.ndim > 1 else bias, None
    outputs = F.linear(x, kernel.t(), inside)
    if len(kept) > 1:
        outputs = torch.unflatten(outputs, -1, tuple(kept))
    return outputs if outside is None else torch.add(outputs, outside)


trace_call(layers.Masking)
