"""Reuse: elementwise operations of a recorded step write over what nobody reads again.

A gradient that passes through an activation, a scale or a sum is read once and gone. The
operation writes its result there instead of asking for new memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from keras_turbo.training.memory import VIEWS

Order = dict[fx.Node, int]
_EITHER = {torch.mul: "mul_", torch.add: "add_"}
_FIRST = {torch.div: "div_", torch.sub: "sub_", torch.neg: "neg_"}
_BACKWARD = frozenset(
    f"{name}_backward"
    for name in (
        "elu",
        "gelu",
        "hardsigmoid",
        "hardtanh",
        "leaky_relu",
        "sigmoid",
        "silu",
        "softplus",
        "tanh",
        "threshold",
    )
)


def reuse_gradients(graph: fx.Graph) -> None:
    """Turn elementwise operations on values that are read once into in-place ones."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.meta.get("name") in _BACKWARD:
            _into_gradient(node, order)
        elif node.target in _FIRST and not node.kwargs:
            _in_place(graph, node, _FIRST[node.target], node.args[:1], order)
        elif node.target in _EITHER and not node.kwargs:
            _in_place(graph, node, _EITHER[node.target], node.args[:2], order)


def _into_gradient(node: fx.Node, order: Order) -> None:
    """Let a backward operation write over the gradient that it takes."""
    name = node.meta["name"]
    overload = getattr(torch.ops.aten, name).grad_input
    source = node.args[0]
    if isinstance(source, fx.Node) and _is_owned(source, node, order):
        node.target = overload._op
        node.kwargs = {**node.kwargs, "grad_input": source}


def _in_place(
    graph: fx.Graph, node: fx.Node, method: str, operands: tuple[Any, ...], order: Order
) -> None:
    for operand in operands:
        if not isinstance(operand, fx.Node) or not _is_owned(operand, node, order):
            continue
        rest = list(node.args)
        rest.remove(operand)
        with graph.inserting_before(node):
            replacement = graph.call_method(method, (operand, *rest))
        replacement.meta.update(node.meta)
        order[replacement] = order[node]
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
        return


def _is_owned(operand: fx.Node, user: fx.Node, order: Order) -> bool:
    """Whether an operand is memory that only `user` reads, fit for the result."""
    if sum(arg is operand for arg in (*user.args, *user.kwargs.values())) != 1:
        return False
    have, want = operand.meta.get("metas"), user.meta["metas"]
    if have is None or have[0].shape != want[0].shape or have[0].dtype != want[0].dtype:
        return False
    if have[0].stride() != want[0].stride():
        return False
    return held_once(operand, user) or _read_last(operand, user, order)


def _read_last(operand: fx.Node, user: fx.Node, order: Order) -> bool:
    """Whether a value is fresh memory that nothing reads, or sees, after `user`."""
    if operand.op != "call_function" or not _makes_fresh(operand):
        return False
    return all(
        other is user or (order[other] < order[user] and _only_reads(other, operand))
        for other in operand.users
    )


def _only_reads(node: fx.Node, operand: fx.Node) -> bool:
    """Whether an operation's result shares no memory with an operand."""
    if node.op == "call_method":
        return node.args[0] is not operand
    fresh = node.op == "call_function" and not node.meta.get("aliases", True)
    return fresh and "unsafe" not in node.meta.get("name", "") and "grad_input" not in node.kwargs


def held_once(node: fx.Node, *users: fx.Node) -> bool:
    """Whether a value is fresh memory of this step that only `users` see."""
    while set(node.users) <= set(users) and node.op in ("call_function", "call_method"):
        if node.target not in VIEWS:
            return node.op == "call_function" and _makes_fresh(node)
        node, users = node.args[0], (node,)  # type: ignore[assignment]
    return False


def _makes_fresh(node: fx.Node) -> bool:
    """Whether an operation returns memory of its own."""
    name = node.meta.get("name", "")
    # What is called unsafe is a view whose schema does not say so.
    if node.meta.get("effect") or "unsafe" in name:
        return False
    if name == "getitem":
        return _makes_fresh(node.args[0])  # type: ignore[arg-type]
    return not node.meta.get("aliases", True)
