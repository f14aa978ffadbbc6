"""Parameters, states and gradients as their kernels like them best: contiguous.

Kernels over lists of tensors copy whatever is not contiguous, there and back. A parameter
that lies in another memory order, and everything of its strides, is contiguous when its
axes are named in that order; an elementwise update does not care how they are named.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = list[torch.Tensor]


class InMemoryOrder:
    """Standing contiguous views of parallel lists of tensors of equal strides.

    Args:
        parameters: the parameters.
        states: lists of tensors, each like `parameters` in sizes and strides.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *states: Sequence[torch.Tensor]) -> None:
        self.lists = (list(parameters), *map(list, states))
        self.orders = [_order(parameter) for parameter in parameters]
        self.turned = [i for i, order in enumerate(self.orders) if order is not None]
        self._refresh()

    def _refresh(self) -> None:
        with torch.no_grad():
            self.views = [self._seen(tensors) for tensors in self.lists]
        self.places = [tensor.data_ptr() for tensors in self.lists for tensor in tensors]

    def _seen(self, tensors: Tensors) -> Tensors:
        # Without an order the tensor itself stands in the list: it may move as it likes.
        return [
            tensor if order is None else tensor.permute(order)
            for tensor, order in zip(tensors, self.orders, strict=True)
        ]

    def current(self) -> list[Tensors]:
        """The views, made anew if a tensor's memory moved."""
        if self.turned:
            places = [tensor.data_ptr() for tensors in self.lists for tensor in tensors]
            if places != self.places:
                self._refresh()
        return self.views

    def of(self, grads: Tensors) -> Tensors:
        """Gradients with the parameters' strides, seen in the same way."""
        if not self.turned:
            return grads
        grads = list(grads)
        for i in self.turned:
            order = self.orders[i]
            assert order is not None
            grads[i] = grads[i].t() if len(order) == 2 else grads[i].permute(order)
        return grads


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The axes from the outermost in memory to the innermost; None where nothing is gained."""
    if tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.ndim), key=lambda axis: -tensor.stride(axis)))
    return order if tensor.permute(order).is_contiguous() else None
