"""Train and test steps as programs: forward, loss and metrics in one straight line.

`train_step` and `test_step` take the place of the trainer's methods. A step is lowered
like a layer's call, with the loss and the metrics traced behind the forward pass; the
backward pass is autograd's, the update the optimizer's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import barrier, compat, dispatch, guard
from keras_turbo.fallback import Decline, Reason
from keras_turbo.guard import MISS
from keras_turbo.program import build
from keras_turbo.specs import kind_of
from keras_turbo.training import body

stock_train_step: Callable[..., Any] = compat.TorchTrainer.train_step
stock_test_step: Callable[..., Any] = compat.TorchTrainer.test_step
_models: weakref.WeakSet[Any] = weakref.WeakSet()
MAX_ENTRIES = 16


class StepCache:
    """A model's lowered steps: entries for training and for testing."""

    def __init__(self) -> None:
        self.entries: dict[bool, tuple[Any, ...]] = {True: (), False: ()}
        self.programs: list[Any] = []
        self.declined: dict[bool, Decline] = {}
        self.parameters: list[torch.Tensor] = []
        self.trainable: list[Any] = []
        self.states: list[torch.Tensor] | None = None

    def discard(self, program: Any) -> None:
        """Forget everything: what one step assumed, the others assumed too."""
        self.__init__()

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def train_step(self: Any, data: Any) -> Any:
    """One training step on a batch: lowered where possible, else stock Keras."""
    found = _outputs(self, data, True)
    if found is None:
        return stock_train_step(self, data)
    loss, logs = found
    cache = self.__dict__["_keras_turbo_steps"]
    for parameter in cache.parameters:
        parameter.grad = None
    loss.backward()
    variables = cache.trainable
    with torch.no_grad():
        self.optimizer.apply([v._value.grad for v in variables], variables)
    return logs


def test_step(self: Any, data: Any) -> Any:
    """One evaluation step on a batch: lowered where possible, else stock Keras."""
    found = _outputs(self, data, False)
    return stock_test_step(self, data) if found is None else found[1]


def _outputs(model: Any, data: Any, training: bool) -> Any:
    """The loss and the logs of a lowered step; None where stock Keras must run it."""
    if type(data) is not tuple or torch.compiler.is_compiling():
        return None
    args = data + (None,) * (3 - len(data))
    cache = model.__dict__.get("_keras_turbo_steps")
    if cache is None:
        cache = model.__dict__["_keras_turbo_steps"] = StepCache()
        _models.add(model)
    for entry in cache.entries[training]:
        outputs = entry(args, {})
        if outputs is not MISS:
            return outputs
    entry = _lower(model, cache, args, training)
    if entry is None:
        return None
    outputs = entry(args, {})
    return None if outputs is MISS else outputs


def _lower(model: Any, cache: StepCache, args: Any, training: bool) -> Any:
    if guard.thread_state.stock or training in cache.declined or len(args) != 3:
        return None
    if guard.ambient_reason() is not None or len(cache.entries[training]) >= MAX_ENTRIES:
        return None
    if compat.ambient().get("current_call_ctx") is not None:
        return None
    try:
        with barrier.lock:
            body.check(model, training)
            if not model.built or not _ready(model):
                return None
            kind = kind_of(("x", "y", "sample_weight"), args, {}, _static_axes(model))
            program = build(model, kind, body.train if training else body.test)
            if program.stock_calls:
                raise Decline(Reason.NO_RULE, "a layer of the model runs stock Keras")
            program.home = "_keras_turbo_steps"
            barrier.protect(program)
            cache.programs.append(program)
            cache.trainable = model.trainable_weights[:]
            cache.parameters = list(model.parameters())
            entry = guard.compile_entry(program, model)
            cache.entries[training] = (entry, *cache.entries[training])
            return entry
    except Decline as declined:
        cache.declined[training] = declined
        return None


def _ready(model: Any) -> bool:
    """Whether loss and metrics have been built, which stock Keras does at the first step."""
    for part in (model._compile_loss, model._compile_metrics):
        if part is not None and not part.built:
            return False
    return model.optimizer is None or model.optimizer.built


def _static_axes(model: Any) -> Callable[[int, Any], frozenset[int]]:
    home = compat.default_device()

    def axes(position: int, tensor: torch.Tensor) -> frozenset[int]:
        if tensor.device != home:
            raise Decline(Reason.DEVICE, f"a batch on {tensor.device}")
        known = dispatch.axes_to_guard(model, position, tensor.ndim, tensor.dtype)
        return known | frozenset(range(1, tensor.ndim))

    return axes


def forget() -> None:
    """Drop all lowered steps."""
    for model in list(_models):
        model.__dict__.pop("_keras_turbo_steps", None)
