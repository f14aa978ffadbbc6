"""ResNet50 as `keras.applications` defines it, in plain torch.

That is version 1: convolutions with biases, the stride in a block's first 1x1 convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keras_turbo.bench.reference.copying import copy_batch_norm, copy_conv, copy_linear


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Sequential | None = None
        if project:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride=stride), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x += shortcut
        return self.relu(x)

    def copy_from(self, model: Any, name: str) -> None:
        """Take the weights of a Keras block by the names of its layers."""
        pairs = [(self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)]
        for i, (conv, norm) in enumerate(pairs, start=1):
            copy_conv(conv, model.get_layer(f"{name}_{i}_conv"))
            copy_batch_norm(norm, model.get_layer(f"{name}_{i}_bn"))
        if self.shortcut is not None:
            conv, norm = self.shortcut
            assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
            copy_conv(conv, model.get_layer(f"{name}_0_conv"))
            copy_batch_norm(norm, model.get_layer(f"{name}_0_bn"))


class ResNet50(nn.Module):
    """A classifier of images that returns logits."""

    DEPTHS = (3, 4, 6, 3)

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages, inputs = [], 64
        for stage, depth in enumerate(self.DEPTHS):
            width = 64 * 2**stage
            blocks = [Bottleneck(inputs, width, 1 if stage == 0 else 2, project=True)]
            blocks += [Bottleneck(4 * width, width, 1, project=False) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            inputs = 4 * width
        self.stages = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.stages(x))
        return self.fc(torch.flatten(x, 1))

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        copy_conv(self.conv1, model.get_layer("conv1_conv"))
        copy_batch_norm(self.bn1, model.get_layer("conv1_bn"))
        for i, stage in enumerate(self.stages, start=2):
            assert isinstance(stage, nn.Sequential)
            for j, block in enumerate(stage, start=1):
                assert isinstance(block, Bottleneck)
                block.copy_from(model, f"conv{i}_block{j}")
        copy_linear(self.fc, model.get_layer("predictions"))
