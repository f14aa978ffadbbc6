"""Calls that `torch.compile` is tracing: Dynamo sees the program itself, whole.

The guard's reads of thread-local scopes cannot be traced, so the program is chosen by a
function that Dynamo runs once, at trace time, on constants: the layer, the kinds of the
arguments and the training flag. What it returns is straight-line torch code, which Dynamo
inlines. Without a program, stock Keras is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import barrier, compat, dispatch
from keras_turbo.axes import declared_axes
from keras_turbo.fallback import Decline
from keras_turbo.rules import draws
from keras_turbo.specs import CallKind, TensorKind


def while_compiling(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], list[torch.Tensor]] | None:
    """What to run for a call inside a function that Dynamo is tracing.

    Returns:
        A program's function and its arguments; None for stock Keras.
    """
    tensors: list[torch.Tensor] = []
    described = _describe((args, kwargs), tensors)
    if described is None:
        return None
    context = compat.GLOBAL_STATE.get_global_attribute("current_call_ctx")
    training = None if context is None else context.get_value("training")
    key = _key(layer, described, training)
    if key is None:
        return None
    return layer._keras_turbo.compiled[key], tensors


def _describe(item: Any, tensors: list[torch.Tensor]) -> Any:
    """A constant that describes an argument: nested tuples of tags and plain values."""
    if isinstance(item, torch.Tensor):
        mask = getattr(item, "_keras_mask", None)
        tensors.append(item)
        if mask is not None:
            tensors.append(mask)
            return ("tensor", item.dtype, item.ndim, mask.dtype, mask.ndim)
        return ("tensor", item.dtype, item.ndim, None, 0)
    if item is None or isinstance(item, (bool, int, float, str)):
        return ("constant", item)
    if type(item) in (tuple, list):
        parts = []
        for entry in item:
            part = _describe(entry, tensors)
            if part is None:
                return None
            parts.append(part)
        return ("list" if type(item) is list else "tuple", tuple(parts))
    if type(item) is dict:
        parts = []
        for key, entry in item.items():
            part = _describe(entry, tensors)
            if part is None:
                return None
            parts.append((key, part))
        return ("dict", tuple(parts))
    return None


@torch.compiler.assume_constant_result
def _key(layer: Any, described: Any, context_training: Any) -> str | None:
    """Under which key the layer's inline cache holds the program; None without one."""
    if getattr(layer, "_lock", True) or not layer.built:
        return None
    try:
        draws.register()
        kind = _kind(layer, described, context_training)
        with barrier.lowering():
            program = dispatch.program_of_kind(layer, kind)
    except Decline:
        return None
    if program.stock_calls:
        return None
    key = f"program_{id(program)}"
    layer.__dict__["_keras_turbo"].compiled[key] = program.run
    return key


def _kind(layer: Any, described: Any, context_training: Any) -> CallKind:
    tensors: list[TensorKind] = []
    names = tuple(layer._call_signature.parameters)

    def convert(name: str, item: Any) -> Any:
        tag = item[0]
        if tag == "tensor":
            _, dtype, rank, mask_dtype, mask_rank = item
            axes = declared_axes(layer, len(tensors), rank)
            sizes = tuple(axes.get(axis) for axis in range(rank))
            mask = None
            if mask_dtype is not None:
                mask = TensorKind(f"{name}_mask", mask_dtype, (None,) * mask_rank)
            tensor = TensorKind(name, dtype, sizes, frozenset(axes), mask)
            tensors.append(tensor)
            return tensor
        if tag == "constant":
            return item[1]
        if tag == "dict":
            return {key: convert(key, entry) for key, entry in item[1]}
        parts = [convert(f"{name}_{i}", entry) for i, entry in enumerate(item[1])]
        return parts if tag == "list" else tuple(parts)

    positional, keywords = described[1]
    args = tuple(convert(name, item) for name, item in zip(names, positional[1], strict=False))
    kwargs = {key: convert(key, item) for key, item in keywords[1]}
    has_training = "training" in kwargs
    training = kwargs.pop("training", None)
    return CallKind(args, kwargs, has_training, training, context_training, tensors=tuple(tensors))
