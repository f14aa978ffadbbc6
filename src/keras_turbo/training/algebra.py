"""Algebra: the same numbers of a recorded step with less work over large tensors.

Gradients of reductions arrive as small tensors spread over large ones, negated and scaled
there. Each rewrite here is exact in floating point: what is done to every copy of a number is
done once, a sign is taken after the sum instead of before, a factor of two goes to the
smaller operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from keras_turbo.training.memory import Writes

_SCALAR = frozenset({torch.mul, torch.div, torch.add, torch.sub, torch.neg})
_SUMS = frozenset({torch.sum, torch.mean})


def simplify_algebra(graph: fx.Graph) -> None:
    """Apply all rewrites, in one walk."""
    writes = Writes(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_float(node):
            continue
        if not writes.settled(node, *node.all_input_nodes):
            continue
        if node.target in _SCALAR:
            _before_spreading(graph, node)
        if node.target in _SUMS:
            _sign_after_sum(graph, node, writes)
        if node.target is torch.mul:
            _factor_to_the_smaller(graph, node, writes)
        if node.target is torch.where:
            _zero_once(graph, node)


def _before_spreading(graph: fx.Graph, node: fx.Node) -> None:
    """Compute with numbers before they are expanded."""
    spread: Any
    spread, *rest = node.args
    if not _is_spread(spread) or node.kwargs or not all(_is_number(item) for item in rest):
        return
    source = spread.args[0]
    target: Any = node.target
    with graph.inserting_before(node):
        small = graph.call_function(target, (source, *rest))
        wide = graph.call_method("expand", (small, list(_meta(node).shape)))
    _like(small, source)
    wide.meta.update(spread.meta)
    node.replace_all_uses_with(wide)
    graph.erase_node(node)
    if not spread.users:
        graph.erase_node(spread)


def _sign_after_sum(graph: fx.Graph, node: fx.Node, writes: Writes) -> None:
    """Rounding is symmetric: the sum of negated numbers is the negated sum."""
    inner: Any = node.args[0]
    if not isinstance(inner, fx.Node) or inner.target is not torch.neg or len(inner.users) != 1:
        return
    if not writes.settled(inner.args[0]):
        return
    node.args = (inner.args[0], *node.args[1:])
    with graph.inserting_after(node):
        negated = graph.call_function(torch.neg, (node,))
    negated.meta.update(node.meta)
    negated.meta["name"] = "neg"
    node.replace_all_uses_with(negated, lambda user: user is not negated)
    graph.erase_node(inner)


def _factor_to_the_smaller(graph: fx.Graph, node: fx.Node, writes: Writes) -> None:
    """A power of two scales the spread operand of a product instead of the large one."""
    operands: tuple[Any, ...] = node.args
    for spread, scaled in (operands[:2], operands[1::-1]):
        if not _is_spread(spread) or not isinstance(scaled, fx.Node) or node.kwargs:
            continue
        if scaled.target is not torch.mul or len(scaled.users) != 1 or scaled.kwargs:
            continue
        large, factor = scaled.args[:2]
        if factor not in (2.0, -2.0, 0.5) or not isinstance(large, fx.Node):
            continue
        if len(spread.users) != 1 or _meta(large).shape != _meta(node).shape:
            continue
        source = spread.args[0]
        if not writes.settled(large, source):
            continue
        with graph.inserting_before(spread):
            small = graph.call_function(torch.mul, (source, factor))
        _like(small, source)
        spread.replace_input_with(source, small)
        node.args = (spread, large)
        graph.erase_node(scaled)
        return


def _zero_once(graph: fx.Graph, node: fx.Node) -> None:
    """A choice between numbers and zeros needs one zero."""
    value: Any
    other: Any
    _, value, other = node.args
    if not isinstance(other, fx.Node) or other.meta.get("name") != "zeros_like":
        return
    same = isinstance(value, fx.Node) and _meta(value).dtype == _meta(other).dtype
    if not same or _meta(value).shape != _meta(node).shape or not _meta(other).ndim:
        return
    with graph.inserting_before(node):
        how = {"dtype": _meta(other).dtype, "device": other.meta["device"]}
        zero = graph.call_function(torch.zeros, ((),), how)
    zero.meta.update(
        name="zeros",
        metas=(torch.empty((), dtype=how["dtype"], device="meta"),),
        device=how["device"],
        aliases=False,
        effect=False,
    )
    node.replace_input_with(other, zero)


def _is_spread(item: Any) -> bool:
    if not isinstance(item, fx.Node) or item.op != "call_method" or item.target != "expand":
        return False
    source = item.args[0]
    return isinstance(source, fx.Node) and _meta(source).numel() < _meta(item).numel()


def _is_number(item: Any) -> bool:
    return isinstance(item, (int, float)) and not isinstance(item, bool)


def _is_float(node: fx.Node) -> bool:
    return "metas" in node.meta and _meta(node).dtype.is_floating_point


def _like(node: fx.Node, source: fx.Node) -> None:
    """Describe the elementwise result of a small tensor."""
    meta = torch.empty_like(_meta(source))
    node.meta.update(source.meta)
    target: Any = node.target
    node.meta.update(metas=(meta,), aliases=False, effect=False, name=target.__name__)


def _meta(node: fx.Node) -> torch.Tensor:
    return node.meta["metas"][0]
