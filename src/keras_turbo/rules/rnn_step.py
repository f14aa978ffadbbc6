"""One step of a loop as a function of its own, traced once and called at every time step.

A recurrent layer's program holds its loop as a single node. What happens at each step is
traced like everything else, but into a graph beside the program's: its inputs are what
changes from step to step, and whatever else it needs (weights, dropout masks, sizes) is
captured and enters the node as further arguments, so that these stay live and autograd
sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from keras_turbo import compat, emit
from keras_turbo.fallback import Decline, Reason
from keras_turbo.passes import run_passes, without_gradients


@dataclass(frozen=True)
class Step:
    """A traced step.

    Attributes:
        run: takes the inputs and the captured values; returns a flat tuple.
        run_without_gradients: the same for calls that keep nothing for a backward pass.
        captured: values of the surrounding program that it needs, as proxies.
        structure: its outputs, as the traced function returned them, with every tensor
            replaced by its pair of meta results.
        source: the Python source of `run`.
    """

    run: Callable[..., Any]
    run_without_gradients: Callable[..., Any]
    captured: tuple[Any, ...]
    structure: Any
    source: str


def trace_step(
    ctx: Any, function: Callable[..., Any], inputs: Sequence[tuple[str, tuple[Any, Any]]]
) -> Step:
    """Trace a function into a graph of its own.

    Args:
        ctx: the lowering context.
        function: plain torch code over traced values; returns a structure of them.
        inputs: name and pair of meta tensors of each input.

    Raises:
        Decline: when a step does more than compute: a loop would do it more than once.
    """
    tracer, record = ctx.tracer, ctx.record
    outer, interned, constants = tracer.graph, tracer._interned, set(tracer.constants)
    before, calls = record.snapshot(), record.stock_calls
    inner = fx.Graph()
    tracer.graph, tracer._interned = inner, {}
    try:
        outputs = function(*[tracer.placeholder(name, metas) for name, metas in inputs])
        after = record.snapshot()
    finally:
        tracer.graph, tracer._interned = outer, interned
    if record.stock_calls != calls:
        reason = next(row.reason for row in reversed(record.rows) if not row.lowered)
        if reason.startswith((Reason.SHAPE.name, Reason.CONTROL_FLOW.name)):
            # It may be lowered once sizes are fixed.
            raise Decline(Reason.CONTROL_FLOW, f"a step runs stock Keras: {reason}")
        raise Decline(Reason.NO_RULE, f"a step runs stock Keras: {reason}")
    for name in ("assigned", "losses", "draws", "actions", "random"):
        if before[name] != after[name]:
            raise Decline(Reason.SIDE_EFFECT, "a step that writes state or draws numbers")
    metas = compat.tree.map_structure(_metas, outputs)
    flat = [item.node for item in compat.tree.flatten(outputs)]
    inner.output(tuple(flat))
    captured = _capture(ctx, inner, constants)
    run_passes(inner)
    source, run, quiet = emit.function(inner, without_gradients(inner), {})
    return Step(run, quiet, captured, metas, source)


def _metas(item: Any) -> Any:
    if not isinstance(item, fx.Proxy) or not isinstance(item.metas[0], torch.Tensor):
        raise Decline(Reason.STRUCTURE, "a step that returns something beside tensors")
    return _Pair(item.metas)


class _Pair:
    """A pair of meta tensors that is one leaf of a structure."""

    def __init__(self, metas: Any) -> None:
        self.metas = metas


def _capture(ctx: Any, inner: fx.Graph, constants: set[str]) -> tuple[fx.Proxy, ...]:
    """Turn what a step needs from outside into placeholders behind its own inputs.

    Returns:
        What has to be passed for them, as proxies of the surrounding program.
    """
    tracer = ctx.tracer
    last = [node for node in inner.nodes if node.op == "placeholder"][-1]
    captured: dict[fx.Node, fx.Node] = {}

    def enter(outside: fx.Node, meta: dict[str, Any]) -> fx.Node:
        nonlocal last
        if outside not in captured:
            with inner.inserting_after(last):
                last = captured[outside] = inner.placeholder(f"captured_{len(captured)}")
            last.meta.update(meta)
        return captured[outside]

    for node in list(inner.nodes):
        for source in node.all_input_nodes:
            if source.graph is not inner:
                node.replace_input_with(source, enter(source, source.meta))
    weights = [node for node in inner.nodes if node.op == "get_attr"]
    tensors = [tracer.constants[str(node.target)] for node in weights]
    for name in set(tracer.constants) - constants:
        del tracer.constants[name]
    for node, tensor in zip(weights, tensors, strict=True):
        outside = tracer.parameter(str(node.target), tensor).node
        node.replace_all_uses_with(enter(outside, node.meta))
        inner.erase_node(node)
    return tuple(fx.Proxy(node, tracer) for node in captured)
