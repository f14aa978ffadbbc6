"""The multilayer perceptron of the workloads `mlp8` and `mlp8_b1`, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keras_turbo.bench.reference.copying import copy_linear


class MLP(nn.Module):
    """A stack of equally wide linear layers, each with a relu."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for _ in range(depth):
            blocks += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        linears = [m for m in self.layers if isinstance(m, nn.Linear)]
        for linear, dense in zip(linears, model.layers, strict=True):
            copy_linear(linear, dense)
