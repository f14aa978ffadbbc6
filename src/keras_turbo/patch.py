"""The only file that assigns into Keras and torch: a ledger of patched methods.

Every patch replaces one attribute of a base class, or of a module, and is one row of the
ledger, so that models built before `enable()` are covered and `disable()` puts back the
identical objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from keras_turbo import barrier, compat, dispatch, fallback
from keras_turbo.config import Options

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One row of the ledger."""

    owner: type | ModuleType
    attribute: str
    replacement: Any
    original: Any


_ledger: list[Patch] = []


def ledger() -> tuple[Patch, ...]:
    """The patches in force."""
    return tuple(_ledger)


def install(options: Options) -> None:
    """Apply all patches; only the options change when they are in force already."""
    dispatch.options = options
    if _ledger:
        return
    from keras_turbo import rules

    rules.load()
    fallback.reset()
    layer = compat.Layer
    dispatch.stock_call = layer.__call__
    excluded = getattr(compat.traceback_utils, "_EXCLUDED_PATHS", None)
    if isinstance(excluded, tuple):
        # Keras takes its own frames out of tracebacks; ours stand among them.
        _apply(compat.traceback_utils, "_EXCLUDED_PATHS", (*excluded, *fallback.FRAMES))
    _apply(layer, "_keras_turbo", None)
    _apply(layer, "__call__", _wrapping(layer.__call__, dispatch.call))
    _apply(layer, "__setattr__", _watching_setattr(layer.__setattr__))
    _apply(layer, "__delattr__", _watching_delattr(layer.__delattr__))
    _apply(layer, "add_loss", _watching_add_loss(layer.add_loss))
    _apply(compat.Variable, "__setattr__", _watching_setattr(compat.Variable.__setattr__))
    for name in ("__setitem__", "__delitem__"):
        original = getattr(compat.DTypePolicyMap, name)
        _apply(compat.DTypePolicyMap, name, _then(original, lambda self: barrier.deopt_all()))
    for name in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_backward_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        original = getattr(torch.nn.Module, name)
        _apply(torch.nn.Module, name, _then(original, lambda self: barrier.changed(self, "hooks")))
    _apply(torch.nn.Module, "_apply", _then(torch.nn.Module._apply, _moved))
    _install_training()


def _install_training() -> None:
    from keras_turbo.training import batches, jit, loop, steps, update

    trainer, optimizer = compat.TorchTrainer, compat.BaseOptimizer
    steps.stock_train_step, steps.stock_test_step = trainer.train_step, trainer.test_step
    update.stock_apply = optimizer.apply
    _apply(trainer, "train_step", _wrapping(trainer.train_step, steps.train_step))
    _apply(trainer, "test_step", _wrapping(trainer.test_step, steps.test_step))
    jit.stock_predict_step = trainer.predict_step
    _apply(trainer, "predict_step", _wrapping(trainer.predict_step, jit.predict_step))
    for mode in ("train", "test", "predict"):
        stock = getattr(trainer, f"make_{mode}_function")
        _apply(trainer, f"make_{mode}_function", _wrapping(stock, jit.making(stock, mode)))
    _apply(optimizer, "apply", _wrapping(optimizer.apply, update.apply))
    _apply(optimizer, "__setattr__", _preparing_setattr(optimizer.__setattr__))
    _apply(compat.Metric, "__setattr__", _watching_setattr(compat.Metric.__setattr__))
    _apply(compat.Loss, "__setattr__", _watching_setattr(compat.Loss.__setattr__))
    base, callbacks, adapter = compat.Trainer, compat.CallbackList, compat.ArrayDataAdapter
    loop.stock_reset_metrics, loop.stock_symbolic_build = base.reset_metrics, base._symbolic_build
    _apply(base, "reset_metrics", _wrapping(base.reset_metrics, loop.reset_metrics))
    _apply(base, "_symbolic_build", _wrapping(base._symbolic_build, loop.symbolic_build))
    for mode in ("train", "test", "predict"):
        for moment in ("begin", "end"):
            name = f"on_{mode}_batch_{moment}"
            listeners = (name, f"on_batch_{moment}") if mode == "train" else (name,)
            stock = getattr(callbacks, name)
            _apply(callbacks, name, _wrapping(stock, loop.quiet(stock, *listeners)))
    batches.stock_get_torch_dataloader = adapter.get_torch_dataloader
    replacement = _wrapping(adapter.get_torch_dataloader, batches.get_torch_dataloader)
    _apply(adapter, "get_torch_dataloader", replacement)


def _preparing_setattr(original: Callable[..., None]) -> Callable[..., None]:
    from keras_turbo.training import update

    @functools.wraps(original)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        original(self, name, value)
        if "_keras_turbo_update" in self.__dict__:
            update.changed(self)

    return __setattr__


def remove() -> None:
    """Take all patches out again, and every inline cache with them."""
    while _ledger:
        patch = _ledger.pop()
        if patch.original is _ABSENT:
            delattr(patch.owner, patch.attribute)
        else:
            setattr(patch.owner, patch.attribute, patch.original)
    for cache in list(dispatch.caches):
        owner = cache.owner()
        if owner is not None:
            owner.__dict__.pop("_keras_turbo", None)
    from keras_turbo.training import steps, update

    steps.forget()
    update.forget()
    barrier.deopt_all()


def _apply(owner: type | ModuleType, attribute: str, replacement: Any) -> None:
    original = vars(owner).get(attribute, _ABSENT)
    setattr(owner, attribute, replacement)
    _ledger.append(Patch(owner, attribute, replacement, original))


def _wrapping(original: Any, replacement: Any) -> Any:
    return functools.update_wrapper(replacement, original)


def _stored(owner: Any, name: str) -> Any:
    attributes = owner.__dict__
    if name in attributes:
        return attributes[name]
    for table in ("_modules", "_parameters"):
        if name in attributes.get(table, ()):
            return attributes[table][name]
    return _ABSENT


def _watching_setattr(original: Callable[..., None]) -> Callable[..., None]:
    watched, changed, same = barrier.watched, barrier.changed, barrier.same
    # Dynamo cannot follow the barrier's tables.
    is_compiling = dispatch.is_compiling

    @functools.wraps(original)
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if is_compiling() or not watched(self, name):
            original(self, name, value)
            return
        before = _stored(self, name)
        original(self, name, value)
        if not same(before, _stored(self, name)):
            changed(self, name)

    return __setattr__


def _watching_delattr(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __delattr__(self: Any, name: str) -> None:
        watched = barrier.watched(self, name)
        original(self, name)
        if watched:
            barrier.changed(self, name)

    return __delattr__


def _watching_add_loss(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def add_loss(self: Any, loss: Any) -> None:
        original(self, loss)
        barrier.losses_recorded(self)

    return add_loss


def _then(original: Callable[..., Any], after: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        after(self)
        return result

    return patched


def _moved(module: Any) -> None:
    """A module's parameters were moved or cast: forget what was assumed about them."""
    if isinstance(module, compat.Layer):
        barrier.deopt_all()
