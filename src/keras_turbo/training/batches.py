"""Batches of in-memory arrays as slices of tensors.

Stock Keras sends every batch through a data loader, a fetcher and a walk over the
structure. Here the loader only says which rows come next, so that the order and the use of
random numbers stay its own; the rows are taken from tensors that share the arrays' memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from keras_turbo import compat, guard

stock_get_torch_dataloader: Callable[..., Any] = compat.ArrayDataAdapter.get_torch_dataloader

_NUMBERS = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
_DTYPES = frozenset(map(np.dtype, _NUMBERS))


class ArrayBatches:
    """Iterates over a loader's batches of in-memory arrays.

    Args:
        loader: the stock data loader, which decides on the order.
        arrays: the nested arrays as tensors, None where there is none.
    """

    def __init__(self, loader: Any, arrays: tuple[Any, ...]) -> None:
        self.loader = loader
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        # The loader draws a random number when it is asked for an iterator, not later.
        return self._slices(iter(self.loader))

    def _slices(self, batches: Any) -> Iterator[Any]:
        arrays = self.arrays
        while True:
            try:
                indices = batches._next_index()
            except StopIteration:
                return
            first, count = indices[0], len(indices)
            if indices[-1] == first + count - 1 and indices == list(range(first, first + count)):
                yield _map(lambda a, f=first, n=count: a.narrow(0, f, n).clone(), arrays)
            else:
                rows = torch.tensor(indices)
                yield _map(lambda a, rows=rows: a.index_select(0, rows), arrays)


def get_torch_dataloader(self: Any) -> Any:
    """The batches of an array adapter: slices where all arrays are plain, else stock's."""
    loader = stock_get_torch_dataloader(self)
    if guard.thread_state.stock or compat.default_device().type != "cpu":
        return loader
    if compat.ambient().get("torch_device") is not None:
        return loader
    try:
        arrays = _map(_tensor, loader.dataset.array)
    except (TypeError, AttributeError):
        return loader
    return ArrayBatches(loader, arrays)


def _tensor(sliceable: Any) -> torch.Tensor:
    """A tensor on the memory of a wrapped array.

    Raises:
        TypeError: for anything but a plain array or tensor.
    """
    array = sliceable.array
    if type(array) is np.ndarray and array.dtype in _DTYPES and array.flags.writeable:
        if any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
            raise TypeError("strides that torch cannot express")
        return torch.from_numpy(array)
    if type(array) is torch.Tensor and array.is_cpu and array.layout is torch.strided:
        if array.requires_grad:
            raise TypeError("a tensor that wants gradients")
        return array
    raise TypeError(f"{type(array).__name__} is no plain array")


def _map(function: Callable[[Any], Any], item: Any) -> Any:
    if item is None:
        return None
    if type(item) in (tuple, list):
        return type(item)([_map(function, entry) for entry in item])
    if type(item) is dict:
        return {key: _map(function, entry) for key, entry in item.items()}
    return function(item)
