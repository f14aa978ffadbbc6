"""Lowering: from a layer and the kinds of its inputs to a traced graph.

`LoweringContext` is what a rule sees. Reads of attributes and variables go through it and
become the program's assumptions; state writes go through it and become its effects.
`trace()` runs the rules over symbolic inputs, at first with every free dimension dynamic
and, where a rule needs to know more, with more of them fixed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from keras_turbo import compat
from keras_turbo.calls import call_layer, scope_inside
from keras_turbo.fallback import Decline, Reason, layer_path
from keras_turbo.layout import relayout
from keras_turbo.specs import CallKind, FakeSizes, Relation, TensorKind, map_leaves
from keras_turbo.stocknode import StockCall, given_training, opaque_metas, stock_metas
from keras_turbo.tracing import Tracer
from keras_turbo.values import VariableValue
from keras_turbo.views import RandomGuard, layer_view, view


@dataclass(frozen=True)
class Row:
    """One line of an explanation: a layer, and whether it was lowered."""

    path: str
    layer: str
    lowered: bool
    reason: str = ""


@dataclass
class Autocast:
    """The autocast scope as it would be at this point of the call."""

    active: bool = False
    dtype: torch.dtype | None = None


@dataclass
class Record:
    """What a trace found out beside the graph: assumptions, effects, rows."""

    reads: dict[int, tuple[Any, set[str]]] = field(default_factory=dict)
    variables: dict[int, Any] = field(default_factory=dict)
    assigned: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    losses: list[tuple[Any, Any]] = field(default_factory=list)
    draws: dict[int, tuple[Any, int]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)
    stock_calls: int = 0
    random: bool = False

    def snapshot(self) -> dict[str, Any]:
        """What must be undone when a rule gives up half-way."""
        return {
            "assigned": dict(self.assigned),
            "losses": list(self.losses),
            "draws": dict(self.draws),
            "rows": list(self.rows),
            "actions": list(self.actions),
            "stock_calls": self.stock_calls,
            "random": self.random,
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        for name, value in snapshot.items():
            setattr(self, name, value)


class LoweringContext:
    """What a lowering rule works with.

    Attributes:
        tracer: appends operations to the graph.
        training: the training flag of Keras's call context at this point.
        autocast: the autocast scope at this point.
        record: the assumptions and effects found so far.
        unsure: stock nodes that may have changed the training flag since it was last given.
    """

    def __init__(self, tracer: Tracer, kind: CallKind, root: Any) -> None:
        self.tracer = tracer
        self.root = root
        self.training: Any = kind.context_training
        self.autocast = Autocast(kind.autocast is not None, kind.autocast_dtype)
        self.record = Record()
        self.unsure: list[StockCall] = []
        self.is_root = True

    def read(self, layer: Any, name: str) -> Any:
        """An attribute of a layer; its value becomes an assumption of the program."""
        self.depend(layer, name)
        return getattr(layer, name)

    def depend(self, layer: Any, *names: str) -> None:
        """Make attributes of a layer assumptions of the program without reading them."""
        self.record.reads.setdefault(id(layer), (layer, set()))[1].update(names)

    def view(self, item: Any) -> Any:
        """A stand-in for a layer whose attribute reads all become assumptions."""
        return view(self, item)

    def variable(self, variable: Any) -> Any:
        """The current value of a Keras variable, cast as the autocast scope asks.

        Args:
            variable: a `keras.Variable`, or None.

        Returns:
            The live parameter as a traced tensor; None for None.
        """
        if variable is None:
            return None
        pending = self.record.assigned.get(id(variable))
        value = self._raw(variable) if pending is None else self._assigned(*pending)
        cast = self.autocast.dtype
        wanted = variable._autocast and cast is not None and value.dtype != cast
        if wanted and compat.is_float(value.dtype):
            value = value.to(cast)
        return VariableValue(value, variable, self)

    def _assigned(self, variable: Any, value: Any) -> Any:
        """What was assigned, as stock Keras holds it then: no gradient flows into it."""
        self.depend(variable, "_trainable")
        if variable._trainable and compat.is_float(value.dtype):
            raise Decline(Reason.UNSUPPORTED, f"{variable.path} is assigned and trained on")
        return value.detach()

    def _raw(self, variable: Any) -> Any:
        tensor = variable._value
        if tensor is None:
            raise Decline(Reason.NOT_BUILT, variable.path)
        if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
            raise Decline(Reason.DISTRIBUTION, f"{variable.path} is a {type(tensor).__name__}")
        if tensor.device != self.tracer.device:
            raise Decline(Reason.DEVICE, f"{variable.path} is on {tensor.device}")
        self.record.variables[id(variable)] = variable
        return self.tracer.parameter(variable.path, tensor)

    def assign(self, variable: Any, value: Any) -> None:
        """Write a variable when the call has succeeded; later reads see the new value."""
        self._raw(variable)
        dtype = compat.to_torch_dtype(variable._dtype)
        if value.dtype != dtype:
            value = value.to(dtype)
        self.record.assigned[id(variable)] = (variable, value)

    def add_loss(self, layer: Any, value: Any) -> None:
        """Record a loss on a layer when the call has succeeded."""
        self.record.losses.append((layer, value))

    def effect(self, function: Callable[[], None]) -> None:
        """Call a function when the call has succeeded."""
        self.record.actions.append(function)

    def draw_seed(self, seed_generator: Any) -> Any:
        """A `torch.Generator` seeded by the next state of a Keras seed generator."""
        state = seed_generator.state
        _, count = self.record.draws.get(id(seed_generator), (seed_generator, 0))
        self.record.draws[id(seed_generator)] = (seed_generator, count + 1)
        return self._raw(state), count

    def random(self) -> None:
        """Say that the outputs depend on random numbers, so that they cannot be compared."""
        self.record.random = True

    def trace(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Trace a function of Keras's own, whose every tensor operation is torch's."""
        with RandomGuard(self):
            return function(*args, **kwargs)

    def prefer_layout(self, variable: Any, order: tuple[int, ...]) -> None:
        """Lay a parameter's storage out with its axes in this order, outermost first.

        Shape and values stay as they are. To be called before the variable is first used;
        does nothing where anything else may share the storage.
        """
        relayout(variable, order)

    def decline(self, reason: Reason, detail: str = "") -> None:
        """Give up lowering this layer; it will run stock Keras."""
        raise Decline(reason, detail)

    def call(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a layer inside the program, with everything `Layer.__call__` does."""
        snapshot, training = self.record.snapshot(), self.training
        unsure = list(self.unsure)
        root, self.is_root = self.is_root, False
        try:
            return _lowered_call(self, layer, args, kwargs)
        except Decline as declined:
            if root or (declined.reason is Reason.CONTROL_FLOW and self.tracer.may_specialise):
                raise
            self.record.restore(snapshot)
            self.training, self.unsure = training, unsure
            return self._stock(layer, args, kwargs, declined)
        finally:
            self.is_root = root

    def resolve_training(self, given: bool, value: Any) -> Any:
        """The training flag of a layer, from its argument, the call context, or the default.

        Args:
            given: whether the call gives the flag itself.
            value: the given flag, else the default.
        """
        if not given:
            for node in self.unsure:
                node.relied_on = True
        self.unsure = []
        return self.training if not given and self.training is not None else value

    def call_operation(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply a Keras operation that is not a layer."""
        from keras_turbo import registry

        try:
            found = registry.find(operation)
        except Decline as declined:
            if declined.reason is not Reason.NO_RULE:
                raise
            found = None
        with RandomGuard(self):
            if found is not None:
                return found.function(self, operation, *args, **kwargs)
            return layer_view(self, operation).call(*args, **kwargs)

    def apply(self, function: Callable[..., Any] | None, x: Any) -> Any:
        """Apply an activation: None, a Keras function, a layer, or any callable."""
        from keras_turbo.rules.activations import activation

        return activation(self, function, x)

    def opaque(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a Python function as it is, at run time, without looking inside it."""
        metas = opaque_metas(function, args)
        self.record.stock_calls += 1
        name = getattr(function, "__name__", type(function).__name__)
        self.record.rows.append(Row(name, type(function).__name__, False, Reason.NO_RULE.name))
        training = self.training
        target = StockCall(function, training, self.autocast, training).declares(metas[0])
        self.unsure.append(target)
        return self.tracer.append("call_function", target, args, {}, metas)

    def _stock(self, layer: Any, args: Any, kwargs: Any, declined: Decline) -> Any:
        if not isinstance(layer, compat.Layer):
            raise declined
        metas = stock_metas(layer, args, kwargs, scope_inside(self, layer))
        self.record.stock_calls += 1
        detail = f": {declined.detail}" if declined.detail else ""
        self.record.rows.append(
            Row(layer_path(layer), type(layer).__name__, False, declined.reason.name + detail)
        )
        self.depend(layer, "hooks", "call", "_dtype_policy")
        given, training = given_training(layer, args, kwargs)
        before, self.training = self.training, self.resolve_training(given, training)
        target = StockCall(layer, before, self.autocast, self.training).declares(metas[0])
        self.unsure.append(target)
        return self.tracer.append("call_function", target, args, kwargs, metas)

    def lowered(self, layer: Any) -> None:
        """Add the row of a layer that was lowered."""
        self.record.rows.append(Row(layer_path(layer), type(layer).__name__, True))

    @contextlib.contextmanager
    def autocast_scope(self, active: bool, dtype: torch.dtype | None) -> Iterator[None]:
        """Run a rule inside another autocast scope."""
        outer, self.autocast = self.autocast, Autocast(active, dtype)
        try:
            yield
        finally:
            self.autocast = outer


def _lowered_call(context: LoweringContext, layer: Any, args: Any, kwargs: Any) -> Any:
    """`call_layer`, where an error of any kind means that the layer cannot be lowered so."""
    try:
        return call_layer(context, layer, args, kwargs)
    except Decline:
        raise
    except Exception as error:
        raise Decline(Reason.CONTROL_FLOW, f"{type(error).__name__}: {error}") from error


@dataclass
class Trace:
    """A finished trace: the graph's context, its outputs, and the dimensions it fixed."""

    context: LoweringContext
    outputs: Any
    inputs: list[Any]
    input_masks: list[Any]
    fixed: list[tuple[int, int, int]]
    relations: list[Relation]


Body = Callable[..., Any]


def trace(layer: Any, kind: CallKind, body: Body | None = None) -> Trace:
    """Lower one layer for one kind of call.

    Args:
        layer: the layer or model.
        kind: dtypes, ranks, sizes and masks of the inputs, and the training flag.
        body: what to lower instead of the plain call, as `body(ctx, layer, *args)`: a whole
            training step, say.

    Raises:
        Decline: when the layer itself cannot be lowered.
    """
    problem: Decline | None = None
    for sizes in FakeSizes.strategies(kind):
        try:
            return _trace(layer, kind, sizes, body)
        except Decline as declined:
            problem = problem or declined
            if declined.reason not in (Reason.CONTROL_FLOW, Reason.UNSUPPORTED):
                raise
    assert problem is not None
    raise problem


def _trace(layer: Any, kind: CallKind, sizes: FakeSizes, body: Body | None) -> Trace:
    tracer = Tracer(compat.default_device())
    tracer.may_specialise = not sizes.last
    tracer.sizes = sizes
    context = LoweringContext(tracer, kind, layer)
    inputs: list[Any] = []
    input_masks: list[Any] = []

    def leaf(item: Any) -> Any:
        if not isinstance(item, TensorKind):
            return item
        position = len(inputs)
        value = tracer.placeholder(item.name, sizes.metas(position, item))
        inputs.append(value)
        value._keras_mask = None
        if item.mask is not None:
            mask = tracer.placeholder(f"{item.name}_mask", sizes.mask_metas(position, item))
            value._keras_mask = mask
        input_masks.append(value._keras_mask)
        return value

    args, kwargs = map_leaves(leaf, (kind.args, kind.kwargs))
    if kind.has_training:
        kwargs = {**kwargs, "training": kind.training}
    given = _contents((args, kwargs))
    if body is None:
        outputs = context.call(layer, *args, **kwargs)
    else:
        outputs = body(context, layer, *args, **kwargs)
    if _contents((args, kwargs)) != given:
        raise Decline(Reason.SIDE_EFFECT, "writes into a list or dict of the caller's")
    return Trace(context, outputs, inputs, input_masks, sizes.fixed, sizes.relations)


def _contents(item: Any) -> Any:
    """What nested containers hold, for a comparison of before and after."""
    if isinstance(item, dict):
        return [(key, _contents(entry)) for key, entry in item.items()]
    if isinstance(item, (list, tuple)):
        return [_contents(entry) for entry in item]
    return id(item)
