"""In-place: write an elementwise result over its input where the program owns that input.

Owned means: made by an operation of this program that returns fresh memory, used by this
node only, and not kept for the backward pass by the operation that made it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_FRESH_AND_UNSAVED = frozenset(
    {
        torch.addmm,
        torch.mm,
        torch.bmm,
        torch.baddbmm,
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.add,
        torch.sub,
        torch.mul,
        torch.batch_norm,
        torch.layer_norm,
        torch.group_norm,
        torch._C._nn.linear,
        operator.add,
        operator.sub,
        operator.mul,
    }
)
"""Functions whose result is new memory that their own gradient does not need."""

_IN_PLACE: dict[Any, str] = {
    torch.relu: "relu_",
    torch.add: "add_",
    operator.add: "add_",
    torch.sigmoid: "sigmoid_",
    torch.tanh: "tanh_",
}

_FRESH = _FRESH_AND_UNSAVED | {
    torch.embedding,
    torch.softmax,
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    torch.div,
    operator.truediv,
    torch._C._nn.gelu,
    torch._C._nn.silu,
}
"""Functions whose result is new memory, for calls that keep nothing for a backward pass."""

_WITH_OUT = frozenset(
    {
        torch._C._nn.gelu,
        torch._C._nn.silu,
        torch._C._nn.elu,
        torch._C._nn.leaky_relu,
        torch._C._nn.hardswish,
        torch._C._nn.hardsigmoid,
        torch._C._nn.hardtanh,
    }
)
"""Elementwise functions of one tensor that write where they are told to."""

_MATMULS = frozenset({torch.matmul, operator.matmul})


def reuse_owned_memory(graph: fx.Graph) -> None:
    """Turn elementwise operations on owned intermediates into in-place ones."""
    _reuse(graph, _FRESH_AND_UNSAVED)


def reuse_without_gradients(graph: fx.Graph) -> None:
    """The same for a graph that only serves calls without gradients."""
    _reuse(graph, _FRESH)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _WITH_OUT and not node.kwargs:
            owned = _owned_operand(node, _FRESH)
            if owned is not None and owned is node.args[0]:
                node.kwargs = {"out": owned}


def _reuse(graph: fx.Graph, fresh: frozenset[Any]) -> None:
    for node in list(graph.nodes):
        method = _IN_PLACE.get(node.target) if node.op == "call_function" else None
        if method is None or not node.args or node.kwargs:
            continue
        owned = _owned_operand(node, fresh)
        if owned is None:
            continue
        rest = [arg for arg in node.args if arg is not owned]
        with graph.inserting_before(node):
            replacement = graph.call_method(method, (owned, *rest))
        replacement.meta.update(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _owned_operand(node: fx.Node, fresh: frozenset[Any]) -> fx.Node | None:
    result = node.meta.get("metas")
    if result is None:
        return None
    for arg in node.args:
        if not isinstance(arg, fx.Node) or len(arg.users) != 1:
            continue
        if sum(other is arg for other in node.args) != 1 or not _is_fresh(arg, fresh):
            continue
        made = arg.meta.get("metas")
        if made and all(
            m.shape == r.shape and m.dtype == r.dtype for m, r in zip(made, result, strict=True)
        ):
            return arg
    return None


def _is_fresh(node: fx.Node, fresh: frozenset[Any]) -> bool:
    if node.op == "call_method":
        return node.target == "add_" and not node.meta.get("effect")
    if node.op != "call_function":
        return False
    if node.target in _MATMULS:
        # A product with a vector or of batches may be a view of another result.
        metas = node.meta.get("metas")
        return bool(metas) and metas[0].ndim >= 2
    return node.target in fresh and "out" not in node.kwargs
