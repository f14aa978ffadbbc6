"""The workloads: what `keras-turbo bench` measures, by name.

Each names its Keras model, its hand-written torch model, and how to make a random input
for both. `case` builds them; nothing is built or drawn when this file is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keras_turbo.bench import models
from keras_turbo.bench.reference import (
    cnn,
    mlp,
    mobilenet,
    recurrent,
    resnet,
    single,
    transformer,
)

VOCABULARY, WIDTH, HEADS, DEPTH = 1024, 256, 4, 2

Inputs = Callable[[torch.Generator], torch.Tensor]


def call(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The plain forward pass."""
    return model(x)


def same(x: torch.Tensor) -> torch.Tensor:
    """A tensor that both libraries lay out alike."""
    return x


def channels_first(images: torch.Tensor) -> torch.Tensor:
    """A batch of Keras's images as torch users hold them."""
    return images.permute(0, 3, 1, 2).contiguous()


def generate(model: Any, window: torch.Tensor, tokens: int = 32) -> torch.Tensor:
    """Greedy decoding by sliding a window of constant length over the ids."""
    chosen = []
    for _ in range(tokens):
        token = model(window)[:, -1].argmax(-1, keepdim=True)
        chosen.append(token)
        window = torch.cat((window[:, 1:], token), 1)
    return torch.cat(chosen, 1)


@dataclass(frozen=True)
class Workload:
    """One thing to measure.

    Attributes:
        name: as on the command line.
        about: one line for `--list`.
        keras_model: builds the Keras model.
        reference: builds the hand-written torch model, whose `copy_from` takes the weights.
        inputs: draws a random input for the Keras model.
        run: calls a model with an input.
        to_reference: turns the Keras input into the input of the hand-written model.
        to_keras: turns the output of the hand-written model into Keras's layout.
        quick: whether `--quick` includes it.
    """

    name: str
    about: str
    keras_model: Callable[[], Any]
    reference: Callable[[], Any]
    inputs: Inputs
    run: Callable[[Any, torch.Tensor], torch.Tensor] = call
    to_reference: Callable[[torch.Tensor], torch.Tensor] = same
    to_keras: Callable[[torch.Tensor], torch.Tensor] = same
    quick: bool = False


def _normal(*shape: int) -> Inputs:
    return lambda generator: torch.randn(*shape, generator=generator)


def _ids(*shape: int) -> Inputs:
    return lambda generator: torch.randint(VOCABULARY, shape, generator=generator)


def _mlp(name: str, batch: int) -> Workload:
    return Workload(
        name,
        f"8 x Dense(64, relu), batch {batch}",
        lambda: models.mlp(64, 8),
        lambda: mlp.MLP(64, 8),
        _normal(batch, 64),
        quick=True,
    )


def _llm(name: str, about: str, inputs: Inputs, quick: bool, run: Any = call) -> Workload:
    size = (VOCABULARY, WIDTH, HEADS, DEPTH)
    return Workload(
        name,
        about,
        lambda: models.transformer(*size),
        lambda: transformer.Transformer(*size),
        inputs,
        run,
        quick=quick,
    )


def _recurrent(name: str, kind: str, both: bool = False) -> Workload:
    layer = f"{'Bidirectional ' if both else ''}{kind}(80)"
    return Workload(
        name,
        f"2 x {layer}, batch 32 x 50 x 80",
        lambda: models.recurrent(kind, 80, 80, 2, both),
        lambda: recurrent.Recurrent(getattr(nn, kind), 80, 80, 2, both),
        _normal(32, 50, 80),
    )


def _images(name: str, about: str, keras_model: Any, reference: Any, pixels: int) -> Workload:
    return Workload(
        name,
        f"{about}, {pixels} px, batch 1",
        lambda: keras_model(pixels),
        reference,
        _normal(1, pixels, pixels, 3),
        to_reference=channels_first,
    )


ALL = (
    _mlp("mlp8", 16),
    _mlp("mlp8_b1", 1),
    Workload(
        "cnn",
        "3 x Conv2D with pooling, 114K parameters, 32 px, batch 4",
        models.cnn,
        cnn.CNN,
        _normal(4, 32, 32, 3),
        to_reference=channels_first,
        quick=True,
    ),
    _llm("llm", "causal transformer, 2 layers, 256 wide, batch 4 x 64", _ids(4, 64), True),
    _llm("llm_small", "the same transformer, batch 1 x 8", _ids(1, 8), True),
    _llm("generate32", "32 greedy tokens, sliding a window of 64", _ids(1, 64), True, generate),
    _images("resnet50_64", "keras.applications.ResNet50", models.resnet50, resnet.ResNet50, 64),
    _images("resnet50_224", "keras.applications.ResNet50", models.resnet50, resnet.ResNet50, 224),
    _images(
        "mobilenetv2_64",
        "keras.applications.MobileNetV2",
        models.mobilenet_v2,
        mobilenet.MobileNetV2,
        64,
    ),
    Workload(
        "dense512",
        "one Dense(512, relu), batch 32",
        lambda: models.dense(512, 512),
        lambda: single.Linear(512, 512),
        _normal(32, 512),
    ),
    Workload(
        "einsum256",
        "one EinsumDense to 4 heads of 64, batch 4 x 64",
        lambda: models.einsum_dense(256, 4, 64),
        lambda: single.HeadsLinear(256, 4, 64),
        _normal(4, 64, 256),
    ),
    Workload(
        "conv64",
        "one Conv2D(64, 3, relu), 32 px, batch 4",
        lambda: models.conv(64, 64),
        lambda: single.Conv(64, 64),
        _normal(4, 32, 32, 64),
        to_reference=channels_first,
        to_keras=lambda x: x.permute(0, 2, 3, 1),
    ),
    Workload(
        "layernorm256",
        "one LayerNormalization, batch 4 x 64 x 256",
        lambda: models.layer_norm(256),
        lambda: single.Norm(256),
        _normal(4, 64, 256),
    ),
    Workload(
        "attention256",
        "one causal MultiHeadAttention, batch 4 x 64 x 256",
        lambda: models.attention(256, 4),
        lambda: single.Attention(256, 4),
        _normal(4, 64, 256),
    ),
    _recurrent("lstm", "LSTM"),
    _recurrent("gru", "GRU"),
    _recurrent("bilstm", "LSTM", both=True),
)

WORKLOADS = {workload.name: workload for workload in ALL}
