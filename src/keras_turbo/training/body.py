"""What a step computes, as plain calls on traced values.

The forward pass goes through the lowering context; the compiled loss, the additional
losses, the loss tracker and the compiled metrics are Keras's own code, traced through
stand-ins, so that their state writes become effects of the program. Losses that are the
user's own code are called as they are, at every step.
"""

from __future__ import annotations

from typing import Any

import torch
from keras.src.metrics.reduction_metrics import Mean
from keras.src.models.model import Model
from keras.src.trainers.compile_utils import CompileLoss, CompileMetrics

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.penalties import penalty
from keras_turbo.training.reductions import (
    is_shipped,
    loss_value,
    own_penalty,
    result,
    update_metric,
)
from keras_turbo.values import is_value

_METHODS = (
    "__call__",
    "compute_loss",
    "_compute_loss",
    "_aggregate_additional_loss",
    "losses",
    "trainable_weights",
    "zero_grad",
)
_METRIC_METHODS = ("compute_metrics", "get_metrics_result", "metrics")
_PARTS = ("_compile_loss", "_compile_metrics", "_loss_tracker", "optimizer", "_metrics", "compiled")


def parts(model: Any) -> tuple[Any, ...]:
    """What `compile` sets anew."""
    return model._compile_loss, model._compile_metrics, model._loss_tracker, model.optimizer


def check(model: Any, training: bool) -> None:
    """Decline a model that changes what a step does."""
    for name in _METHODS:
        if _overrides(model, name):
            raise Decline(Reason.OVERRIDE, f"{type(model).__name__}.{name}")
    if not model._call_has_training_arg or not model.compiled:
        raise Decline(Reason.UNSUPPORTED, "a model that is not compiled")
    if type(model._loss_tracker) is not Mean:
        raise Decline(Reason.UNSUPPORTED, "another loss tracker")
    if training and (model.optimizer is None or not model.trainable_weights):
        raise Decline(Reason.UNSUPPORTED, "nothing to train")
    for part, expected in (
        (model._compile_loss, CompileLoss),
        (model._compile_metrics, CompileMetrics),
    ):
        if part is not None and type(part) is not expected:
            raise Decline(Reason.UNSUPPORTED, f"{type(part).__name__}")


def metrics_apart(model: Any) -> bool:
    """Whether the metrics are the user's own code, which runs behind the program as written."""
    if any(_overrides(model, name) for name in _METRIC_METHODS):
        return True
    found = []
    for metric in model.metrics:
        found += metric.metrics if type(metric) is CompileMetrics else [metric]
    return not all(is_shipped(metric) for metric in found)


def _overrides(model: Any, name: str) -> bool:
    return getattr(type(model), name) is not getattr(Model, name) or name in vars(model)


class Step:
    """The body of a step, for `build`.

    Args:
        training: whether it is a training step.
        apart: whether it returns the predictions instead of the logs.
    """

    def __init__(self, training: bool, apart: bool) -> None:
        self.training = training
        self.apart = apart

    def __call__(self, ctx: Any, model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
        try:
            return self._traced(ctx, model, x, y, sample_weight)
        except Decline:
            raise
        except Exception as error:  # the step itself goes to stock Keras then
            raise Decline(Reason.CONTROL_FLOW, f"{type(error).__name__}: {error}") from error

    def _traced(self, ctx: Any, model: Any, x: Any, y: Any, sample_weight: Any) -> Any:
        ctx.depend(model, *_PARTS, *_METHODS, *_METRIC_METHODS, "train_step", "test_step")
        for layer in (model, *model._flatten_layers(include_self=False)):
            ctx.depend(layer, "_trainable", "_layers", "_losses_override")
        for variable in model.variables:
            ctx.depend(variable, "_trainable", "_regularizer")
        y_pred = ctx.call(model, x, training=self.training)
        loss = _total_loss(ctx, model, y, y_pred, sample_weight)
        batch = _batch_size(x)
        with torch.no_grad():
            _track(ctx, model._loss_tracker, loss.detach(), batch)
            if self.apart:
                return loss, y_pred
            metrics = model._compile_metrics
            if metrics is not None:
                detached = compat.tree.map_structure(_detach, y_pred)
                _update_metrics(ctx, metrics, y, detached, sample_weight)
            return loss, _logs(ctx, model)


def _update_metrics(ctx: Any, metrics: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    single = is_value(y) and is_value(y_pred) and sample_weight is None
    if not single or len(metrics._flat_metrics) != 1:
        ctx.trace(ctx.view(metrics).update_state, y, y_pred, sample_weight)
        return
    ctx.depend(metrics, "_flat_metrics", "_flat_weighted_metrics")
    for group in (*metrics._flat_metrics, *metrics._flat_weighted_metrics):
        for metric in group.metrics if group else ():
            update_metric(ctx, metric, y, y_pred, None)


def _detach(item: Any) -> Any:
    mask = getattr(item, "_keras_mask", None)
    item = item.detach()
    if mask is not None:
        item._keras_mask = mask
    return item


def _batch_size(x: Any) -> Any:
    return next(item for item in compat.tree.flatten(x) if item is not None).shape[0]


def _total_loss(ctx: Any, model: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    losses = []
    if model._compile_loss is not None:
        loss = _compiled_loss(ctx, model._compile_loss, y, y_pred, sample_weight)
        if loss is not None:
            losses.append(loss)
    losses += _additional_losses(ctx, model)
    if not losses:
        raise Decline(Reason.UNSUPPORTED, "no loss")
    total = losses[0]
    if len(losses) > 1:
        total = torch.sum(torch.stack([item.reshape(()) for item in losses]))
    if not is_value(total) or total.ndim:
        raise Decline(Reason.UNSUPPORTED, "a loss that is no scalar")
    return total


def _compiled_loss(ctx: Any, compiled: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The compiled loss; for one output without the walk over structures."""
    flat: list[Any] = list(compiled._flat_losses or ())
    single = len(flat) == 1 and not flat[0].path and is_value(y) and is_value(y_pred)
    if single and (sample_weight is None or is_value(sample_weight)):
        ctx.depend(compiled, "_flat_losses")
        value = loss_value(ctx, flat[0].loss, y, y_pred, sample_weight)
        dtype = compat.to_torch_dtype(compiled.dtype)
        value = value if value.dtype == dtype else value.to(dtype)
        weight = flat[0].loss_weights
        if isinstance(weight, compat.Variable):
            weight = ctx.variable(weight)
        return value if weight is None else torch.mul(value, weight)
    if not all(is_shipped(part.loss) for part in flat):
        raise Decline(Reason.OVERRIDE, "own losses of several outputs")
    return ctx.trace(ctx.view(compiled), y, y_pred, sample_weight)


def _additional_losses(ctx: Any, model: Any) -> list[Any]:
    """Recorded losses in the order of the layers, then the weights' regularizers."""
    if model._losses_override:
        raise Decline(Reason.UNSUPPORTED, "overridden losses")
    recorded = ctx.record.losses
    losses = []
    for layer in (model, *model._flatten_layers(include_self=False)):
        losses += [value for owner, value in recorded if owner is layer]
    for variable in model.trainable_weights:
        if variable.regularizer is not None:
            losses.append(_regularization(ctx, variable))
    return [loss if compat.is_float(loss.dtype) else loss.to(_floatx()) for loss in losses]


def _regularization(ctx: Any, variable: Any) -> Any:
    weight = ctx.variable(variable)
    value = penalty(ctx, variable.regularizer, weight)
    return own_penalty(ctx, variable.regularizer, weight) if value is None else value


def _floatx() -> torch.dtype:
    return compat.to_torch_dtype(compat.backend.floatx())


def _track(ctx: Any, tracker: Any, loss: Any, batch: Any) -> None:
    """The loss tracker's running mean, weighted by the batch size."""
    total, count = ctx.variable(tracker.total), ctx.variable(tracker.count)
    ctx.assign(tracker.total, total + loss.to(total.dtype) * batch)
    ctx.assign(tracker.count, count + batch)


def _logs(ctx: Any, model: Any) -> dict[str, Any]:
    """Every metric's result after this step, by name."""
    logs: dict[str, Any] = {}
    for metric in model.metrics:
        if type(metric) is CompileMetrics:
            logs.update(_compiled_results(ctx, metric))
            continue
        value = result(ctx, metric)
        if isinstance(value, dict):
            logs.update(value)
        else:
            logs[metric.name] = value
    return logs


def _compiled_results(ctx: Any, metrics: Any) -> dict[str, Any]:
    """The compiled metrics' results under the names that stock Keras gives them."""
    flat = [m for group in metrics._flat_metrics if group for m in group.metrics]
    names = [metric.name for metric in flat]
    weighted = any(metrics._flat_weighted_metrics)
    if weighted or len(metrics._flat_metrics) != 1 or len(set(names)) != len(names):
        return ctx.trace(ctx.view(metrics).result)
    prefix = metrics._flat_metrics[0].output_name if flat else None
    if prefix:
        return ctx.trace(ctx.view(metrics).result)
    return {metric.name: result(ctx, metric) for metric in flat}
