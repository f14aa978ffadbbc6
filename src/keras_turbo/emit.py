"""Writing a graph out as one Python function.

The function refers to parameters and C functions as globals of its own, so that calling it
costs nothing but the torch operations; each intermediate is dropped after its last use.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import magic_methods

from keras_turbo.aliases import Aliases, view_chains

_INFIX = {
    getattr(operator, name): template
    for name, template in magic_methods.items()
    if hasattr(operator, name)
}
_NAMED_TYPES = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_PLAIN = (bool, int, str, type(None))


class _Names:
    """Global names of the generated function and the objects behind them."""

    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self.values: dict[str, Any] = {}
        self.aliases: dict[fx.Node, str] = {}
        self._by_id: dict[int, str] = {}

    def of(self, value: Any, hint: str) -> str:
        known = self._by_id.get(id(value))
        if known is not None:
            return known
        hint = hint if hint.isidentifier() and not keyword.iskeyword(hint) else "constant"
        name, count = hint, 1
        while name in self.taken or name in self.values or hasattr(builtins, name):
            name, count = f"{hint}_{count}", count + 1
        self.values[name] = value
        self._by_id[id(value)] = name
        return name


Run = Callable[..., Any]


def function(graph: fx.Graph, quiet: fx.Graph, constants: dict[str, Any]) -> tuple[str, Run, Run]:
    """The source of a graph and the compiled function, for calls with gradients and without.

    Args:
        graph: a finished graph with an output node.
        quiet: the graph for calls without gradients.
        constants: the tensor behind each `get_attr` node, by name.

    Returns:
        The source, the function, and a function for calls without gradients that finds the
        views of parameters ready made.
    """
    nodes = [*graph.nodes, *quiet.nodes]
    names = _Names({node.name for node in nodes} | set(constants))
    names.values.update(constants)
    source = _source(graph, names, "program", {})
    run = _compile(source, dict(names.values), "program")
    other, quiet_run = _with_standing_views(quiet, names, constants)
    return source, run, run if other == source else quiet_run


def without_gradients(graph: fx.Graph, constants: dict[str, Any]) -> tuple[str, Run]:
    """The source and the compiled function of a graph that only serves calls without gradients."""
    names = _Names({node.name for node in graph.nodes} | set(constants))
    names.values.update(constants)
    return _with_standing_views(graph, names, constants)


def _with_standing_views(
    graph: fx.Graph, names: _Names, constants: dict[str, Any]
) -> tuple[str, Run]:
    """A graph's source and function in which views of parameters are ready made."""
    namespace = dict(constants)
    chains = view_chains(graph)
    aliases = Aliases(chains, namespace, {node: f"{node.name}_view" for node in chains})
    prologue = []
    if chains:
        roots = dict.fromkeys(str(root.target) for root in chains.values())
        moved = " or ".join(f"{root}.data_ptr() != {root}__at" for root in roots)
        prologue = [f"if {moved}:", "    refresh()"]
        namespace["refresh"] = aliases.refresh
    source = _source(graph, names, "program", aliases.names, prologue)
    namespace.update({k: v for k, v in names.values.items() if k not in namespace})
    return source, _compile(source, namespace, "program")


def _compile(source: str, namespace: dict[str, Any], name: str) -> Run:
    exec(compile(source, "<keras_turbo program>", "exec"), namespace)
    return namespace[name]


def _source(
    graph: fx.Graph,
    names: _Names,
    name: str,
    aliases: dict[fx.Node, str],
    prologue: Sequence[str] = (),
) -> str:
    """The source of a graph as a function of this name; aliased nodes are globals of it."""
    names.aliases = aliases
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last_use[used] = node
    freed: dict[fx.Node, list[str]] = {}
    for used, user in last_use.items():
        owned = used.op in ("call_function", "call_method") and used not in aliases
        if owned and user.op != "output":
            freed.setdefault(user, []).append(_name(used, names))

    parameters = [node.name for node in graph.nodes if node.op == "placeholder"]
    lines = [f"def {name}({', '.join(parameters)}):", *("    " + line for line in prologue)]
    for node in graph.nodes:
        if node in aliases:
            continue
        text = _statement(node, names)
        if text is None:
            continue
        drop = [used for used in freed.get(node, ()) if used != node.name]
        if drop:
            text += f"; {' = '.join(drop)} = None"
        lines.append("    " + text)
    return "\n".join(lines) + "\n"


def _name(node: fx.Node, names: _Names) -> str:
    return str(node.target) if node.op == "get_attr" else names.aliases.get(node, node.name)


def _statement(node: fx.Node, names: _Names) -> str | None:
    if node.op in ("placeholder", "get_attr"):
        return None
    if node.op == "output":
        return f"return {_argument(node.args[0], names)}"
    expression = _expression(node, names)
    return f"{node.name} = {expression}" if node.users else expression


def _expression(node: fx.Node, names: _Names) -> str:
    target: Any = node.target
    if node.op == "call_method":
        return f"{_argument(node.args[0], names)}.{target}({_arguments(node, names, 1)})"
    if target is getattr and not node.kwargs and len(node.args) == 2:
        return f"{_argument(node.args[0], names)}.{node.args[1]}"
    if target is operator.getitem:
        return f"{_argument(node.args[0], names)}[{_subscript(node.args[1], names)}]"
    if target in _INFIX and not node.kwargs:
        return _INFIX[target].format(*(_argument(a, names) for a in node.args))
    hint = node.meta.get("name") or getattr(target, "__name__", type(target).__name__)
    if (getattr(target, "__module__", None) or "torch").startswith("torch"):
        hint = f"torch_{hint}"
    return f"{names.of(target, hint)}({_arguments(node, names, 0)})"


def _arguments(node: fx.Node, names: _Names, start: int) -> str:
    parts = [_argument(item, names) for item in node.args[start:]]
    parts += [f"{key}={_argument(item, names)}" for key, item in node.kwargs.items()]
    return ", ".join(parts)


def _subscript(item: Any, names: _Names) -> str:
    if isinstance(item, tuple) and item:
        return ", ".join(_subscript(entry, names) for entry in item) + (
            "," if len(item) == 1 else ""
        )
    if isinstance(item, slice):
        start, stop, step = (
            "" if part is None else _argument(part, names)
            for part in (item.start, item.stop, item.step)
        )
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return _argument(item, names)


def _argument(item: Any, names: _Names) -> str:
    if isinstance(item, fx.Node):
        return _name(item, names)
    if type(item) in _PLAIN:
        return repr(item)
    if isinstance(item, float):
        return repr(item) if math.isfinite(item) else f"float('{item}')"
    if isinstance(item, list):
        return "[" + ", ".join(_argument(entry, names) for entry in item) + "]"
    if isinstance(item, tuple):
        inner = ", ".join(_argument(entry, names) for entry in item)
        if hasattr(item, "_fields"):
            return f"{names.of(type(item), type(item).__name__)}({inner})"
        return f"({inner},)" if len(item) == 1 else f"({inner})"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{k!r}: {_argument(v, names)}" for k, v in item.items()) + "}"
    if isinstance(item, slice):
        parts = (_argument(part, names) for part in (item.start, item.stop, item.step))
        return f"slice({', '.join(parts)})"
    if item is Ellipsis:
        return "..."
    if isinstance(item, _NAMED_TYPES):
        hint = str(item).split(".")[-1]
        return names.of(item, hint)
    return names.of(item, type(item).__name__.lower())
