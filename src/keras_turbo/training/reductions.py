"""Losses and running means reduced in a few operations.

Keras reduces them with general code: shapes become tensors, divisions guard every element
against zero. For a scalar the same value takes one addition or division. Everything with
weights or masks goes through Keras's own code, traced.
"""

from __future__ import annotations

from typing import Any

import torch
from keras.src.losses.loss import reduce_weighted_values
from keras.src.metrics.reduction_metrics import Mean, MeanMetricWrapper

from keras_turbo import compat
from keras_turbo.calls import mask_of
from keras_turbo.fallback import Decline, Reason
from keras_turbo.values import is_value

_AVERAGES = frozenset({"sum_over_batch_size", "mean", "mean_with_sample_weight"})


def quotient(total: torch.Tensor, count: Any) -> torch.Tensor:
    """A scalar divided by a number, zero where that is zero."""
    if isinstance(count, torch.Tensor) and not count.is_cpu:
        # A branch would wait for the device.
        return torch.where(count == 0, torch.zeros_like(total), total / count)
    return total / count if count else torch.zeros_like(total)


quotient.one_node = True  # type: ignore[attr-defined]

quotient.meta = lambda total, count: torch.empty_like(total)  # type: ignore[attr-defined]


def loss_value(ctx: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """What a loss object returns for traced tensors."""
    if not is_shipped(loss):
        return _own_loss(ctx, loss, y_true, y_pred, sample_weight)
    if type(loss).__call__ is not compat.Loss.__call__ or not is_value(y_true):
        return ctx.trace(ctx.view(loss), y_true, y_pred, sample_weight)
    in_mask = mask_of(y_pred)
    dtype = compat.to_torch_dtype(loss.dtype)
    y_pred, y_true = _to(y_pred, dtype), _to(y_true, dtype)
    view = ctx.view(loss)
    values = ctx.trace(view.call, y_true, y_pred)
    reduction = view.reduction
    masks = [mask for mask in (in_mask, mask_of(values)) if mask is not None]
    plain = sample_weight is None and not masks and reduction in _AVERAGES
    if plain and is_value(values) and values.ndim > 0 and values.dtype == dtype:
        return divide(ctx, torch.sum(values), values.numel())
    mask = masks[0] & masks[1] if len(masks) == 2 else (masks[0] if masks else None)
    return ctx.trace(
        reduce_weighted_values,
        values,
        sample_weight=sample_weight,
        mask=mask,
        reduction=reduction,
        dtype=loss.dtype,
    )


def is_shipped(item: Any) -> bool:
    """Whether a loss or metric is Keras's own, and the function that it wraps is too."""
    if not type(item).__module__.startswith("keras.src."):
        return False
    wrapped = vars(item).get("fn") or vars(item).get("_fn")
    return wrapped is None or getattr(wrapped, "__module__", "").startswith("keras.src.")


class OwnLoss:
    """A callable node target that runs a user's loss as it is, at every step."""

    __name__ = __qualname__ = "own_loss"
    __module__ = "keras_turbo.training.reductions"

    def __init__(self, loss: Any) -> None:
        self.loss = loss

    def __call__(self, y_true: Any, y_pred: Any, mask: Any, sample_weight: Any) -> Any:
        if mask is not None:
            y_pred._keras_mask = mask
        value = self.loss(y_true, y_pred, sample_weight)
        value = compat.backend.cast(value, self.loss.dtype)
        if value.ndim:
            raise Decline(Reason.UNSUPPORTED, "a loss that is no scalar")
        return value

    def meta(self, *_: Any) -> Any:
        dtype = compat.to_torch_dtype(self.loss.dtype)
        return torch.empty((), dtype=dtype, device="meta")


def _own_loss(ctx: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    arguments = y_true, y_pred, mask_of(y_pred), sample_weight
    return ctx.tracer.create_proxy("call_function", OwnLoss(loss), arguments, {})


class OwnPenalty:
    """A callable node target that runs a user's regularizer as it is, at every step."""

    __name__ = __qualname__ = "own_penalty"
    __module__ = "keras_turbo.training.reductions"

    def __init__(self, regularizer: Any) -> None:
        self.regularizer = regularizer

    def __call__(self, weight: Any) -> Any:
        value = self.regularizer(weight)
        return compat.backend.cast(compat.backend.convert_to_tensor(value), weight.dtype).sum()

    def meta(self, weight: Any) -> Any:
        return torch.empty((), dtype=weight.dtype, device="meta")


def own_penalty(ctx: Any, regularizer: Any, weight: Any) -> Any:
    """What a user's regularizer returns for a traced weight."""
    return ctx.tracer.create_proxy("call_function", OwnPenalty(regularizer), (weight,), {})


def divide(ctx: Any, total: Any, count: Any) -> Any:
    """`quotient` as one operation of the program."""
    if isinstance(count, int):
        return total / count if count else torch.zeros_like(total)
    return ctx.tracer.create_proxy("call_function", quotient, (total, count), {})


def _to(value: Any, dtype: torch.dtype) -> Any:
    return value if value.dtype == dtype else value.to(dtype)


def update_metric(ctx: Any, metric: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> None:
    """Update one compiled metric with traced tensors."""
    kind = type(metric)
    simple = (
        isinstance(metric, MeanMetricWrapper)
        and kind.update_state is MeanMetricWrapper.update_state
        and sample_weight is None
        and mask_of(y_pred) is None
    )
    if not simple:
        ctx.trace(ctx.view(metric).update_state, y_true, y_pred, sample_weight=sample_weight)
        return
    view = ctx.view(metric)
    values = ctx.trace(view._fn, y_true, y_pred, **view._fn_kwargs)
    dtype = compat.to_torch_dtype(metric.dtype)
    values = _to(values, dtype)
    if values.ndim > 1:
        values = torch.mean(values, list(range(1, values.ndim)))
    count = values.shape[0] if values.ndim else 1
    ctx.assign(metric.total, ctx.variable(metric.total) + torch.sum(values))
    ctx.assign(metric.count, ctx.variable(metric.count) + count)


def result(ctx: Any, metric: Any) -> Any:
    """A metric's result after its update."""
    if isinstance(metric, Mean) and type(metric).result is Mean.result:
        return ctx.tracer.create_proxy(
            "call_function", quotient, (ctx.variable(metric.total), ctx.variable(metric.count)), {}
        )
    return ctx.trace(ctx.view(metric).result)
