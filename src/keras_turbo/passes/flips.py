"""Flips: a flip of a flip along the same axes is what was there before.

A recurrent layer that runs backwards returns its outputs reversed in time, and a wrapper
around two directions turns them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def remove_double_flips(graph: fx.Graph) -> None:
    """Replace a flip of a flip along the same axes by what is flipped."""
    for node in list(graph.nodes):
        axes = _axes(node)
        source: Any = node.args[0] if axes is not None else None
        if axes is None or not isinstance(source, fx.Node) or _axes(source) != axes:
            continue
        node.replace_all_uses_with(source.args[0])
        graph.erase_node(node)


def _axes(node: fx.Node) -> frozenset[int] | None:
    """The axes along which a node flips its input, None if it does something else."""
    flips = node.op == "call_method" and node.target == "flip"
    if not flips and not (node.op == "call_function" and node.target is torch.flip):
        return None
    axes: Any = node.args[1:] or (node.kwargs.get("dims"),)
    axes = axes[0] if isinstance(axes[0], (tuple, list)) else axes
    metas = node.meta.get("metas")
    if metas is None or not all(isinstance(axis, int) for axis in axes):
        return None
    return frozenset(axis % metas[0].ndim for axis in axes)
