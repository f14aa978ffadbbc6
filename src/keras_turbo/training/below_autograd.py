"""Passes on a recorded step, which no autograd will ever see.

Operations arrive as the overloads that the dispatcher saw. The common ones become the
functions and methods that cost least to call; what only served autograd goes: aliases,
copies of gradients that nothing else holds, and numbers that are the same at every step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from keras_turbo import compat
from keras_turbo.passes.in_place import reuse_without_gradients
from keras_turbo.training.algebra import simplify_algebra
from keras_turbo.training.memory import VIEWS, Writes
from keras_turbo.training.reuse import held_once, reuse_gradients


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_METHODS = _words(
    "t view expand permute transpose unsqueeze squeeze select copy_ add_ mul_ div_ sub_ relu_"
    " sigmoid_ tanh_ fill_ zero_"
)
_FUNCTIONS = _words(
    "mm addmm bmm baddbmm relu sigmoid tanh sum mean add sub mul div neg square sqrt rsqrt exp"
    " log abs eq ne lt gt le ge argmax maximum minimum where cat stack embedding clamp clamp_min"
    " pow"
)
_ALIASES = _words("detach alias lift_fresh")
_FILLED = _words("ones_like zeros_like full_like new_full ones zeros full scalar_tensor")
_FOLDABLE = _words("div mul neg expand unsqueeze view add sub")
MAX_FOLDED = 1 << 16
"""The most elements of a constant that is worth keeping."""


def simplify(graph: fx.Graph, constants: dict[str, Any]) -> None:
    """Run all passes on a recorded graph; folded numbers are added to the constants."""
    for node in list(graph.nodes):
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _name(graph, node)
    for node in list(graph.nodes):
        _drop_first_power(graph, node)
        _drop_kept_axis(node)
        _take_over(graph, node)
    _remove_unused(graph)
    simplify_algebra(graph)
    _fold(graph, constants)
    _remove_unused(graph)
    reuse_without_gradients(graph)
    reuse_gradients(graph)


def _remove_unused(graph: fx.Graph) -> None:
    """Remove what nobody uses and that writes nothing."""
    for node in reversed(list(graph.nodes)):
        pure = node.op not in ("placeholder", "output") and not node.meta.get("effect")
        if pure and not node.users:
            graph.erase_node(node)


def _name(graph: fx.Graph, node: fx.Node) -> None:
    """Turn an overload into the function or method that is cheapest to call."""
    overload: Any = node.target
    namespace, _, name = overload._schema.name.partition("::")
    node.meta["effect"] = overload._schema.is_mutable
    node.meta["name"] = name
    written = [a for a in overload._schema.arguments if a.alias_info and a.alias_info.is_write]
    taken = [a for a in overload._schema.arguments if not a.kwarg_only]
    node.meta["writes"] = (
        [i for i, a in enumerate(taken) if a in written],
        [a.name for a in written],
    )
    if namespace != "aten":
        return
    if name in _ALIASES:
        source: Any = node.args[0]
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif name == "_unsafe_view" or name in _METHODS:
        node.op, node.target = "call_method", "view" if name == "_unsafe_view" else name
    elif name in _FUNCTIONS:
        node.target = getattr(torch, name)
    else:
        node.target = overload._op


def _drop_first_power(graph: fx.Graph, node: fx.Node) -> None:
    """Drop a power of one, which the gradient of a square contains."""
    if node.target is torch.pow and node.args[1] == 1.0 and not node.kwargs:
        source = node.args[0]
        if isinstance(source, fx.Node) and _meta(source).dtype == _meta(node).dtype:
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _drop_kept_axis(node: fx.Node) -> None:
    """A sum that keeps its axes, for a view that drops them again, need not keep them."""
    if node.target != "view" or not isinstance(node.args[0], fx.Node):
        return
    source = node.args[0]
    if source.target is not torch.sum or len(source.users) != 1 or len(source.args) != 3:
        return
    operand, axes, keep = source.args
    if not keep or not isinstance(axes, (tuple, list)) or source.kwargs:
        return
    rank = _meta(source).ndim
    dropped = {axis % rank for axis in axes}  # type: ignore[operator]
    sizes = [n for i, n in enumerate(_meta(source).shape) if i not in dropped]
    if list(node.args[1]) == sizes:  # type: ignore[arg-type]
        node.op, node.target, node.args = "call_function", torch.sum, (operand, axes)
        node.meta.update(name="sum", aliases=False)


def _take_over(graph: fx.Graph, node: fx.Node) -> None:
    """A gradient copied into fresh memory of the same order, and held by nothing else, stays.

    Autograd itself takes such gradients over; it copies here because the recording holds them.
    """
    if node.target != "copy_" or len(node.args) != 2:
        return
    target, source = node.args
    if not isinstance(target, fx.Node) or target.meta.get("name") not in _EMPTY:
        return
    if not isinstance(source, fx.Node) or len(target.users) != 1:
        return
    same = _meta(target).stride() == _meta(source).stride()
    if same and _meta(target).dtype == _meta(source).dtype and held_once(source, node, target):
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        graph.erase_node(target)


_EMPTY = frozenset({"new_empty_strided", "empty_like"})


def _fold(graph: fx.Graph, constants: dict[str, Any]) -> None:
    """Compute what is the same at every step: the gradient of a mean, say."""
    known: dict[fx.Node, torch.Tensor] = {}
    writes = Writes(graph)
    with compat.outside_modes(), torch.no_grad():
        for node in graph.nodes:
            name = node.meta.get("name")
            if not writes.settled(node):
                continue
            if name in _FILLED and not isinstance(node.kwargs.get("fill_value"), fx.Node):
                value = _filled(name, node)
            elif name in _FOLDABLE and all(source in known for source in node.all_input_nodes):
                value = _computed(node, known)
            else:
                continue
            if value is not None and value.numel() <= MAX_FOLDED:
                known[node] = value
    for node, value in known.items():
        ends = [user for user in node.users if user not in known]
        if not ends or any(u.op == "output" or u.meta.get("effect") for u in ends):
            continue
        if any(u.target in VIEWS or u.target == "expand" for u in ends):
            continue
        name = f"folded_{node.name}"
        constants[name] = value.contiguous() if value.ndim else value
        with graph.inserting_before(node):
            constant = graph.create_node("get_attr", name)
        constant.meta.update(node.meta)
        for user in ends:
            user.replace_input_with(node, constant)


def _filled(name: str, node: fx.Node) -> torch.Tensor | None:
    if any(isinstance(arg, fx.Node) for arg in node.args[1:]):
        return None
    meta = _meta(node)
    if meta.numel() > MAX_FOLDED:
        return None
    if name.startswith(("ones", "zeros")):
        number: Any = 1 if name.startswith("ones") else 0
    else:
        number = node.args[{"scalar_tensor": 0, "new_full": 2}.get(name, 1)]
    home = node.meta["device"]
    return torch.full(meta.shape, number, dtype=meta.dtype, device=home)  # type: ignore[arg-type]


def _computed(node: fx.Node, known: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    args = fx.map_arg(node.args, lambda n: known[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: known[n])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)  # type: ignore[index]
    target: Any = node.target
    return target(*args, **kwargs)


def _meta(node: fx.Node) -> torch.Tensor:
    return node.meta["metas"][0]
