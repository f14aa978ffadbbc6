"""Meta results of the commonest operations, without running torch's own meta kernels.

Many of those are written in Python and cost a hundred microseconds each; lowering needs two
per operation. For floating-point tensors of one dtype the answer follows from the shapes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

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


def known_meta(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The meta result of an operation; None where torch must be asked.

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
    product = _PRODUCTS.get(target) if not kwargs else None
    if product is not None and _all_of_one_dtype(args):
        return product(*args)
    if target is torch.mean and isinstance(args[0], torch.Tensor):
        return _mean(*args, **kwargs)
    if target is F.scaled_dot_product_attention and _all_of_one_dtype(args[:3]):
        return _attention(*args[:3])
    return None


def _attention(query: Any, key: Any, value: Any) -> torch.Tensor | None:
    if query.ndim != key.ndim or query.shape[-1] != key.shape[-1]:
        return None
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _all_of_one_dtype(args: tuple[Any, ...]) -> bool:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    dtype = tensors[0].dtype
    return dtype.is_floating_point and all(tensor.dtype == dtype for tensor in tensors)


def _addmm(bias: Any, a: Any, b: Any) -> torch.Tensor | None:
    columns = b.shape[1] if b.ndim == 2 else -1
    if a.ndim != 2 or a.shape[1] != b.shape[0] or tuple(bias.shape) != (columns,):
        return None
    return a.new_empty((a.shape[0], columns))


def _matmul(a: Any, b: Any) -> torch.Tensor | None:
    if a.ndim < 2 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        return None
    return a.new_empty((*a.shape[:-1], b.shape[1]))


def _linear(x: Any, weight: Any, bias: Any = None) -> torch.Tensor | None:
    if weight.ndim != 2 or x.ndim < 2 or x.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        return None
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_PRODUCTS = {
    torch.addmm: _addmm,
    torch.mm: _matmul,
    torch.matmul: _matmul,
    F.linear: _linear,
}


def _mean(x: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> torch.Tensor | None:
    if kwargs or dim is None or not x.dtype.is_floating_point:
        return None
    axes = {axis % x.ndim for axis in ((dim,) if isinstance(dim, int) else dim)}
    if not axes:
        return None
    sizes = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    kept = sizes if keepdim else [size for axis, size in enumerate(sizes) if axis not in axes]
    return x.new_empty(kept)


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
    if not (a_tensor or b_tensor):
        return None
    tensor, number = (a, b) if a_tensor else (b, a)
    if type(number) not in (int, float) or not tensor.dtype.is_floating_point:
        return None
    return torch.empty_like(tensor)
