"""Programs: the straight-line code that a layer runs instead of stock Keras.

A program is made from a finished trace. Its effects are appended to the graph after all
computation, the passes run, and the graph is written out as one Python function over live
parameters. `code` is exactly the source that runs.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from keras_turbo import compat, emit
from keras_turbo.calls import is_value, mask_of
from keras_turbo.lowering import Row, Trace
from keras_turbo.passes import run_passes, without_gradients
from keras_turbo.specs import CallKind, map_leaves


def attach_mask(tensor: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Attach a Keras mask to an output, or take it off an input."""
    tensor._keras_mask = mask  # type: ignore[attr-defined]


KEEP = object()
"""In the place of a training flag: the one that is there."""


class Program:
    """The lowered form of one layer for one kind of call.

    Attributes:
        graph: the `torch.fx` graph after all passes.
        constants: the live parameters and constants that the graph refers to, by name.
        kind: the kind of call it serves.
        fixed: further `(tensor, axis, size)` facts about the inputs that it relies on.
        relations: comparisons between sizes of the inputs that it relies on.
        rows: one row per layer, for `explain`.
        code: the Python source of `run`.
        run: the function itself; takes each input tensor, followed by its mask if it has one.
        run_without_gradients: the same for calls under no-grad, with parameter views ready made.
        home: the attribute of the owner that holds the inline cache it is in.
        valid: False once an assumption broke.
        clear_losses: whether an outer call must clear recorded losses first.
    """

    def __init__(self, layer: Any, kind: CallKind, trace: Trace) -> None:
        context = trace.context
        record = context.record
        self.kind = kind
        self.owner = weakref.ref(layer)
        self.graph: fx.Graph = context.tracer.graph
        self.constants: dict[str, Any] = context.tracer.constants
        self.fixed = trace.fixed
        self.relations = trace.relations
        self.rows: list[Row] = record.rows
        self.reads = list(record.reads.values())
        self.variables = list(record.variables.values())
        # Behind a stock node the flag is what that has left there.
        self.final_training = KEEP if context.unsure else context.training
        self.stock_calls = record.stock_calls
        self.has_effects = bool(record.assigned or record.losses or record.draws or record.actions)
        self.random = record.random or bool(record.draws)
        self.clear_losses = True
        self.adds_losses = bool(record.losses or record.stock_calls)
        self.home = "_keras_turbo"
        self.valid = True
        self._finish(trace)
        run_passes(self.graph)
        self.code, self.run, self.run_without_gradients = emit.function(
            self.graph, without_gradients(self.graph), self.constants
        )

    def begin(self) -> None:
        """Clear the losses that earlier calls recorded, as stock Keras does first."""
        owner = self.owner()
        if owner is not None:
            owner._clear_losses()
        self.clear_losses = self.adds_losses

    def _finish(self, trace: Trace) -> None:
        """Append effects and the output to the graph."""
        graph, record = self.graph, trace.context.record
        tracer = trace.context.tracer

        def effect(kind: str, target: Any, *args: Any) -> None:
            node = graph.create_node(kind, target, args)
            node.meta["effect"] = True

        masks: list[tuple[fx.Node, fx.Node]] = []

        def collect(item: Any) -> Any:
            mask = mask_of(item)
            if is_value(item) and mask is not None:
                masks.append((item.node, mask.node))
            return item

        map_leaves(collect, trace.outputs)
        for variable, value in record.assigned.values():
            detached = tracer.create_proxy("call_method", "detach", (value,), {})
            target = tracer.parameter(variable.path, variable._value)
            effect("call_method", "copy_", target.node, detached.node)
        for generator, count in record.draws.values():
            state = tracer.parameter(generator.state.path, generator.state._value)
            effect("call_function", advance_seed, state.node, count)
        for layer, value in record.losses:
            effect("call_function", layer.add_loss, value.node)
        for action in record.actions:
            effect("call_function", action)
        for value, given in zip(trace.inputs, trace.input_masks, strict=True):
            if value._keras_mask is not given and value._keras_mask is None:
                effect("call_function", attach_mask, value.node, None)
                self.has_effects = True
        for output, mask in dict.fromkeys(masks):
            effect("call_function", attach_mask, output, mask)
        graph.output(map_aggregate(trace.outputs, _node_of))

    def module(self) -> fx.GraphModule:
        """The program as a module of its own, over the same parameters."""
        graph = fx.Graph()
        output = graph.graph_copy(self.graph, {})
        graph.output(output)
        for node in list(graph.nodes):
            if node.target is attach_mask:
                graph.erase_node(node)
        root = dict(self.constants)
        module = fx.GraphModule(root, graph, class_name="LoweredModule")
        module.train(False)
        return module


def advance_seed(state: torch.Tensor, count: int) -> None:
    """Move a Keras seed state on by a number of draws."""
    state[1] += count


def _node_of(item: Any) -> Any:
    return item.node if isinstance(item, fx.Proxy) else item


def build(layer: Any, kind: CallKind, body: Any = None) -> Program:
    """Lower a layer for a kind of call, or a step around it.

    Raises:
        Decline: when the layer itself cannot be lowered.
    """
    from keras_turbo.lowering import trace

    # What is made here outlives the call: no mode of the caller's may get hold of it.
    with compat.outside_modes():
        if torch.is_inference_mode_enabled():
            # Inference tensors cannot be trained on.
            with torch.inference_mode(False), torch.no_grad():
                return Program(layer, kind, trace(layer, kind, body))
        return Program(layer, kind, trace(layer, kind, body))
