"""Compiled steps: the recorded graph of a training step, handed to Inductor as it is.

A recorded step is one straight line of torch operations over tensors: nothing is left for
Dynamo to trace, so there is no graph break and no recompilation. Parameters and states
become inputs, which the compiled code reads and writes in place. What draws from a Keras
seed runs before the compiled code, as written.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from keras_turbo import compat
from keras_turbo.guard import MISS
from keras_turbo.program import attach_mask
from keras_turbo.training.reductions import quotient
from keras_turbo.training.standing import Place, Standing, rebuild

PATIENCE = 3.0
"""After how many seconds of compiling the user is told, in seconds."""


def compile_recorded(
    graph: fx.Graph,
    constants: dict[str, Any],
    inputs: Sequence[torch.Tensor],
    how: dict[str, Any],
) -> Callable[..., Any]:
    """Compile a recorded step.

    Args:
        graph: a graph made by `record`, before any pass.
        constants: the tensors that its `get_attr` nodes refer to, by name.
        inputs: a batch of the sizes that it was recorded with.
        how: the compiler's `mode` and `options`.

    Returns:
        A function of a batch that returns what the graph returns, or `MISS` where a parameter
        is not laid out as it was.

    Raises:
        Exception: whatever the compiler raises.
    """
    before, after = fx.Graph(), fx.Graph()
    _split(graph, before, after)
    as_written = any(node.op == "call_function" for node in before.nodes)
    drawn = fx.GraphModule(dict(constants), before) if as_written else None
    names = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    standing = Standing([constants[name] for name in names])
    flat: list[Any] = []
    (output,) = (node for node in after.nodes if node.op == "output")
    template = map_aggregate(output.args[0], lambda item: _place(item, flat))
    output.args = (tuple(flat),)

    def extra(batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(drawn(*batch)) if drawn is not None else []

    module = fx.GraphModule({}, after)
    with warnings.catch_warnings(), compat.outside_modes(), torch.no_grad():
        # The compiler warns about its own use of deprecated functions.
        warnings.simplefilter("ignore", DeprecationWarning)
        examples = [*inputs, *(standing() or ()), *extra(inputs)]
        compiled = compat.inductor_compile(module, examples, how)

    def run(*batch: torch.Tensor) -> Any:
        tensors = standing()
        if tensors is None:
            return MISS
        return rebuild(template, compiled(*batch, *tensors, *extra(batch)))

    return run


def _place(item: Any, flat: list[Any]) -> Any:
    if not isinstance(item, fx.Node):
        return item
    flat.append(item)
    return Place(len(flat) - 1)


def _split(graph: fx.Graph, before: fx.Graph, after: fx.Graph) -> None:
    """Copy a graph in two: what runs as written, and what is compiled.

    What `before` returns, `after` takes behind inputs and parameters.
    """
    late: dict[fx.Node, fx.Node] = {}
    for wanted in ("placeholder", "get_attr"):
        for node in graph.nodes:
            if node.op == wanted:
                late[node] = after.placeholder(str(node.target))
    for draw in _as_written(graph, before):
        late[draw] = after.placeholder(draw.name)
    for node in graph.nodes:
        in_python = node.op == "call_function" and not node.all_input_nodes
        if node in late or node.target is attach_mask or (in_python and node.meta.get("effect")):
            continue
        if node.target is quotient:
            total, count = fx.map_arg(node.args, lambda n: late[n])  # type: ignore[misc]
            late[node] = _quotient(after, total, count)
        else:
            late[node] = after.node_copy(node, lambda n: late[n])


def _as_written(graph: fx.Graph, before: fx.Graph) -> list[fx.Node]:
    """Copy what runs as written; returns the nodes whose results the rest needs."""
    early: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            early[node] = before.create_node(node.op, str(node.target))
    needed = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        draws = _runs_as_written(node)
        if draws:
            needed.append(node)
            for source in _ancestors(node):
                if source not in early:
                    early[source] = before.node_copy(source, lambda n: early[n])
        if draws or (node.meta.get("effect") and not node.all_input_nodes):
            early[node] = before.node_copy(node, lambda n: early[n])
    before.output(tuple(early[draw] for draw in needed))
    return needed


def _runs_as_written(node: fx.Node) -> bool:
    target: Any = node.target
    return getattr(target, "one_node", False) and target is not quotient


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """What a node is computed from, in order, without inputs and parameters."""
    found: dict[fx.Node, None] = {}

    def visit(item: fx.Node) -> None:
        for source in item.all_input_nodes:
            if source not in found and source.op not in ("placeholder", "get_attr"):
                visit(source)
                found[source] = None

    visit(node)
    return list(found)


def _quotient(graph: fx.Graph, total: Any, count: Any) -> fx.Node:
    """`quotient` without a branch on a tensor, which cannot be compiled."""
    aten = torch.ops.aten
    if not isinstance(count, fx.Node):
        target = aten.div.Scalar if count else aten.mul.Scalar
        return graph.call_function(target, (total, count))
    zero = graph.call_function(aten.eq.Scalar, (count, 0))
    ratio = graph.call_function(aten.div.Tensor, (total, count))
    nothing = graph.call_function(aten.zeros_like.default, (total,))
    return graph.call_function(aten.where.self, (zero, nothing, ratio))


def draws(graph: fx.Graph) -> bool:
    """Whether a recorded step draws from torch's own random numbers."""
    tag = torch.Tag.nondeterministic_seeded
    return any(tag in getattr(node.target, "tags", ()) for node in graph.nodes)


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Say on stderr that something is being compiled, once it takes long."""
    started = time.perf_counter()
    told = threading.Event()

    def tell() -> None:
        told.set()
        print(f"keras_turbo: compiling {what} ...", file=sys.stderr, flush=True)

    timer = threading.Timer(PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if told.is_set():
            seconds = time.perf_counter() - started
            print(f"keras_turbo: compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
