"""Which fused torch kernel computes which of Keras's optimizers, and with what numbers.

Where Keras's formula differs from torch's, the difference is put into the arguments: Keras
adds Adam's epsilon outside the bias correction, torch inside, so it is converted at each
step. The state tensors are Keras's own variables, given their parameter's memory order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import optimizers

from keras_turbo import layout
from keras_turbo.fallback import Decline, Reason

Step = Callable[[list[torch.Tensor]], None]


def prepare(optimizer: Any, variables: Sequence[Any]) -> Step:
    """The kernel call for an optimizer and its variables.

    Returns:
        A function of the gradients, one per variable and in its memory order.

    Raises:
        Decline: for an optimizer or a configuration that no kernel computes.
    """
    for cls, build in _KERNELS.items():
        if isinstance(optimizer, cls) and _is_shipped(optimizer, cls):
            return build(optimizer, variables)
    raise Decline(Reason.NO_RULE, type(optimizer).__name__)


def _is_shipped(optimizer: Any, cls: type) -> bool:
    """Whether the optimizer is Keras's own class, not a subclass with changes."""
    kind = type(optimizer)
    if not kind.__module__.startswith("keras.src."):
        return False
    return kind is cls or (kind.__name__ == cls.__name__ and issubclass(kind, cls))


def _state(optimizer: Any, name: str, variables: Sequence[Any]) -> list[torch.Tensor]:
    """State tensors of a kind, one per variable, in their variables' memory order."""
    slots = getattr(optimizer, name)
    tensors = []
    for variable in variables:
        slot = slots[optimizer._get_variable_index(variable)]
        layout.match(slot, variable)
        if slot._value.stride() != variable._value.stride():
            raise Decline(Reason.UNSUPPORTED, "a state in another memory order")
        if slot._value.dtype != variable._value.dtype:
            raise Decline(Reason.UNSUPPORTED, "a state of another dtype")
        tensors.append(slot._value)
    return tensors


def _decayed(optimizer: Any, variables: Sequence[Any]) -> list[torch.Tensor]:
    """The parameters that weight decay applies to."""
    if optimizer.weight_decay is None:
        return []
    return [v._value for v in variables if optimizer._use_weight_decay(v)]


def _rate(optimizer: Any) -> Callable[[], float]:
    """Reads the current learning rate: a variable's value or a schedule's."""
    rate = optimizer._learning_rate
    value = getattr(rate, "_value", None)
    if value is not None:
        return value.item
    return lambda: float(optimizer._get_current_learning_rate())


def _adam(optimizer: Any, variables: Sequence[Any]) -> Step:
    parameters = [v._value for v in variables]
    means = _state(optimizer, "_momentums", variables)
    squares = _state(optimizer, "_velocities", variables)
    amsgrad = bool(optimizer.amsgrad)
    largest = _state(optimizer, "_velocity_hats", variables) if amsgrad else []
    beta_1, beta_2 = float(optimizer.beta_1), float(optimizer.beta_2)
    epsilon, decay = float(optimizer.epsilon), optimizer.weight_decay
    decayed = _decayed(optimizer, variables)
    count, rate = optimizer._iterations._value, _rate(optimizer)
    if optimizer._iterations._value.device.type != "cpu":
        raise Decline(Reason.UNSUPPORTED, "a step count on the device")

    def step(grads: list[torch.Tensor]) -> None:
        now = count.item() + 1
        speed = rate()
        if decayed:
            torch._foreach_mul_(decayed, 1 - decay * speed)
        # torch divides sqrt(v) by this before it adds epsilon, Keras does not.
        correction = math.sqrt(1.0 - beta_2**now)
        torch._fused_adam_(
            parameters,
            grads,
            means,
            squares,
            largest,
            [torch.tensor(float(now))] * len(grads),
            lr=speed,
            beta1=beta_1,
            beta2=beta_2,
            weight_decay=0.0,
            eps=epsilon / correction,
            amsgrad=amsgrad,
            maximize=False,
        )

    return step


def _sgd(optimizer: Any, variables: Sequence[Any]) -> Step:
    parameters = [v._value for v in variables]
    decayed, decay = _decayed(optimizer, variables), optimizer.weight_decay
    momentum, nesterov = float(optimizer.momentum), bool(optimizer.nesterov)
    velocities = _state(optimizer, "momentums", variables) if momentum else []
    rate = _rate(optimizer)

    def step(grads: list[torch.Tensor]) -> None:
        speed = rate()
        if decayed:
            torch._foreach_mul_(decayed, 1 - decay * speed)
        if not velocities:
            torch._foreach_add_(parameters, grads, alpha=-speed)
            return
        # Keras keeps the learning rate inside the velocity.
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, grads, alpha=-speed)
        if nesterov:
            torch._foreach_add_(parameters, velocities, alpha=momentum)
            torch._foreach_add_(parameters, grads, alpha=-speed)
        else:
            torch._foreach_add_(parameters, velocities)

    return step


_KERNELS: dict[type, Callable[[Any, Sequence[Any]], Step]] = {
    optimizers.AdamW: _adam,
    optimizers.Adam: _adam,
    optimizers.SGD: _sgd,
}
