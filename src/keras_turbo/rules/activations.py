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
from keras.src.activations import activations as keras_activations

from keras_turbo import compat
from keras_turbo.registry import trace_call

trace_call(layers.ELU, layers.LeakyReLU, layers.PReLU, layers.ReLU, layers.Softmax)


def _gelu(x: Any) -> Any:
    return F.gelu(x)


_DIRECT: dict[Any, Callable[[Any], Any]] = {
    keras_activations.relu: torch.relu,
    keras_activations.tanh: torch.tanh,
    keras_activations.sigmoid: torch.sigmoid,
    keras_activations.gelu: _gelu,
    keras_activations.silu: F.silu,
    keras_activations.linear: lambda x: x,
}


def is_elementwise(function: Any) -> bool:
    """Whether an activation treats every element alike, whatever the axes' order."""
    return function is None or function in _ELEMENTWISE


_ELEMENTWISE = frozenset(
    {
        *_DIRECT,
        keras_activations.elu,
        keras_activations.exponential,
        keras_activations.hard_sigmoid,
        keras_activations.hard_silu,
        keras_activations.leaky_relu,
        keras_activations.mish,
        keras_activations.relu6,
        keras_activations.selu,
        keras_activations.softplus,
        keras_activations.softsign,
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
