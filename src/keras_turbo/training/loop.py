"""What surrounds the steps of `fit`, `evaluate` and `predict`, without what nobody sees.

Batch callbacks that no callback implements are not dispatched, metrics are reset by one
kernel, and a model that is built is not built again for every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import barrier, compat, guard

stock_reset_metrics: Callable[..., Any] = compat.Trainer.reset_metrics
stock_symbolic_build: Callable[..., Any] = compat.Trainer._symbolic_build


def reset_metrics(self: Any) -> None:
    """Set the metrics of a model whose steps are lowered to zero, all at once."""
    states = _states(self)
    if states is None:
        stock_reset_metrics(self)
    else:
        with torch.no_grad():
            torch._foreach_zero_(states)


def _states(model: Any) -> list[torch.Tensor] | None:
    """The metrics' state tensors; None where stock Keras must reset them."""
    cache = model.__dict__.get("_keras_turbo_steps")
    if cache is None or not cache.programs or guard.thread_state.stock:
        return None
    if compat.ambient().get("stateless_scope") is not None:
        return None
    if sum(map(len, cache.metrics)) != cache.metrics_count:
        # A metric was attached to a layer since: the steps do not report it yet.
        for program in list(cache.programs):
            barrier.deopt(program)
        return None
    if cache.states is None:
        cache.states = _resettable(model)
    return cache.states or None


def _resettable(model: Any) -> list[torch.Tensor]:
    """State tensors of metrics that all start from zero; empty if some may not."""
    states: list[torch.Tensor] = []
    pending = list(model.metrics)
    while pending:
        metric = pending.pop()
        if not type(metric).__module__.startswith("keras.src."):
            return []
        if "reset_state" in vars(metric):
            return []
        pending += [m for m in getattr(metric, "metrics", []) if m is not metric]
        states += [variable._value for variable in metric.variables]
    unique = {id(state): state for state in states}
    return list(unique.values())


def symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
    """Build what is not built; nothing to do for a model whose steps are lowered."""
    cache = self.__dict__.get("_keras_turbo_steps")
    if cache is None or not cache.programs or guard.thread_state.stock:
        stock_symbolic_build(self, iterator=iterator, data_batch=data_batch)


def quiet(stock: Callable[..., Any], *methods: str) -> Callable[..., Any]:
    """A callback list's batch method that does nothing where no callback listens.

    Args:
        stock: the method of `CallbackList`.
        methods: the callback methods that it would call.
    """

    def dispatch(self: Any, batch: Any, logs: Any = None) -> None:
        for callback in self.callbacks:
            for name in methods:
                if not getattr(getattr(callback, name), "_is_default", False):
                    stock(self, batch, logs)
                    return

    return dispatch
