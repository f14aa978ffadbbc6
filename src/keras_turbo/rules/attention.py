"""Rules for `keras.layers` attention layers and `keras.ops.dot_product_attention`.

Attention without scores or dropout runs torch's fused kernel, with the masks and the scale
that stock Keras gives it; otherwise Keras's own sequence of operations is traced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from keras import layers

from keras_turbo import compat
from keras_turbo.calls import mask_of
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule
from keras_turbo.rules.matmul import cast, result_dtype


@rule(layers.MultiHeadAttention)
def multi_head_attention(  # noqa: PLR0913, the signature is that of Keras's `call`
    ctx: Any,
    layer: Any,
    query: Any,
    value: Any,
    key: Any = None,
    query_mask: Any = None,
    value_mask: Any = None,
    key_mask: Any = None,
    attention_mask: Any = None,
    return_attention_scores: bool = False,
    training: Any = None,
    use_causal_mask: bool = False,
) -> Any:
    """Projections, attention over heads, output projection."""
    view = ctx.view(layer)
    key = value if key is None else key
    query_mask = mask_of(query)
    # Stock Keras takes the masks off its inputs: what follows must not see them.
    for item in (query, value, key):
        item._keras_mask = None
    masks = (query_mask, value_mask, key_mask, attention_mask)
    causal_only = (
        use_causal_mask
        and all(mask is None for mask in masks)
        and ctx.read(layer, "_sliding_window") is None
    )
    if causal_only:
        attention_mask = None
    else:
        attention_mask = ctx.trace(
            view._compute_attention_mask,
            query,
            value,
            query_mask=query_mask,
            value_mask=value_mask,
            key_mask=key_mask,
            attention_mask=attention_mask,
            use_causal_mask=use_causal_mask,
        )
    gate = view._gate_dense(query) if ctx.read(layer, "_use_gate") else None
    projected = (view._query_dense(query), view._key_dense(key), view._value_dense(value))
    outputs, scores = _attend(
        ctx, layer, projected, attention_mask, training, return_attention_scores, causal_only
    )
    outputs = view._output_dense(outputs if gate is None else torch.mul(outputs, gate))
    if query_mask is not None:
        outputs._keras_mask = query_mask
    return (outputs, scores) if return_attention_scores else outputs


def _attend(
    ctx: Any,
    layer: Any,
    projected: tuple[Any, Any, Any],
    mask: Any,
    training: Any,
    return_scores: bool,
    causal: bool,
) -> tuple[Any, Any]:
    query, key, value = projected
    flash = ctx.read(layer, "_flash_attention")
    if ctx.read(layer, "_dropout") > 0.0 or return_scores or query.ndim != 4:
        extra = {"use_causal_mask": True} if causal else {}
        return ctx.trace(
            ctx.view(layer)._compute_attention,
            query,
            key,
            value,
            mask,
            training,
            return_scores,
            **extra,
        )
    if mask is not None:
        axis = -2 * len(ctx.read(layer, "_attention_axes")) - 1
        for _ in range(4 - mask.ndim):
            mask = ctx.trace(compat.ops.expand_dims, mask, axis=axis)
        mask = cast(mask, torch.bool)
    scale = ctx.read(layer, "_inverse_sqrt_key_dim")
    return dot_product_attention(ctx, query, key, value, None, mask, scale, causal, flash), None


@rule(compat.ops.nn.DotProductAttention)
def dot_product_attention_operation(
    ctx: Any,
    operation: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: Any = None,
) -> Any:
    """`keras.ops.dot_product_attention` as a node of a Functional graph."""
    if operation.attn_logits_soft_cap is not None:
        raise Decline(Reason.UNSUPPORTED, "attn_logits_soft_cap")
    return dot_product_attention(
        ctx, query, key, value, bias, mask, scale, operation.is_causal, operation.flash_attention
    )


def dot_product_attention(
    ctx: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    scale: Any,
    causal: bool,
    flash: Any,
) -> Any:
    """Attention of `(batch, length, heads, size)` tensors, as stock Keras computes it."""
    if any(item.ndim != 4 for item in (query, key, value)) or (
        bias is not None and mask is not None
    ):
        raise Decline(Reason.UNSUPPORTED, "arguments that stock Keras refuses")
    if query.device.type != "cpu":
        # Which kernel stock Keras takes depends on the tensors themselves there.
        return compat.opaque_attention(ctx, query, key, value, bias, mask, scale, causal, flash)
    if flash is True:
        raise Decline(Reason.UNSUPPORTED, "flash attention on the CPU")
    dtype = result_dtype(query, key, value)
    query, key, value = (cast(item, dtype) for item in (query, key, value))
    if mask is not None:
        mask = cast(mask, torch.bool)
        if causal:
            ones = query.new_ones((query.shape[1], key.shape[1]), dtype=torch.bool)
            mask = torch.logical_and(mask, torch.tril(ones))
        causal = False
        mask = torch.where(mask, 0.0, ctx.trace(compat.large_negative, dtype))
    if bias is not None:
        mask = cast(bias, dtype)
    query, key, value = (torch.transpose(item, 1, 2) for item in (query, key, value))
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads > kv_heads > 1:
        key = torch.repeat_interleave(key, heads // kv_heads, dim=1)
        value = torch.repeat_interleave(value, heads // kv_heads, dim=1)
    if mask is not None:
        mask = mask.contiguous()
    outputs = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )
    return torch.transpose(outputs, 2, 1)
