"""MobileNetV2 as `keras.applications` defines it, in plain torch.

A strided convolution pads only at the bottom and the right, as TensorFlow's "same" does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keras_turbo.bench.reference.copying import copy_batch_norm, copy_conv, copy_linear

# Expansion, output channels, repeats and first stride of each stage.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def conv_norm(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution without bias and its batch normalization."""
    padding = kernel // 2 if stride == 1 else 0
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    pad: list[nn.Module] = [nn.ZeroPad2d((0, 1, 0, 1))] if stride > 1 else []
    return [*pad, conv, nn.BatchNorm2d(outputs)]


class InvertedResidual(nn.Module):
    """Expand, filter each channel, project; with a shortcut where the shapes allow it."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        blocks: list[nn.Module] = []
        if expansion > 1:
            blocks += [*conv_norm(inputs, width), nn.ReLU6(inplace=True)]
        blocks += [*conv_norm(width, width, 3, stride, groups=width), nn.ReLU6(inplace=True)]
        blocks += conv_norm(width, outputs)
        self.layers = nn.Sequential(*blocks)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV2(nn.Module):
    """A classifier of images that returns logits."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        blocks: list[nn.Module] = [*conv_norm(3, 32, 3, 2), nn.ReLU6(inplace=True)]
        inputs = 32
        for expansion, outputs, repeats, stride in STAGES:
            for i in range(repeats):
                blocks.append(InvertedResidual(inputs, outputs, stride if i == 0 else 1, expansion))
                inputs = outputs
        blocks += [*conv_norm(inputs, 1280), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(1280, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model; both list their layers in the same order."""
        convs = [m for m in self.modules() if isinstance(m, nn.Conv2d)]
        norms = [m for m in self.modules() if isinstance(m, nn.BatchNorm2d)]
        for conv, layer in zip(convs, _of(model, "Conv2D", "DepthwiseConv2D"), strict=True):
            copy_conv(conv, layer)
        for norm, layer in zip(norms, _of(model, "BatchNormalization"), strict=True):
            copy_batch_norm(norm, layer)
        copy_linear(self.classifier, model.get_layer("predictions"))


def _of(model: Any, *classes: str) -> list[Any]:
    return [layer for layer in model.layers if type(layer).__name__ in classes]
