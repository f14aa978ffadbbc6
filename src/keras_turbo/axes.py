"""Which sizes of a layer's inputs matter to it: what a guard checks beyond ranks and dtypes.

Dispatch asks when it describes a call, compilation when it knows only declared sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from keras_turbo import compat


def _input_specs(layer: Any) -> list[Any]:
    """A layer's input specs; a Sequential model has those of the graph behind it."""
    specs = layer.input_spec or getattr(getattr(layer, "_functional", None), "input_spec", None)
    return compat.tree.flatten(specs) if specs else []


def axes_to_guard(layer: Any, position: int, rank: int, dtype: torch.dtype) -> frozenset[int]:
    """The axes of an input whose size the layer's own checks or weights depend on."""
    axes: set[int] = set()
    specs = _input_specs(layer)
    if position < len(specs) and specs[position] is not None:
        spec = specs[position]
        axes.update(int(axis) % rank for axis in spec.axes or {} if -rank <= int(axis) < rank)
        if spec.shape is not None and len(spec.shape) == rank:
            axes.update(axis for axis, size in enumerate(spec.shape) if size is not None)
        if axes or position:
            return frozenset(axes)
    elif specs:
        return frozenset()
    if rank > 1 and dtype.is_floating_point and layer.weights:
        axes.add(rank - 1)
    return frozenset(axes)


def declared_axes(layer: Any, position: int, rank: int) -> dict[int, int]:
    """The sizes that a layer's input spec fixes for one of its inputs, by axis."""
    specs = _input_specs(layer)
    if position >= len(specs) or specs[position] is None:
        return {}
    spec = specs[position]
    axes = {int(a) % rank: n for a, n in (spec.axes or {}).items() if -rank <= int(a) < rank}
    if spec.shape is not None and len(spec.shape) == rank:
        axes.update(enumerate(spec.shape))
    return {axis: size for axis, size in axes.items() if size is not None}
