"""Python wrappers of `torch.nn.functional`, and the C functions that do their work.

A wrapper checks its arguments and looks for overrides on every call. A program has done
both at lowering, so its nodes name the C function directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def _relu(input: Any, inplace: bool = False) -> Call:
    return (torch.relu_ if inplace else torch.relu), (input,), {}


def _softmax(input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Call:
    return torch.softmax, (input, dim), {"dtype": dtype} if dtype is not None else {}


def _log_softmax(
    input: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Call:
    return torch.log_softmax, (input, dim), {"dtype": dtype} if dtype is not None else {}


def _silu(input: Any, inplace: bool = False) -> Call:
    return torch._C._nn.silu, (input,), {}


def _elu(input: Any, alpha: float = 1.0, inplace: bool = False) -> Call:
    return torch._C._nn.elu, (input, alpha), {}


def _leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Call:
    return torch._C._nn.leaky_relu, (input, negative_slope), {}


def _hardtanh(
    input: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Call:
    return torch._C._nn.hardtanh, (input, min_val, max_val), {}


def _relu6(input: Any, inplace: bool = False) -> Call:
    return torch._C._nn.hardtanh, (input, 0.0, 6.0), {}


def _hardswish(input: Any, inplace: bool = False) -> Call:
    return torch._C._nn.hardswish, (input,), {}


def _hardsigmoid(input: Any, inplace: bool = False) -> Call:
    return torch._C._nn.hardsigmoid, (input,), {}


def _layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Call:
    return torch.layer_norm, (input, normalized_shape, weight, bias, eps), {}


def _embedding(input: Any, weight: Any, **kwargs: Any) -> Call:
    if any(kwargs.values()):
        return F.embedding, (input, weight), kwargs
    return torch.embedding, (weight, input), {}


def _pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Call:
    arguments = (input, list(pad), mode) if value is None else (input, list(pad), mode, value)
    return torch._C._nn.pad, arguments, {}


def _max_pool(builtin: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Call]:
    def rewrite(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Call:
        if return_indices:
            arguments = (input, kernel_size, stride, padding, dilation, ceil_mode, True)
            return wrapper, arguments, {}
        steps = kernel_size if stride is None else stride
        return builtin, (input, kernel_size, steps, padding, dilation, ceil_mode), {}

    return rewrite


_SIMPLE = {
    torch.multiply: torch.mul,
    torch.subtract: torch.sub,
    torch.divide: torch.div,
    torch.true_divide: torch.div,
    F.sigmoid: torch.sigmoid,
    F.tanh: torch.tanh,
}

_REWRITES: dict[Any, Callable[..., Call]] = {
    F.relu: _relu,
    F.relu6: _relu6,
    F.softmax: _softmax,
    F.log_softmax: _log_softmax,
    F.silu: _silu,
    F.elu: _elu,
    F.leaky_relu: _leaky_relu,
    F.hardtanh: _hardtanh,
    F.hardswish: _hardswish,
    F.hardsigmoid: _hardsigmoid,
    F.layer_norm: _layer_norm,
    F.embedding: _embedding,
    F.pad: _pad,
    F.max_pool1d: _max_pool(torch.max_pool1d, F.max_pool1d),
    F.max_pool2d: _max_pool(torch.max_pool2d, F.max_pool2d),
    F.max_pool3d: _max_pool(torch.max_pool3d, F.max_pool3d),
}


def canonical(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of a C function that is equivalent to `target(*args, **kwargs)`."""
    simple = _SIMPLE.get(target)
    if simple is not None:
        return simple, args, kwargs
    rewrite = _REWRITES.get(target)
    return rewrite(*args, **kwargs) if rewrite is not None else (target, args, kwargs)
