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

from keras_turbo import compat, guard
from keras_turbo.fallback import Decline, Reason
from keras_turbo.training import kernels

stock_apply: Callable[..., Any] = compat.BaseOptimizer.apply
_known: weakref.WeakSet[Any] = weakref.WeakSet()


class Update:
    """What one optimizer does to one list of variables in a step.

    Attributes:
        parameters: the variables' parameters.
        step: the fused kernel call, taking the gradients.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        _check(optimizer, variables)
        self.variables = [weakref.ref(v) for v in variables]
        self.parameters = [v._value for v in variables]
        self.strides = [p.stride() for p in self.parameters]
        self.iterations = optimizer._iterations._value
        self.step = kernels.prepare(optimizer, variables)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def serves(self, grads: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Whether this update fits a call's gradients and variables."""
        count = len(self.parameters)
        if len(grads) != count or len(variables) != count:
            return False
        for known, variable in zip(self.variables, variables, strict=True):
            if known() is not variable:
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
        self.step(grads)
        self.iterations.add_(1)


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
    try:
        update = Update(optimizer, variables)
    except Decline as problem:
        if problem.reason is not Reason.INPUT:
            _keep(optimizer, None)
        return stock_apply(optimizer, grads, variables)
    if not update.serves(grads, variables):
        return stock_apply(optimizer, grads, variables)
    _keep(optimizer, update)
    update.run(grads)
    return None


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
    if optimizer.gradient_accumulation_steps or optimizer.use_ema:
        raise Decline(Reason.UNSUPPORTED, "gradient accumulation or moving averages")
    if optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm:
        raise Decline(Reason.UNSUPPORTED, "gradient clipping")
    if optimizer.loss_scale_factor is not None:
        raise Decline(Reason.UNSUPPORTED, "loss scaling")
    home = compat.default_device()
    for variable in variables:
        if not isinstance(variable, compat.Variable) or variable._value is None:
            raise Decline(Reason.INPUT, "a variable that is not Keras's")
        value = variable._value
        if type(value) is not torch.nn.Parameter or value.device != home:
            raise Decline(Reason.DEVICE, variable.path)
        if value.dtype not in (torch.float32, torch.float64):
            raise Decline(Reason.UNSUPPORTED, f"{value.dtype} weights")
        if variable.constraint is not None or variable.overwrite_with_gradient:
            raise Decline(Reason.UNSUPPORTED, "constraints")
        if optimizer._var_key(variable) not in optimizer._trainable_variables_indices:
            raise Decline(Reason.INPUT, "a variable that the optimizer does not know")


def _with_strides(grad: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient in its parameter's memory order, as the fused kernels need it."""
    return torch.empty_like(like).copy_(grad)
