"""Rows: layers that work on the last axis run on matrices, one row for each position.

A product of a tensor of three axes with a matrix flattens its operand, multiplies and views
the result back. Between such products lie only operations on single positions: kept as
matrices from one to the next, everything in between costs one call per operation. Tensors
get their axes back where something else reads them. Only for calls without gradients.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from keras_turbo.passes.elementwise import ELEMENTWISE

_UNARY: frozenset[Any] = ELEMENTWISE | {"relu_", "sigmoid_", "tanh_"}
_BINARY: frozenset[Any] = frozenset({torch.add, operator.add, "add_", torch.mul, operator.mul})


def use_rows(graph: fx.Graph) -> None:
    """Rewrite what works on single positions to matrices."""
    sizes = _Sizes(graph)
    rows: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or _rank(node) < 3:
            continue
        if not sizes.knows(node):
            continue
        with graph.inserting_before(node):
            made = _as_rows(graph, node, rows)
        if made is not None:
            made.meta["metas"] = tuple(_matrix(m) for m in node.meta["metas"])
            rows[node] = made
    for node, made in list(rows.items()):
        if node.target is torch.embedding and not any(user in rows for user in node.users):
            del rows[node]
            reshape = made.args[1]
            graph.erase_node(made)
            graph.erase_node(reshape)  # type: ignore[arg-type]
    for node, made in rows.items():
        _give_back(graph, node, made, rows, sizes)
    for node in reversed(list(rows)):
        graph.erase_node(node)


def _matrix(meta: torch.Tensor) -> torch.Tensor:
    return meta.new_empty((meta.numel() // max(1, meta.shape[-1]), meta.shape[-1]))


def _as_rows(graph: fx.Graph, node: fx.Node, rows: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The node's result as a matrix, or None where it has to keep its axes."""
    args: tuple[Any, ...] = node.args
    target: Any = node.target
    if target is torch.embedding and not node.kwargs and len(args) == 2:
        return graph.call_function(target, (args[0], graph.call_method("reshape", (args[1], -1))))
    if target is torch._C._nn.linear and not node.kwargs and args[1].meta["metas"][0].numel():
        return _linear(graph, args, rows)
    x = args[0] if args else None
    if x not in rows:
        return _sum_of(graph, node, rows)
    if target in (torch.matmul, operator.matmul) and _rank(args[1]) == 2 and not node.kwargs:
        return graph.call_function(torch.mm, (rows[x], args[1]))
    if target is torch.layer_norm and len(args[1]) == 1:
        return graph.call_function(target, (rows[x], *args[1:]), node.kwargs)
    if target in _UNARY and "out" not in node.kwargs:
        if any(isinstance(arg, fx.Node) for arg in args[1:]):
            return None
        return graph.create_node(node.op, target, (rows[x], *args[1:]), node.kwargs)
    return _sum_of(graph, node, rows)


def _linear(graph: fx.Graph, args: tuple[Any, ...], rows: dict[fx.Node, fx.Node]) -> fx.Node:
    x: Any = args[0]
    weight: Any = args[1]
    bias = args[2] if len(args) > 2 else None
    if x in rows:
        flat = rows[x]
    else:
        # A reshape of a reshape keeps the order of the elements too.
        while x.op == "call_method" and x.target in ("flatten", "reshape"):
            x = x.args[0]
        flat = graph.call_method("reshape", (x, -1, weight.meta["metas"][0].shape[1]))
    if bias is None or weight.target != "t":
        return graph.call_function(torch._C._nn.linear, (flat, weight, bias))
    return graph.call_function(torch.addmm, (bias, flat, weight.args[0]))


def _sum_of(graph: fx.Graph, node: fx.Node, rows: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """A sum or product of positions with positions, or with one vector for all of them."""
    args: tuple[Any, ...] = node.args
    if node.target not in _BINARY or node.kwargs or len(args) != 2:
        return None
    if not all(isinstance(arg, fx.Node) for arg in args) or not any(arg in rows for arg in args):
        return None
    if node.target == "add_" and args[0] not in rows:
        return None
    size = node.meta["metas"][0].shape[-1]
    operands = []
    for arg in args:
        if arg in rows:
            operands.append(rows[arg])
        elif _rank(arg) == 1 and arg.meta["metas"][0].shape[0] == size:
            operands.append(arg)
        elif _same_shape(arg, node):
            operands.append(graph.call_method("reshape", (arg, -1, size)))
        else:
            return None
    if not all(arg not in rows or _same_shape(arg, node) for arg in args):
        return None
    return graph.create_node(node.op, node.target, tuple(operands))


def _give_back(
    graph: fx.Graph, node: fx.Node, made: fx.Node, rows: dict[fx.Node, fx.Node], sizes: _Sizes
) -> None:
    """Let users outside the rows read a tensor with all its axes."""
    whole: fx.Node | None = None
    for user in [user for user in node.users if user not in rows]:
        lead = sizes.of(graph, node)
        with graph.inserting_before(user):
            if user.target is torch.unflatten and user.args[1] in (-1, _rank(node) - 1):
                parts: Any = user.args[2]
                view = graph.call_method("view", (made, *lead, *parts))
                view.meta.update(user.meta)
                user.replace_all_uses_with(view)
                graph.erase_node(user)
                continue
            if whole is None:
                whole = graph.call_method("view", (made, *lead, node.meta["metas"][0].shape[-1]))
                whole.meta.update(node.meta)
        user.replace_input_with(node, whole)


class _Sizes:
    """The leading sizes of tensors, as numbers or as read from the inputs at run time."""

    def __init__(self, graph: fx.Graph) -> None:
        self.known: dict[tuple[int, ...], tuple[fx.Node, int]] = {}
        self.read: dict[Any, fx.Node] = {}
        self.last = None
        for node in graph.nodes:
            if node.op != "placeholder":
                continue
            self.last = node
            for axis, pair in enumerate(_pairs(node)):
                self.known.setdefault(pair, (node, axis))

    def knows(self, node: fx.Node) -> bool:
        """Whether all sizes but the last are known, and the last is a number beyond 0."""
        *lead, last = _pairs(node)
        return (
            len(set(last)) == 1
            and last[0] > 0
            and all(len(set(p)) == 1 or p in self.known for p in lead)
        )

    def of(self, graph: fx.Graph, node: fx.Node) -> list[Any]:
        """The sizes of all axes but the last."""
        return [
            pair[0] if len(set(pair)) == 1 else self._size(graph, *self.known[pair])
            for pair in _pairs(node)[:-1]
        ]

    def _size(self, graph: fx.Graph, source: fx.Node, axis: int) -> fx.Node:
        if (source, axis) not in self.read:
            assert self.last is not None
            if source not in self.read:
                with graph.inserting_after(self.last):
                    self.read[source] = graph.call_function(getattr, (source, "shape"))
            with graph.inserting_after(self.read[source]):
                size = graph.call_function(operator.getitem, (self.read[source], axis))
            self.read[source, axis] = size
        return self.read[source, axis]


def _pairs(node: fx.Node) -> list[tuple[int, ...]]:
    """The sizes of each axis in the two evaluations of a trace."""
    metas = node.meta.get("metas")
    return list(zip(*(meta.shape for meta in metas), strict=True)) if metas else []


def _rank(node: Any) -> int:
    metas = node.meta.get("metas") if isinstance(node, fx.Node) else None
    return metas[0].ndim if metas and isinstance(metas[0], torch.Tensor) else -1


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    return _pairs(a) == _pairs(b)
