"""Single layers in plain torch, for the workloads that time one layer at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keras_turbo.bench.reference.copying import (
    copy_conv,
    copy_layer_norm,
    copy_linear,
    put,
    tensor,
)
from keras_turbo.bench.reference.transformer import CausalSelfAttention


class Linear(nn.Module):
    """A linear layer with a relu."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        copy_linear(self.linear, model.layers[-1])


class HeadsLinear(nn.Module):
    """A linear layer whose output is split into heads."""

    def __init__(self, inputs: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.linear = nn.Linear(inputs, heads * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(*x.shape[:-1], self.heads, self.size)

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        layer = model.layers[-1]
        put(self.linear.weight, tensor(layer.kernel).flatten(1).t())
        put(self.linear.bias, tensor(layer.bias))


class Conv(nn.Module):
    """A 3x3 convolution that keeps the image size, with a relu."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding="same")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        copy_conv(self.conv, model.layers[-1])


class Norm(nn.Module):
    """A layer normalization."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        copy_layer_norm(self.norm, model.layers[-1])


class Attention(nn.Module):
    """A causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(width, heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x)

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        self.attention.copy_from(model.layers[-1])
