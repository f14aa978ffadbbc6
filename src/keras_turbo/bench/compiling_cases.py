"""The workloads of `--compile`: pairs of functions that do the same work, ready to compile.

A forward pass is `torch.compile` around either model. A training step is a batch of a model
compiled with `jit_compile=True` against what a good user writes: model and loss under
`torch.compile`, a backward pass, and a step of the fused optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import torch
import torch.nn.functional as F

from keras_turbo.bench.case import prepare, turbo_on
from keras_turbo.bench.workloads import VOCABULARY, WORKLOADS, Workload

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Pair:
    """Two functions to compile and compare.

    Attributes:
        turbo: makes the function of the Keras model.
        hand: makes the function of the hand-written model.
        batch: the arguments of both, as often as large as the workload's own.
        backend: what compiles for Dynamo.
    """

    turbo: Callable[[], Callable[..., torch.Tensor]]
    hand: Callable[[], Callable[..., torch.Tensor]]
    batch: Callable[[int], Batch]
    backend: Any


def forward(workload: Workload, backend: Any = "inductor") -> Pair:
    """The forward pass without gradients."""
    case = prepare(workload)
    inputs = {scale: torch.cat([case.x] * scale) for scale in (1, 2, 3)}
    to_reference = {id(x): workload.to_reference(x) for x in inputs.values()}

    def turbo() -> Callable[..., torch.Tensor]:
        turbo_on()
        compiled = torch.compile(case.turbo_model, backend=backend)
        return torch.no_grad()(compiled)

    def hand() -> Callable[..., torch.Tensor]:
        compiled = torch.compile(case.reference, backend=backend)
        return torch.no_grad()(lambda x: workload.to_keras(compiled(to_reference[id(x)])))

    return Pair(turbo, hand, lambda scale: (inputs[scale],), backend)


@dataclass(frozen=True)
class Training:
    """What a training step is made of, beside its model.

    Attributes:
        loss: makes the loss for Keras.
        hand_loss: the same for the hand-written model.
        targets: targets for an input.
    """

    loss: Callable[[], Any]
    hand_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    targets: Callable[[torch.Tensor], torch.Tensor]


def training(workload: Workload, how: Training, backend: Any = "inductor") -> Pair:
    """A training step with Adam; its result is the loss of the batch."""
    case = prepare(workload)
    inputs = {scale: torch.cat([case.x] * scale) for scale in (1, 2, 3)}
    targets = {scale: how.targets(x) for scale, x in inputs.items()}

    def turbo() -> Callable[..., torch.Tensor]:
        turbo_on()
        model = case.turbo_model
        model.compile("adam", how.loss(), jit_compile=True)

        @torch.enable_grad()
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.tensor(model.train_on_batch(x, y))

        return step

    def hand() -> Callable[..., torch.Tensor]:
        model = case.reference.train()
        optimizer = torch.optim.Adam(model.parameters(), fused=True)

        @torch.compile(backend=backend)
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return how.hand_loss(model(x), y)

        @torch.enable_grad()
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            optimizer.step()
            return torch.tensor(loss.item())

        return step

    return Pair(turbo, hand, lambda scale: (inputs[scale], targets[scale]), backend)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(len(x)))


def _ids(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(x))
    return torch.randint(VOCABULARY, x.shape, generator=generator)


REGRESSION = Training(keras.losses.MeanSquaredError, F.mse_loss, _numbers)
NEXT_TOKENS = Training(
    lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    lambda logits, ids: F.cross_entropy(logits.flatten(0, 1), ids.flatten()),
    _ids,
)

CASES: dict[str, Callable[[Any], Pair]] = {
    "mlp8": lambda backend: forward(WORKLOADS["mlp8"], backend),
    "cnn": lambda backend: forward(WORKLOADS["cnn"], backend),
    "llm": lambda backend: forward(WORKLOADS["llm"], backend),
    "train_mlp8": lambda backend: training(WORKLOADS["mlp8"], REGRESSION, backend),
    "train_llm": lambda backend: training(WORKLOADS["llm"], NEXT_TOKENS, backend),
}
"""The pair of each workload, by name, for what compiles for Dynamo."""
