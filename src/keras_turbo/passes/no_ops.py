"""No-ops: casts and moves that return their input, which Keras's code is full of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_DEVICES = (str, torch.device)


def remove_no_ops(graph: fx.Graph) -> None:
    """Replace a cast to the same dtype, or a move to the program's device, by its input."""
    for node in list(graph.nodes):
        if _returns_its_input(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _returns_its_input(node: fx.Node) -> bool:
    if node.op != "call_method" or node.target != "to" or node.kwargs or len(node.args) != 2:
        return False
    source, wanted = node.args
    metas: Any = source.meta.get("metas") if isinstance(source, fx.Node) else None
    if isinstance(wanted, _DEVICES):
        # A program lives on one device: the guard and the assumptions pin inputs and
        # weights to it, so a move inside can only be one that stays.
        return str(wanted) != "meta"
    return metas is not None and isinstance(wanted, torch.dtype) and metas[0].dtype == wanted
