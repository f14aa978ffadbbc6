"""Recording: what a lowered training step really executes, forward and backward.

`record` runs the program of a step on a real batch, takes the gradients by autograd, and
notes every operation below autograd in an `fx` graph. Run again, that graph is the same
step without autograd: no graph of the backward pass is built, kept or walked. Sizes are
those of the batch; the parameters and states stay live.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.program import Program, attach_mask

MAX_NODES = 4000
_DEPENDS_ON_DATA = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_KNOWN = ("torch", "_operator", "builtins", "keras_turbo")


class Recorder(TorchDispatchMode):
    """Appends every operation that reaches a kernel to a graph.

    Args:
        graph: the graph to append to.

    Attributes:
        numbers: tensors made from Python numbers, by the name of their `get_attr` node.
    """

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph
        self.nodes: dict[int, fx.Node] = {}
        self.numbers: dict[str, torch.Tensor] = {}
        # Ids are only good while their tensors live.
        self.alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _DEPENDS_ON_DATA.isdisjoint(func.tags):
            raise Decline(Reason.CONTROL_FLOW, f"{func} depends on the numbers of the batch")
        if func is torch.ops.aten.lift_fresh.default and id(args[0]) not in self.nodes:
            return self._number(func(*args))
        names = map_aggregate((args, kwargs), self.node_of)
        outputs = func(*args, **kwargs)
        self.append(func, *names, outputs)
        return outputs

    def _number(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that torch has just made from Python numbers, new in every step."""
        name = f"number_{len(self.numbers)}"
        self.numbers[name] = tensor.clone()
        source = self.graph.create_node("get_attr", name)
        self.made(tensor, self.graph.call_method("clone", (source,)))
        return tensor

    def append(self, target: Any, args: Any, kwargs: Any, outputs: Any) -> fx.Node:
        """Append a node that has been executed, and note the tensors that it made."""
        if len(self.graph.nodes) > MAX_NODES:
            raise Decline(Reason.UNSUPPORTED, "a step of very many operations")
        node = self.graph.call_function(target, args, kwargs)
        returns = getattr(getattr(target, "_schema", None), "returns", ())
        node.meta["aliases"] = any(item.alias_info is not None for item in returns)
        if isinstance(outputs, torch.Tensor):
            self.made(outputs, node)
        elif isinstance(outputs, (tuple, list)):
            for i, item in enumerate(outputs):
                if isinstance(item, torch.Tensor):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    part.meta["name"] = "getitem"
                    self.made(item, part)
        return node

    def made(self, tensor: torch.Tensor, node: fx.Node) -> None:
        """Note which node a tensor comes from."""
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        node.meta["metas"], node.meta["device"] = (meta,), tensor.device
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def node_of(self, item: Any) -> Any:
        """The node of a tensor; anything else is itself."""
        if isinstance(item, torch.Generator):
            raise Decline(Reason.UNSUPPORTED, "random numbers from a generator of their own")
        if not isinstance(item, torch.Tensor):
            return item
        node = self.nodes.get(id(item))
        if node is None:
            raise Decline(Reason.UNSUPPORTED, "a tensor from outside the step")
        return node


def record(
    program: Program, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor] | None
) -> tuple[fx.Graph, dict[str, Any], Any]:
    """Execute a step, with its effects, and record it.

    Args:
        program: the program of the step; its first output is the loss.
        inputs: the tensors that `program.run` takes.
        parameters: all parameters of the model; their `.grad` is set as a backward pass sets
            it. None for a step without one.

    Returns:
        The graph, which returns the outputs and behind them one gradient or None per
        parameter; the tensors that it refers to; and the outputs of the step itself.

    Raises:
        Decline: for a step that is more than tensor operations. It has run in part.
    """
    graph = fx.Graph()
    recorder = Recorder(graph)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for tensor, node in zip(inputs, placeholders, strict=True):
        recorder.made(tensor, graph.placeholder(node.name))
    for name, tensor in program.constants.items():
        recorder.made(tensor, graph.create_node("get_attr", name))
    grads: tuple[Any, ...] = ()
    with compat.outside_modes(), torch.set_grad_enabled(parameters is not None):
        outputs = _Interpreter(program, recorder).run(*inputs)
        if parameters is not None:
            for parameter in parameters:
                parameter.grad = None
            with recorder:
                outputs[0].backward()
            grads = tuple(
                p.grad if p.grad is None else recorder.node_of(p.grad) for p in parameters
            )
    names = map_aggregate(outputs, recorder.node_of)
    graph.output((names, grads))
    return graph, {**program.constants, **recorder.numbers}, outputs


class _Interpreter(fx.Interpreter):
    """Runs the nodes of a step's program, each under the recorder or as one node."""

    def __init__(self, program: Program, recorder: Recorder) -> None:
        super().__init__(_Root(program.constants), graph=program.graph)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        own: Any = n.target
        if n.op == "call_function" and not (_is_known(own) or _in_python(n)):
            raise Decline(Reason.UNSUPPORTED, "a function of the user's own")
        if n.op == "call_function" and _is_one_node(n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            outputs = own(*args, **kwargs)
            if not isinstance(outputs, torch.Tensor) or not outputs.requires_grad:
                return self._as_one_node(n, args, kwargs, outputs)
        with self.recorder:
            return super().run_node(n)

    def _as_one_node(self, n: fx.Node, args: Any, kwargs: Any, outputs: Any) -> Any:
        names = map_aggregate((args, kwargs), self.recorder.node_of)
        node = self.recorder.append(n.target, *names, outputs)  # type: ignore[misc]
        node.meta["effect"] = bool(n.meta.get("effect"))
        return outputs


def _is_one_node(n: fx.Node) -> bool:
    """Whether a node runs as it is: it draws numbers, or does something in Python."""
    own: Any = n.target
    return getattr(own, "one_node", False) or own is attach_mask or _in_python(n)


def _in_python(n: fx.Node) -> bool:
    """Whether a node is an effect of the call that has nothing to do with tensors."""
    return bool(n.meta.get("effect")) and not n.all_input_nodes


def _is_known(target: Any) -> bool:
    """Whether a function does the same operations at every step."""
    module = getattr(target, "__module__", None) or "torch"
    own = type(target).__module__.partition(".")[0] == "keras_turbo"
    return module.partition(".")[0] in _KNOWN and not own


class _Root(torch.nn.Module):
    """What an interpreter looks attributes up in."""

    def __init__(self, constants: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__.update(constants)
