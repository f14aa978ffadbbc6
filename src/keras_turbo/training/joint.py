"""Joint programs: forward, loss, metrics and backward of a step as one straight line.

The program of a training step leaves the backward pass to autograd. Once batches of the
same sizes come again and again, the step is recorded below autograd, compared with itself
and then run without autograd: the same kernels on the same numbers, with nothing between
them. Whatever autograd alone can do (hooks, gradients of inputs) goes back to it.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from keras_turbo import check, compat, dispatch, emit, fallback, guard
from keras_turbo.fallback import Decline, Reason
from keras_turbo.guard import MISS
from keras_turbo.program import Program
from keras_turbo.specs import CallKind, TensorKind, map_leaves
from keras_turbo.training.below_autograd import simplify
from keras_turbo.training.body import metrics_apart
from keras_turbo.training.compiled import announced, compile_recorded, draws
from keras_turbo.training.recording import record

MAX_JOINTS = 4
MAX_SIZES = 32
RECORD_AFTER = 3
"""How often batches of the same sizes come before their step is recorded."""


class Joints:
    """The recorded steps of one model in one mode.

    Attributes:
        entries: guarded joint programs, each with whether the metrics run stock behind it.
        counts: how often a step of some program and sizes has run; -1 where it stays so.
        declined: why it stays so.
    """

    def __init__(self) -> None:
        self.entries: tuple[tuple[Callable[..., Any], bool], ...] = ()
        self.counts: dict[Any, int] = {}
        self.declined: dict[Any, Decline] = {}

    def seen(
        self,
        model: Any,
        program: Program,
        args: Any,
        kwargs: Any,
        *,
        training: bool,
        apart: bool = False,
    ) -> None:
        """Note that a step ran, and make its joint program when it is time."""
        compiled = bool(model.jit_compile)
        key = id(program), *(getattr(leaf, "shape", None) for leaf in _leaves(args))
        count = self.counts.get(key, 0)
        if count < 0 or (not count and len(self.counts) >= MAX_SIZES):
            return
        self.counts[key] = count + 1
        enough = 0 if compiled and not self.entries else RECORD_AFTER
        if count < enough or len(self.entries) >= MAX_JOINTS:
            return
        self.counts[key] = -1
        # Metrics of the user's own see whether the predictions have a gradient.
        own = apart and metrics_apart(model)
        if training and (own or not scales_plainly(model.optimizer)):
            return
        try:
            parameters = list(model.parameters()) if training else None
            entry = make(program, args, kwargs, parameters, compiled and not self.entries)
        except Decline as problem:
            # A copy without the traceback, which would keep the batch alive.
            self.declined[key] = Decline(problem.reason, problem.detail)
            if compiled and not self.entries:
                fallback.record(model, problem.reason, f"jit_compile: {problem.detail}")
        else:
            self.entries = ((entry, apart), *self.entries)


def scales_plainly(optimizer: Any) -> bool:
    """Whether an optimizer takes the loss as it is."""
    plain = type(optimizer).scale_loss is compat.BaseOptimizer.scale_loss
    return plain and optimizer.loss_scale_factor is None


class JointProgram:
    """A recorded step, for batches of exactly the sizes that it was recorded with.

    Attributes:
        graph: the graph after its passes.
        code: the Python source of `run`.
        run: takes the batch; returns the step's outputs and behind them the gradients, or
            `MISS` where autograd is needed.
    """

    stock_calls = 0
    clear_losses = False

    def __init__(
        self,
        program: Program,
        kind: CallKind,
        graph: fx.Graph,
        constants: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        self.owner: weakref.ref[Any] = program.owner
        self.kind = kind
        self.fixed: list[Any] = []
        self.relations: list[Any] = []
        self.final_training = program.final_training
        self.graph = graph
        self.code, inner = emit.without_gradients(graph, constants)
        watched = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        self.run = self.run_without_gradients = _with_checks(compiled or inner, watched, frozen)


def _with_checks(
    inner: Callable[..., Any], watched: Sequence[torch.Tensor], frozen: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """A recorded step behind what must hold for its tensors beside sizes and dtypes.

    Args:
        inner: the recorded step.
        watched: the parameters that it has gradients for.
        frozen: the other parameters of the model, if there is a backward pass.
    """
    places = [(parameter, parameter.data_ptr()) for parameter in watched]
    is_watched = compat.autograd_is_watched

    def run(*inputs: torch.Tensor) -> Any:
        for item in inputs:
            if item.requires_grad or not item.is_contiguous():
                return MISS
        for parameter, place in places:
            if (
                parameter._backward_hooks
                or parameter.data_ptr() != place
                or not parameter.requires_grad
                or parameter._post_accumulate_grad_hooks
            ):
                return MISS
        for parameter in frozen:
            if parameter.requires_grad:
                return MISS
        return MISS if is_watched() else inner(*inputs)

    return run


def make(
    program: Program,
    args: Any,
    kwargs: Any,
    parameters: Sequence[torch.Tensor] | None,
    compiled: bool = False,
) -> Callable[..., Any]:
    """The entry of a joint program for batches of the sizes of `args`.

    Args:
        program: the valid program of the step.
        args: the arguments of a step that it serves.
        kwargs: its keyword arguments.
        parameters: all parameters of the model; None for a step without a backward pass.
        compiled: whether Inductor compiles what was recorded.

    Raises:
        Decline: where the step cannot be recorded, or gives other numbers than autograd.
            Nothing has changed then but the parameters' `.grad`.
    """
    _check(program)
    kind, inputs = _exactly(program.kind, args)
    states = list(_written(program))
    before = [state.detach().clone() for state in states]
    numbers = _RandomState()

    def restore() -> None:
        with torch.no_grad():
            for state, value in zip(states, before, strict=True):
                state.copy_(value)
        numbers.restore()

    def differs(entry: Callable[..., Any], scale: float = 1.0, least: float = 0.0) -> str | None:
        with compat.outside_modes(), torch.no_grad():
            outputs, grads = entry(args, kwargs)
        got = _results(outputs, grads, states)
        return check.difference(got, wanted, scale=scale, least=least)

    try:
        graph, constants, expected = record(program, inputs, parameters)
        known = list(parameters or ())
        wanted = _results(expected, [p.grad for p in known], states)
        restore()
        recorded = fx.Graph()
        recorded.output(recorded.graph_copy(graph, {}))
        tolerances = _compiled_tolerances(graph)
        simplify(graph, constants)
        entry = guard.compile_entry(JointProgram(program, kind, graph, constants, known))
        problem = differs(entry)
        restore()
        faster = (
            _compile(recorded, constants, inputs, program) if compiled and not problem else None
        )
        if faster is not None:
            other = JointProgram(program, kind, graph, constants, known, faster)
            compiled_entry = guard.compile_entry(other)
            # The compiler draws torch's own random numbers as it likes.
            wrong = None if draws(recorded) else differs(compiled_entry, *tolerances)
            if wrong is None:
                entry = compiled_entry
            else:
                _warn(f"a compiled step differed from the eager one ({wrong}); it runs eagerly.")
    except Decline:
        raise
    except Exception as error:
        raise Decline(Reason.UNSUPPORTED, f"{type(error).__name__}: {error}") from error
    finally:
        restore()
    if problem is not None:
        _warn(f"a recorded training step differed from autograd ({problem}); it is not used.")
        raise Decline(Reason.MISMATCH, problem)
    return entry


def _check(program: Program) -> None:
    """Decline a step that is more than its program, or surroundings that change it."""
    if compat.autograd_is_watched():
        raise Decline(Reason.TRANSFORM, "hooks on saved tensors, anomaly mode or autocast")
    if program.stock_calls:
        layer = next(row.path for row in program.rows if not row.lowered)
        raise Decline(Reason.NO_RULE, f"{layer} runs stock Keras")
    if program.adds_losses:
        raise Decline(Reason.UNSUPPORTED, "a step with losses recorded on its layers")


def _warn(text: str) -> None:
    warnings.warn(f"keras_turbo: {text} Please report this.", RuntimeWarning, stacklevel=3)


def _compiled_tolerances(graph: fx.Graph) -> tuple[float, float]:
    """How far a compiled step may be from the eager one: the scale, and the least tolerance.

    A compiler contracts and reorders. Where results in half precision follow each other, it
    does not round those in between, and that shows in everything computed from them.
    """
    metas = [meta for node in graph.nodes for meta in node.meta.get("metas", ())]
    half = [check.TOLERANCE[d] for d in (torch.float16, torch.bfloat16) if _holds(metas, d)]
    return (5.0, 5.0 * max(half)) if half else (100.0, 0.0)


def _holds(metas: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    return any(meta.dtype == dtype for meta in metas)


def _compile(
    graph: fx.Graph, constants: dict[str, Any], inputs: Sequence[torch.Tensor], program: Program
) -> Callable[..., Any] | None:
    """The recorded step compiled; None, with one warning, where the compiler fails."""
    model = program.owner()
    name = "a model" if model is None else f"model '{model.name}'"
    try:
        with announced(f"a step of {name}"):
            return compile_recorded(graph, constants, inputs, dict(dispatch.options.compile))
    except Exception as error:  # noqa: BLE001, training is never lost to the compiler
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"keras_turbo: a step of {name} could not be compiled "
            f"({type(error).__name__}: {reason}). It runs eagerly.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _results(outputs: Any, grads: Any, states: Sequence[torch.Tensor]) -> list[Any]:
    """Everything that a step gives, as it is now."""
    found: list[Any] = []
    map_aggregate((outputs, tuple(grads), tuple(states)), found.append)
    return [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in found]


def _exactly(kind: CallKind, args: Any) -> tuple[CallKind, list[torch.Tensor]]:
    """The kind of call with these very sizes, and the tensors in the program's order."""
    inputs: list[torch.Tensor] = []
    given = iter([leaf for leaf in _leaves(args) if isinstance(leaf, torch.Tensor)])

    def leaf(item: Any) -> Any:
        if not isinstance(item, TensorKind):
            return item
        if item.mask is not None:
            raise Decline(Reason.MASK, "a batch with a mask")
        tensor = next(given)
        inputs.append(tensor)
        sizes = tuple(tensor.shape)
        return dataclasses.replace(item, sizes=sizes, static=frozenset(range(len(sizes))))

    return dataclasses.replace(kind, args=map_leaves(leaf, kind.args)), inputs


def _leaves(args: Any) -> list[Any]:
    found: list[Any] = []
    map_leaves(found.append, args)
    return found


def _written(program: Program) -> Iterator[torch.Tensor]:
    """The live tensors that the effects of a program write to."""
    for node in program.graph.nodes:
        if node.meta.get("effect"):
            for source in node.all_input_nodes:
                if source.op == "get_attr":
                    yield program.constants[str(source.target)]


class _RandomState:
    """torch's own random state on all devices, to be put back."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
