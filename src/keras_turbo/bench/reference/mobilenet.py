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


class ConvNorm(nn.Sequential):
    """A convolution without bias, a batch normalization and, if wanted, a relu6."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, groups: int, active: bool
    ) -> None:
        blocks: list[nn.Module] = []
        if stride > 1:
            blocks.append(nn.ZeroPad2d((0, 1, 0, 1)))
        padding = 0 if stride > 1 else kernel // 2
        self.conv = nn.Conv2d(
            inputs, outputs, kernel, stride=stride, padding=padding, groups=groups, bias=False
        )
        blocks += [self.conv, nn.BatchNorm2d(outputs)]
        if active:
            blocks.append(nn.ReLU6(inplace=True))
        super().__init__(*blocks)
