"""Which of torch's kernels compute which of Keras's optimizers, and with what numbers.

Each function prepares the update of one optimizer class and returns a step that takes the
gradients. The state tensors are Keras's own variables, given their parameter's memory
order; numbers that change from step to step come from `numbers.Numbers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import optimizers

from keras_turbo import layout
from keras_turbo.fallback import Decline, Reason
from keras_turbo.training.memory_order import InMemoryOrder
from keras_turbo.training.numbers import Numbers

Tensors = list[torch.Tensor]
Step = Callable[[Tensors], None]


def prepare(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    """The update of an optimizer's variables by its formula alone.

    Returns:
        A function of the gradients, one per variable and in its memory order.

    Raises:
        Decline: for an optimizer or a configuration that no kernel computes.
    """
    for cls, build in _KERNELS.items():
        if isinstance(optimizer, cls) and _is_shipped(optimizer, cls):
            return build(optimizer, variables, numbers)
    raise Decline(Reason.NO_RULE, type(optimizer).__name__)


def _is_shipped(optimizer: Any, cls: type) -> bool:
    """Whether the optimizer is Keras's own class, not a subclass with changes."""
    kind = type(optimizer)
    if not kind.__module__.startswith("keras.src."):
        return False
    return kind is cls or (kind.__name__ == cls.__name__ and issubclass(kind, cls))


def matched(slots: Sequence[Any], variables: Sequence[Any]) -> Tensors:
    """State tensors, one per variable, in their variables' memory order."""
    tensors = []
    for slot, variable in zip(slots, variables, strict=True):
        layout.match(slot, variable)
        if slot._value.stride() != variable._value.stride():
            raise Decline(Reason.UNSUPPORTED, "a state in another memory order")
        if slot._value.dtype != variable._value.dtype:
            raise Decline(Reason.UNSUPPORTED, "a state of another dtype")
        tensors.append(slot._value)
    return tensors


def _state(optimizer: Any, name: str, variables: Sequence[Any]) -> Tensors:
    slots = getattr(optimizer, name)
    return matched([slots[optimizer._get_variable_index(v)] for v in variables], variables)


def _adam(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    means = _state(optimizer, "_momentums", variables)
    squares = _state(optimizer, "_velocities", variables)
    amsgrad = bool(optimizer.amsgrad)
    largest = _state(optimizer, "_velocity_hats", variables) if amsgrad else []
    beta_1, beta_2 = float(optimizer.beta_1), float(optimizer.beta_2)
    epsilon = float(optimizer.epsilon)
    if beta_1 >= 1.0 or beta_2 >= 1.0:
        raise Decline(Reason.UNSUPPORTED, "a momentum that never decays")
    # Keras adds epsilon outside the bias correction, torch inside. After infinitely many steps
    # torch's correction is none; Keras's own is then part of the learning rate.
    endless = [torch.tensor(math.inf)] * len(parameters)
    ordered = InMemoryOrder(parameters, means, squares, *([largest] if amsgrad else []))

    def step(grads: Tensors) -> None:
        views = ordered.current()
        torch._fused_adam_(
            views[0],
            ordered.of(grads),
            views[1],
            views[2],
            views[3] if amsgrad else [],
            endless,
            lr=numbers.adam_rate(beta_1, beta_2),
            beta1=beta_1,
            beta2=beta_2,
            weight_decay=0.0,
            eps=epsilon,
            amsgrad=amsgrad,
            maximize=False,
        )

    return step


def _sgd(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    momentum, nesterov = float(optimizer.momentum), bool(optimizer.nesterov)
    velocities = _state(optimizer, "momentums", variables) if momentum else []

    def step(grads: Tensors) -> None:
        rate = numbers.rate()
        if not velocities:
            torch._foreach_add_(parameters, grads, alpha=-rate)
            return
        # Keras keeps the learning rate inside the velocity.
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, grads, alpha=-rate)
        if nesterov:
            torch._foreach_add_(parameters, grads, alpha=-rate)
            torch._foreach_add_(parameters, velocities, alpha=momentum)
        else:
            torch._foreach_add_(parameters, velocities)

    return step


def _rmsprop(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    squares = _state(optimizer, "_velocities", variables)
    rho, epsilon = float(optimizer.rho), float(optimizer.epsilon)
    momentum = float(optimizer.momentum)
    velocities = _state(optimizer, "_momentums", variables) if momentum > 0 else []
    means = _state(optimizer, "_average_gradients", variables) if optimizer.centered else []

    def step(grads: Tensors) -> None:
        rate = numbers.rate()
        torch._foreach_mul_(squares, rho)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - rho)
        divisors = torch._foreach_add(squares, epsilon)
        if means:
            torch._foreach_mul_(means, rho)
            torch._foreach_add_(means, grads, alpha=1 - rho)
            torch._foreach_addcmul_(divisors, means, means, value=-1)
        torch._foreach_sqrt_(divisors)
        if velocities:
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_addcdiv_(velocities, grads, divisors, value=rate)
            torch._foreach_sub_(parameters, velocities)
        else:
            torch._foreach_addcdiv_(parameters, grads, divisors, value=-rate)

    return step


def _adagrad(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    sums = _state(optimizer, "_accumulators", variables)
    epsilon = float(optimizer.epsilon)

    def step(grads: Tensors) -> None:
        torch._foreach_addcmul_(sums, grads, grads)
        divisors = torch._foreach_add(sums, epsilon)
        torch._foreach_sqrt_(divisors)
        torch._foreach_addcdiv_(parameters, grads, divisors, value=-numbers.rate())

    return step


def _adadelta(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    squares = _state(optimizer, "_accumulated_grads", variables)
    changes = _state(optimizer, "_accumulated_delta_vars", variables)
    rho, epsilon = float(optimizer.rho), float(optimizer.epsilon)

    def step(grads: Tensors) -> None:
        torch._foreach_mul_(squares, rho)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - rho)
        deltas = torch._foreach_add(changes, epsilon)
        torch._foreach_sqrt_(deltas)
        torch._foreach_mul_(deltas, grads)
        divisors = torch._foreach_add(squares, epsilon)
        torch._foreach_sqrt_(divisors)
        torch._foreach_div_(deltas, divisors)
        torch._foreach_mul_(changes, rho)
        torch._foreach_addcmul_(changes, deltas, deltas, value=1 - rho)
        torch._foreach_add_(parameters, deltas, alpha=-numbers.rate())

    return step


def _adamax(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    means = _state(optimizer, "_m", variables)
    norms = _state(optimizer, "_u", variables)
    beta_1, beta_2 = float(optimizer.beta_1), float(optimizer.beta_2)
    epsilon = float(optimizer.epsilon)

    def step(grads: Tensors) -> None:
        torch._foreach_mul_(means, beta_1)
        torch._foreach_add_(means, grads, alpha=1 - beta_1)
        torch._foreach_mul_(norms, beta_2)
        torch._foreach_maximum_(norms, torch._foreach_abs(grads))
        divisors = torch._foreach_add(norms, epsilon)
        rate = numbers.rate() / (1 - numbers.power(beta_1, numbers.count()))
        torch._foreach_addcdiv_(parameters, means, divisors, value=-float(rate))

    return step


def _nadam(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    means = _state(optimizer, "_momentums", variables)
    squares = _state(optimizer, "_velocities", variables)
    beta_1, beta_2 = float(optimizer.beta_1), float(optimizer.beta_2)
    epsilon = float(optimizer.epsilon)
    product = optimizer._u_product._value

    def step(grads: Tensors) -> None:
        count = numbers.count()
        now = numbers.number(beta_1) * (1 - 0.5 * numbers.power(0.96, count))
        then = numbers.number(beta_1) * (1 - 0.5 * numbers.power(0.96, count + 1))
        so_far = numbers.number(product.item()) * now
        product.fill_(float(so_far))
        torch._foreach_mul_(means, beta_1)
        torch._foreach_add_(means, grads, alpha=1 - beta_1)
        torch._foreach_mul_(squares, beta_2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta_2)
        ahead = torch._foreach_mul(means, float(then / (1 - so_far * then)))
        torch._foreach_add_(ahead, grads, alpha=float((1 - now) / (1 - so_far)))
        divisors = torch._foreach_div(squares, float(1 - numbers.power(beta_2, count)))
        torch._foreach_sqrt_(divisors)
        torch._foreach_add_(divisors, epsilon)
        torch._foreach_addcdiv_(parameters, ahead, divisors, value=-numbers.rate())

    return step


def _lion(optimizer: Any, variables: Sequence[Any], numbers: Numbers) -> Step:
    parameters = [v._value for v in variables]
    means = _state(optimizer, "_momentums", variables)
    beta_1, beta_2 = float(optimizer.beta_1), float(optimizer.beta_2)

    def step(grads: Tensors) -> None:
        directions = torch._foreach_mul(means, beta_1)
        torch._foreach_add_(directions, grads, alpha=1 - beta_1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(parameters, directions, alpha=-numbers.rate())
        torch._foreach_mul_(means, beta_2)
        torch._foreach_add_(means, grads, alpha=1 - beta_2)

    return step


_KERNELS: dict[type, Callable[[Any, Sequence[Any], Numbers], Step]] = {
    optimizers.AdamW: _adam,
    optimizers.Adam: _adam,
    optimizers.SGD: _sgd,
    optimizers.RMSprop: _rmsprop,
    optimizers.Adagrad: _adagrad,
    optimizers.Adadelta: _adadelta,
    optimizers.Adamax: _adamax,
    optimizers.Nadam: _nadam,
    optimizers.Lion: _lion,
}
