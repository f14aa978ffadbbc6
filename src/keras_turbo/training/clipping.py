"""Gradient clipping for all gradients at once, with Keras's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = list[torch.Tensor]


def clipping(optimizer: Any) -> Callable[[Tensors], Tensors] | None:
    """The clipping that an optimizer asks for, as a function of the gradients; None for none."""
    norm, total, value = optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue
    if norm and norm > 0:
        return lambda grads: _each_norm(grads, norm)
    if total and total > 0:
        return lambda grads: _whole_norm(grads, total)
    if value and value > 0:
        return lambda grads: _values(grads, value)
    return None


def _each_norm(grads: Tensors, limit: float) -> Tensors:
    norms = torch._foreach_norm(grads)
    torch._foreach_clamp_min_(norms, limit)
    # One scalar per gradient: the same kernel as for lists of equal shapes, one by one.
    return [grad * limit / norm for grad, norm in zip(grads, norms, strict=True)]


def _whole_norm(grads: Tensors, limit: float) -> Tensors:
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    scale = limit * torch.clamp_max(1.0 / norm, 1.0 / limit)
    # A norm that is not finite makes every gradient NaN.
    return list(torch._foreach_mul(grads, scale + (norm - norm)))


def _values(grads: Tensors, limit: float) -> Tensors:
    clipped = list(torch._foreach_clamp_max(grads, limit))
    torch._foreach_clamp_min_(clipped, -limit)
    return clipped
