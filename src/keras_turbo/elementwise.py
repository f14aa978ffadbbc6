"""Meta results of elementwise operations, without running torch's own meta kernels.

Those are written in Python and cost a hundred microseconds each; lowering needs two per
operation. For floating-point tensors of one dtype the answer is the broadcast shape.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

_UNARY = frozenset(
    {
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        torch.exp,
        torch.sqrt,
        torch.rsqrt,
        torch.square,
        torch.abs,
        torch.neg,
        operator.neg,
        torch._C._nn.gelu,
        torch._C._nn.silu,
        torch._C._nn.hardtanh,
        torch._C._nn.hardswish,
        torch._C._nn.hardsigmoid,
        torch._C._nn.elu,
        torch._C._nn.leaky_relu,
        torch.batch_norm,
        torch.layer_norm,
        torch.rms_norm,
        torch.dropout,
        torch.softmax,
        "relu_",
        "rsqrt",
        "rsqrt_",
        "sqrt",
        "square",
        "exp",
        "abs",
        "neg",
        "sigmoid",
        "tanh",
        "detach",
        "clone",
    }
)

_BINARY = frozenset(
    {
        torch.add,
        torch.sub,
        torch.mul,
        torch.div,
        torch.maximum,
        torch.minimum,
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        "add",
        "add_",
        "sub",
        "subtract",
        "mul",
        "mul_",
        "div",
    }
)


def elementwise_meta(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The meta result of an elementwise operation; None where torch must be asked.

    Args:
        target: a function, or the name of a tensor method.
        args: the operands, tensors on the meta device.
        kwargs: the keyword arguments.
    """
    if target in _UNARY:
        first = args[0]
        if not isinstance(first, torch.Tensor) or not first.dtype.is_floating_point:
            return None
        return torch.empty_like(first)
    if target in _BINARY and len(args) == 2 and not kwargs:
        return _binary(*args)
    return None


def _binary(a: Any, b: Any) -> torch.Tensor | None:
    a_tensor, b_tensor = isinstance(a, torch.Tensor), isinstance(b, torch.Tensor)
    if a_tensor and b_tensor:
        if a.dtype != b.dtype or not a.dtype.is_floating_point:
            return None
        if a.shape == b.shape:
            return torch.empty_like(a)
        shape = torch.broadcast_shapes(a.shape, b.shape)
        if shape == a.shape:
            return torch.empty_like(a)
        return torch.empty(shape, dtype=a.dtype, device="meta")
    tensor, number = (a, b) if a_tensor else (b, a)
    if type(number) not in (int, float) or not tensor.dtype.is_floating_point:
        return None
    return torch.empty_like(tensor)
