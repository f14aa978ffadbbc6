"""Optimizer updates by one fused torch kernel per step.

`apply` takes the place of `BaseOptimizer.apply`. For an optimizer whose formula a fused
kernel computes, an `Update` is prepared once per list of variables; it writes the same
state variables as stock Keras, so that checkpoints move freely between the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_turbo import compat, dispatch, fallback, guard
from keras_turbo.fallback import Decline, Reason
from keras_turbo.training import averages, kernels
from keras_turbo.training.clipping import clipping
from keras_turbo.training.numbers import Numbers

_METHODS = (
    "_backend_apply_gradients",
    "_clip_gradients",
    "_clip_by_norm",
    "_get_current_learning_rate",
    "_update_model_variables_moving_average",
    "_overwrite_model_variables_with_average_value",
    "_filter_empty_gradients",
    "_use_weight_decay",
)
"""Methods of an optimizer that an update relies on."""
stock_apply: Callable[..., Any] = compat.BaseOptimizer.apply
_known: weakref.WeakSet[Any] = weakref.WeakSet()


class Update:
    """What one optimizer does to one list of variables in a step.

    Attributes:
        parameters: the variables' parameters.
        step: the kernel call of the formula, taking the gradients.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        _check(optimizer, variables)
        self.variables = [weakref.ref(v) for v in variables]
        self.parameters = [v._value for v in variables]
        self.strides = [p.stride() for p in self.parameters]
        self.iterations = optimizer._iterations._value
        self.numbers = Numbers(optimizer, self.parameters[0].dtype)
        self.scale = optimizer.loss_scale_factor
        self.clip = clipping(optimizer)
        self.decay = optimizer.weight_decay
        self.decayed = _decayed(optimizer, variables)
        self.step = kernels.prepare(optimizer, variables, self.numbers)
        self.sums, self.all_sums = _accumulators(optimizer, variables)
        self.average = averages.Average(optimizer, self.numbers) if optimizer.use_ema else None
        self.constrained = [v for v in variables if v.constraint is not None]

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def serves(self, grads: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Whether this update fits a call's gradients and variables."""
        count = len(self.parameters)
        if len(grads) != count or len(variables) != count:
            return False
        parameters = self.parameters
        for known, variable, parameter in zip(self.variables, variables, parameters, strict=True):
            if known() is not variable or variable._value is not parameter:
                return False
        for grad, parameter in zip(grads, self.parameters, strict=True):
            if type(grad) is not torch.Tensor or grad.dtype is not parameter.dtype:
                return False
            if grad.device != parameter.device or grad.layout is not torch.strided:
                return False
        return True

    def run(self, grads: Sequence[Any]) -> None:
        """Update the variables, the optimizer's state and its iteration counter."""
        with torch.no_grad():
            self._run(grads)

    def _run(self, grads: Sequence[Any]) -> None:
        grads = [
            grad if grad.stride() == stride else _with_strides(grad, parameter)
            for grad, stride, parameter in zip(grads, self.strides, self.parameters, strict=True)
        ]
        if self.scale is not None:
            grads = list(torch._foreach_div(grads, self.scale))
        if not self.sums:
            self._update(grads)
        elif (self.iterations.item() + 1) % self.numbers.every:
            torch._foreach_add_(self.sums, grads)
        else:
            grads = list(torch._foreach_add(grads, self.sums))
            torch._foreach_div_(grads, self.numbers.every)
            self._update(grads)
            torch._foreach_mul_(self.all_sums, 0.0)
        if self.average is not None:
            self.average.run()
        for variable in self.constrained:
            variable.assign(variable.constraint(variable))
        self.iterations.add_(1)

    def _update(self, grads: list[torch.Tensor]) -> None:
        if self.clip is not None:
            grads = self.clip(grads)
        if self.decayed:
            torch._foreach_mul_(self.decayed, self.numbers.kept(self.decay))
        self.step(grads)


def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Apply gradients: the prepared update where it fits, else stock Keras."""
    update = self.__dict__.get("_keras_turbo_update")
    if update is None or trainable_variables is None or not _plain():
        return _miss(self, grads, trainable_variables)
    if not update.serves(grads, trainable_variables):
        return _miss(self, grads, trainable_variables)
    update.run(grads)
    return None


def _plain() -> bool:
    ambient = compat.ambient()
    return (
        ambient.get("stateless_scope") is None
        and ambient.get("distribution") is None
        and not guard.thread_state.stock
        and not torch.compiler.is_compiling()
    )


def _miss(optimizer: Any, grads: Any, variables: Any) -> Any:
    attributes = optimizer.__dict__
    declined = "_keras_turbo_update" in attributes and attributes["_keras_turbo_update"] is None
    if variables is None or declined or not optimizer.built or not _plain():
        return stock_apply(optimizer, grads, variables)
    variables = list(variables)
    update = _prepared(optimizer, variables)
    # Outside any handler, so that an error of stock Keras does not name ours as its context.
    if isinstance(update, Update) and update.serves(grads, variables):
        _keep(optimizer, update)
        update.run(grads)
        return None
    result = stock_apply(optimizer, grads, variables)
    if isinstance(update, Decline):
        _give_up(optimizer, update)
    return result


def _prepared(optimizer: Any, variables: list[Any]) -> Update | Decline:
    """The update of an optimizer's variables, or why there is none."""
    try:
        return Update(optimizer, variables)
    except Decline as problem:
        return Decline(problem.reason, problem.detail)
    except Exception as error:  # noqa: BLE001, whatever it is, stock Keras can run
        return fallback.bug(error, dispatch.options.strict)


def _give_up(optimizer: Any, problem: Decline) -> None:
    """Keep an optimizer on stock Keras, and say so where that is a bug of ours."""
    if problem.reason is not Reason.INPUT:
        _keep(optimizer, None)
    if problem.reason is not Reason.ERROR:
        return
    fallback.record(optimizer, Reason.ERROR, problem.detail)
    if dispatch.options.strict:
        error = fallback.strict_error(optimizer, Reason.ERROR, problem.detail)
        raise error from problem.__cause__
    fallback.warn(
        f"keras_turbo: preparing the updates of optimizer '{optimizer.name}' failed "
        f"({problem.detail}). It runs stock Keras from now on; please report this."
    )


def _keep(optimizer: Any, update: Update | None) -> None:
    optimizer.__dict__["_keras_turbo_update"] = update
    _known.add(optimizer)


def changed(optimizer: Any) -> None:
    """An attribute of an optimizer changed: prepare its update anew."""
    optimizer.__dict__.pop("_keras_turbo_update", None)


def forget() -> None:
    """Drop all prepared updates."""
    for optimizer in list(_known):
        changed(optimizer)


def _check(optimizer: Any, variables: Sequence[Any]) -> None:
    for name in _METHODS:
        if getattr(type(optimizer), name) is not getattr(compat.BaseOptimizer, name) or (
            name in vars(optimizer)
        ):
            raise Decline(Reason.OVERRIDE, f"{type(optimizer).__name__}.{name}")
    home = compat.default_device()
    for variable in variables:
        if not isinstance(variable, compat.Variable) or variable._value is None:
            raise Decline(Reason.INPUT, "a variable that is not Keras's")
        value = variable._value
        if type(value) is not torch.nn.Parameter or value.device != home:
            raise Decline(Reason.DEVICE, variable.path)
        if value.dtype not in (torch.float32, torch.float64):
            raise Decline(Reason.UNSUPPORTED, f"{value.dtype} weights")
        if value.dtype != variables[0]._value.dtype:
            raise Decline(Reason.UNSUPPORTED, "weights of several dtypes")
        if variable.overwrite_with_gradient:
            raise Decline(Reason.UNSUPPORTED, "a gradient that overwrites its variable")
        if optimizer._var_key(variable) not in optimizer._trainable_variables_indices:
            raise Decline(Reason.INPUT, "a variable that the optimizer does not know")


def _decayed(optimizer: Any, variables: Sequence[Any]) -> list[torch.Tensor]:
    """The parameters that weight decay applies to."""
    if optimizer.weight_decay is None:
        return []
    return [v._value for v in variables if optimizer._use_weight_decay(v)]


def _accumulators(
    optimizer: Any, variables: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sums of gradients of these variables, and of all variables of the optimizer."""
    if not optimizer.gradient_accumulation_steps:
        return [], []
    slots = optimizer._accumulated_gradients
    own = [slots[optimizer._get_variable_index(v)] for v in variables]
    tensors = kernels.matched(own, variables)
    return tensors, [slot._value for slot in slots if slot is not None]


def _with_strides(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient in its parameter's memory order, as the fused kernels need it."""
    return torch.empty_like(like).copy_(grad)
