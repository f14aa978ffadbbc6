"""Memory order of parameters: what a kernel wants, without copying at every call.

Lowering asks for a layout before it reads a parameter. The storage is written anew once,
in the wanted order, behind the same `torch.nn.Parameter`; its shape, its values and every
read of it stay the same, and later views are free and never stale.
"""

from __future__ import annotations

from typing import Any

import torch

from keras_turbo import compat


def relayout(variable: Any, order: tuple[int, ...]) -> None:
    """Give a variable's parameter a memory order.

    Args:
        variable: the Keras variable.
        order: its axes from the outermost in memory to the innermost.
    """
    tensor = variable._value
    if type(tensor) is not torch.nn.Parameter or tensor.is_meta:
        return
    with torch.no_grad():
        wanted = tensor.permute(order)
        if wanted.is_contiguous() or not tensor.is_contiguous():
            return
        del wanted
        if compat.storage_is_shared(tensor):
            return
        inverse = sorted(range(len(order)), key=order.__getitem__)
        tensor.data = tensor.permute(order).contiguous().permute(inverse)


def match(slot: Any, variable: Any) -> None:
    """Give a state variable the memory order of the variable that it belongs to."""
    tensor, like = slot._value, variable._value
    if tensor.stride() == like.stride() or tensor.shape != like.shape:
        return
    with torch.no_grad():
        if not compat.storage_is_shared(tensor):
            tensor.data = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
