"""Regularizers as operations of a program.

Keras's own regularizers read their factors at run time, since nothing watches writes to
them: a callback may anneal one. Everything else is called as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from keras import regularizers


def _scaled(factor: Any, penalty: torch.Tensor) -> torch.Tensor:
    if isinstance(factor, torch.Tensor) and factor.dtype != penalty.dtype:
        factor = factor.to(penalty.dtype)
    return factor * penalty


def l1(regularizer: Any, x: torch.Tensor) -> torch.Tensor:
    """The penalty of `keras.regularizers.L1`."""
    return _scaled(regularizer.l1, torch.sum(torch.abs(x)))


def l2(regularizer: Any, x: torch.Tensor) -> torch.Tensor:
    """The penalty of `keras.regularizers.L2`."""
    return _scaled(regularizer.l2, torch.sum(torch.square(x)))


def l1_l2(regularizer: Any, x: torch.Tensor) -> torch.Tensor:
    """The penalty of `keras.regularizers.L1L2`."""
    penalty = torch.zeros((), dtype=x.dtype, device=x.device)
    if regularizer.l1 != 0.0:
        penalty = penalty + l1(regularizer, x)
    if regularizer.l2 != 0.0:
        penalty = penalty + l2(regularizer, x)
    return penalty


def _scalar(regularizer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=x.dtype, device=x.device)


_PENALTIES = {regularizers.L1: l1, regularizers.L2: l2, regularizers.L1L2: l1_l2}
for _function in _PENALTIES.values():
    _function.meta = _scalar  # type: ignore[attr-defined]


def penalty(ctx: Any, regularizer: Any, value: Any) -> Any:
    """What a regularizer returns for a traced tensor; None for one that is not Keras's own."""
    function = _PENALTIES.get(type(regularizer))
    if function is None or "__call__" in vars(regularizer):
        return None
    if not value.dtype.is_floating_point:
        # Keras truncates the factor to the integer dtype there.
        return None
    return ctx.tracer.create_proxy("call_function", function, (regularizer, value), {})
