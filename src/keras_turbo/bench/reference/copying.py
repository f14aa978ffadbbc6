"""Copying the weights of Keras layers into torch modules.

The hand-written models use these helpers in their `copy_from`; every copy lands in the
parameter that torch allocated, in torch's own memory layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def copy_linear(linear: nn.Linear, dense: Any) -> None:
    """Copy a Keras Dense into a Linear."""
    put(linear.weight, tensor(dense.kernel).t())
    put(linear.bias, tensor(dense.bias))


def copy_conv(conv: nn.Conv2d, layer: Any) -> None:
    """Copy a Keras Conv2D or DepthwiseConv2D into a Conv2d."""
    kernel = tensor(layer.kernel)
    depthwise = conv.groups > 1
    put(conv.weight, kernel.permute(2, 3, 0, 1) if depthwise else kernel.permute(3, 2, 0, 1))
    if conv.bias is not None:
        put(conv.bias, tensor(layer.bias))


def copy_batch_norm(norm: nn.BatchNorm2d, layer: Any) -> None:
    """Copy a Keras BatchNormalization, statistics and epsilon too."""
    put(norm.weight, tensor(layer.gamma))
    put(norm.bias, tensor(layer.beta))
    put(norm.running_mean, tensor(layer.moving_mean))
    put(norm.running_var, tensor(layer.moving_variance))
    norm.eps = layer.epsilon


def copy_layer_norm(norm: nn.LayerNorm, layer: Any) -> None:
    """Copy a Keras LayerNormalization and its epsilon."""
    put(norm.weight, tensor(layer.gamma))
    put(norm.bias, tensor(layer.beta))
    norm.eps = layer.epsilon


def tensor(variable: Any) -> torch.Tensor:
    """The value of a Keras variable, outside any graph."""
    return variable.value.detach()


def put(target: torch.Tensor | None, value: torch.Tensor) -> None:
    """Write a value into a parameter or buffer, in place."""
    if target is None:
        raise ValueError("The hand-written model lacks a weight that the Keras model has.")
    with torch.no_grad():
        target.copy_(value.reshape(target.shape))
