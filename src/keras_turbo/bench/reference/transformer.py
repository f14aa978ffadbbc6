"""The causal transformer of `llm`, `llm_small` and `generate32`, in plain torch.

Written as nanoGPT-style code is: one linear layer for queries, keys and values, and
`scaled_dot_product_attention` with `is_causal=True`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from keras_turbo.bench.reference.copying import copy_layer_norm, copy_linear, put, tensor


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention in which a token sees itself and what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(y.transpose(1, 2).reshape(batch, length, width))

    def copy_from(self, layer: Any) -> None:
        """Take the weights of a Keras MultiHeadAttention."""
        width = self.project.in_features
        parts = (layer.query_dense, layer.key_dense, layer.value_dense)
        kernels = [tensor(part.kernel).reshape(width, width).t() for part in parts]
        put(self.qkv.weight, torch.cat(kernels))
        put(self.qkv.bias, torch.cat([tensor(part.bias).flatten() for part in parts]))
        put(self.project.weight, tensor(layer.output_dense.kernel).reshape(width, width).t())
        put(self.project.bias, tensor(layer.output_dense.bias))


class Block(nn.Module):
    """A pre-normalized transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """A causal language model: token ids to logits."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        layer = model.get_layer
        put(self.tokens.weight, tensor(layer("tokens").embeddings))
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            copy_layer_norm(block.norm_1, layer(f"norm_1_{i}"))
            block.attention.copy_from(layer(f"attention_{i}"))
            copy_layer_norm(block.norm_2, layer(f"norm_2_{i}"))
            up, _, down = block.mlp
            assert isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
            copy_linear(up, layer(f"up_{i}"))
            copy_linear(down, layer(f"down_{i}"))
        copy_layer_norm(self.norm, layer("norm"))
        copy_linear(self.head, layer("head"))
