"""Rules for activation functions.

Keras's own functions are traced as they are, which gives exactly the torch calls that
stock Keras makes. The commonest ones are written out, so that no helper of Keras's is in
between. A function of the user's own is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from keras import layers

from keras_turbo import compat
from keras_turbo.registry import trace_call

trace_call(layers.ELU, layers.LeakyReLU, layers.PReLU, layers.ReLU, layers.Softmax)


def _gelu(x: Any) -> Any:
    return F.gelu(x)


_DIRECT: dict[Any, Callable[[Any], Any]] = {
    compat.activations.relu: torch.relu,
    compat.activations.tanh: torch.tanh,
    compat.activations.sigmoid: torch.sigmoid,
    compat.activations.gelu: _gelu,
    compat.activations.silu: F.silu,
    compat.activations.linear: lambda x: x,
}


def is_elementwise(function: Any) -> bool:
    """Whether an activation treats every element alike, whatever the axes' order."""
    return function is None or function in _ELEMENTWISE


_ELEMENTWISE = frozenset(
    {
        *_DIRECT,
        compat.activations.elu,
        compat.activations.exponential,
        compat.activations.hard_sigmoid,
        compat.activations.hard_silu,
        compat.activations.leaky_relu,
        compat.activations.mish,
        compat.activations.relu6,
        compat.activations.selu,
        compat.activations.softplus,
        compat.activations.softsign,
    }
)


def activation(ctx: Any, function: Callable[..., Any] | None, x: Any) -> Any:
    """Apply an activation to a traced tensor."""
    if function is None:
        return x
    if isinstance(function, compat.Layer):
        return ctx.call(function, x)
    direct = _DIRECT.get(function)
    if direct is not None and x.dtype.is_floating_point:
        return direct(x)
    if getattr(function, "__module__", "").startswith("keras.src."):
        return ctx.trace(function, x)
    return ctx.opaque(function, x)
