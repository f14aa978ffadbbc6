"""Permutes: two in a row are one, and one that moves nothing is none.

Channels-last layers permute into torch's axis order and back; between two of them the
permutes meet and vanish, also across elementwise operations on a single path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from keras_turbo.passes.elementwise import ELEMENTWISE


def merge_permutes(graph: fx.Graph) -> None:
    """Compose permutes of permutes and drop those that are the identity."""
    for node in list(graph.nodes):
        order = _order(node)
        if order is None:
            continue
        source = node.args[0]
        _sink_below_elementwise(node)
        inner = _order(source) if isinstance(source, fx.Node) else None
        if inner is None or len(inner) != len(order):
            continue
        order = tuple(inner[axis] for axis in order)
        base = source.args[0]
        if order == tuple(range(len(order))):
            node.replace_all_uses_with(base)
            graph.erase_node(node)
        else:
            node.args = (base, order)
        if not source.users:
            graph.erase_node(source)


def _sink_below_elementwise(node: fx.Node) -> None:
    """Move a permute behind the elementwise operations that alone use its result."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or user.target not in ELEMENTWISE or user.kwargs:
            return
        if user.args[0] is not node or any(isinstance(arg, fx.Node) for arg in user.args[1:]):
            return
        source = node.args[0]
        user.args = (source, *user.args[1:])
        user.replace_all_uses_with(node)
        metas = node.meta.get("metas")
        node.args = (user, *node.args[1:])
        user.append(node)
        if isinstance(source, fx.Node) and source.meta.get("metas"):
            user.meta["metas"] = source.meta["metas"]
        if metas:
            node.meta["metas"] = metas


def _order(node: fx.Node) -> tuple[int, ...] | None:
    """The axes of a permute with known axes, else None."""
    method = node.op == "call_method" and node.target == "permute"
    if not method and not (node.op == "call_function" and node.target is torch.permute):
        return None
    axes: tuple[Any, ...] = node.args[1:]
    if len(axes) == 1 and isinstance(axes[0], (tuple, list)):
        axes = tuple(axes[0])
    if node.kwargs or not all(isinstance(axis, int) for axis in axes):
        return None
    rank = len(axes)
    return tuple(axis % rank for axis in axes)
