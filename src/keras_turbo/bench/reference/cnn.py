"""The small convolutional network of the workload `cnn`, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keras_turbo.bench.reference.copying import copy_conv, copy_linear


class CNN(nn.Module):
    """Three convolutions, a max pooling, a global average and a classifier."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding="same"),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding="same"),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(128, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        convs = [m for m in self.features if isinstance(m, nn.Conv2d)]
        *layers, dense = [layer for layer in model.layers if layer.weights]
        for conv, layer in zip(convs, layers, strict=True):
            copy_conv(conv, layer)
        copy_linear(self.classifier, dense)
