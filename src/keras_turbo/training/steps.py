"""Train and test steps as programs: forward, loss and metrics in one straight line.

`train_step` and `test_step` take the place of the trainer's methods. A step is lowered
like a layer's call, with the loss and the metrics traced behind the forward pass; the
backward pass is autograd's, the update the optimizer's. What cannot be lowered runs stock
Keras, whose forward pass is then still the model's program.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from keras_turbo import barrier, compat, dispatch, fallback, guard
from keras_turbo.fallback import QUIET, Decline, Reason
from keras_turbo.guard import MISS
from keras_turbo.program import Program, build
from keras_turbo.specs import TensorKind, kind_of, map_leaves
from keras_turbo.training import body
from keras_turbo.training.joint import Joints

stock_train_step: Callable[..., Any] = compat.TorchTrainer.train_step
stock_test_step: Callable[..., Any] = compat.TorchTrainer.test_step
_models: weakref.WeakSet[Any] = weakref.WeakSet()
MAX_ENTRIES = 16
_NAMES = ("x", "y", "sample_weight")
RETRIES = frozenset({16, 64, 256, 1024, 4096})
"""At which of a declined step's calls lowering is tried again: its layers may have changed."""


class StepCache:
    """A model's lowered steps: entries for training and for testing.

    Attributes:
        entries: per mode, guards, whether the metrics run stock behind them, and programs.
        programs: all valid programs.
        keys: the modes and kinds that they were made for.
        declined: why a kind of step runs stock, and how often it has; by mode and kind,
            under None for all of them.
        parts: the compiled parts for which `declined` holds.
        joints: per mode, the joint programs of its steps.
    """

    def __init__(self) -> None:
        self.entries: dict[bool, tuple[tuple[Any, bool, Program], ...]] = {True: (), False: ()}
        self.programs: list[Program] = []
        self.keys: list[Any] = []
        self.declined: dict[Any, list[Any]] = {}
        self.parts: tuple[Any, ...] = ()
        self.parameters: list[torch.Tensor] = []
        self.trainable: list[Any] = []
        self.states: list[torch.Tensor] | None = None
        self.metrics: list[list[Any]] = []
        self.metrics_count = 0
        self.joints = {True: Joints(), False: Joints()}

    def discard(self, _: Program) -> None:
        """Forget everything: what one step assumed, the others assumed too."""
        declined, parts = self.declined, self.parts
        self.__init__()
        self.declined, self.parts = declined, parts

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def train_step(self: Any, data: Any) -> Any:
    """One training step on a batch: lowered where possible, else stock Keras."""
    found = _outputs(self, data, True)
    if found is MISS or type(found) is Decline:
        return _stock(self, data, True, found)
    outputs, apart = found
    cache = self.__dict__["_keras_turbo_steps"]
    optimizer, variables = self.optimizer, cache.trainable
    if len(outputs) > 2:
        for parameter, grad in zip(cache.parameters, outputs[2], strict=True):
            parameter.grad = grad
    else:
        for parameter in cache.parameters:
            parameter.grad = None
        optimizer.scale_loss(outputs[0]).backward()
    with torch.no_grad():
        optimizer.apply([v._value.grad for v in variables], variables)
    return _metrics(self, data, outputs[1]) if apart else outputs[1]


def test_step(self: Any, data: Any) -> Any:
    """One evaluation step on a batch: lowered where possible, else stock Keras."""
    found = _outputs(self, data, False)
    if found is MISS or type(found) is Decline:
        return _stock(self, data, False, found)
    outputs, apart = found
    return _metrics(self, data, outputs[1]) if apart else outputs[1]


def _metrics(model: Any, data: Any, y_pred: Any) -> Any:
    x, y, sample_weight = _arguments(data)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _arguments(data: Any) -> tuple[Any, ...]:
    """The inputs, targets and sample weights in what a source of data yields."""
    data = tuple(data) if isinstance(data, (tuple, list)) else (data,)
    return data + (None,) * (3 - len(data))


def _outputs(model: Any, data: Any, training: bool) -> Any:
    """The results of a lowered step.

    Returns:
        The loss with the logs, or with the predictions where the metrics run stock, and
        which of the two; else why stock Keras must run the step, `MISS` where that is no
        fallback.
    """
    if torch.compiler.is_compiling():
        return MISS
    args = _arguments(data)
    cache = model.__dict__.get("_keras_turbo_steps")
    if cache is None:
        cache = model.__dict__["_keras_turbo_steps"] = StepCache()
        _models.add(model)
    found = _lookup(model, cache, args, training)
    if found is not MISS:
        return found
    if guard.thread_state.stock or not model.built or not _ready(model) or len(args) != 3:
        return MISS
    converted = _from_numpy(args)
    if converted is not None:
        found = _lookup(model, cache, converted, training)
        if found is not MISS:
            return found
        args = converted
    try:
        problem = _lower(model, cache, args, training)
    except Exception as error:  # noqa: BLE001, whatever it is, stock Keras can run
        problem = fallback.bug(error, dispatch.options.strict)
    return problem if problem is not None else _lookup(model, cache, args, training)


def _lookup(model: Any, cache: StepCache, args: Any, training: bool) -> Any:
    try:
        joints = cache.joints[training].entries
        if joints and (not training or _may_skip_autograd(model)):
            with torch.no_grad():
                for entry, apart in joints:
                    outputs = entry(args, {})
                    if outputs is not MISS:
                        return (*outputs[0], outputs[1]), apart
        for row in cache.entries[training]:
            outputs = row[0](args, {})
            if outputs is not MISS:
                break
        else:
            return MISS
    except Decline as error:
        return Decline(error.reason, error.detail)
    except Exception as error:  # noqa: BLE001, stock Keras decides what the user sees
        for program in list(cache.programs):
            barrier.deopt(program)
        return fallback.bug(error, dispatch.options.strict)
    _, apart, program = row
    if training or model.jit_compile:
        _seen(model, cache, program, apart, args, training)
    return outputs, apart


def _may_skip_autograd(model: Any) -> bool:
    """Whether a recorded step does what a backward pass of the plain loss would do."""
    return model.optimizer.loss_scale_factor is None and torch.is_grad_enabled()


def _seen(
    model: Any, cache: StepCache, program: Program, apart: bool, args: Any, training: bool
) -> None:
    """Note that autograd ran a step, whose effects are committed: nothing may fail any more."""
    try:
        joints = cache.joints[training]
        joints.seen(model, program, args, {}, training=training, apart=apart)
    except Exception as error:
        if dispatch.options.strict:
            raise
        fallback.warn(
            f"keras_turbo: recording a step of model '{model.name}' failed "
            f"({type(error).__name__}: {error}); please report this."
        )


def _lower(model: Any, cache: StepCache, args: Any, training: bool) -> Decline | None:
    """Lower a step and put it into the cache, or say why not."""
    reason = guard.ambient_reason()
    if reason is not None:
        return Decline(*reason)
    if compat.ambient().get("current_call_ctx") is not None:
        return Decline(Reason.TRANSFORM, "inside a layer's call")
    parts = body.parts(model)
    if len(parts) != len(cache.parts) or any(
        a is not b for a, b in zip(parts, cache.parts, strict=True)
    ):
        cache.declined.clear()
        cache.parts = parts
    try:
        kind = kind_of(_NAMES, args, {}, _static_axes(model))
    except Decline as problem:
        return Decline(problem.reason, problem.detail)
    key = training, _coarse(kind.args)
    known = cache.declined.get(None) or cache.declined.get(key)
    if known is not None:
        known[1] += 1
        if known[1] not in RETRIES:
            return known[0]
    if len(cache.entries[training]) >= MAX_ENTRIES:
        return Decline(Reason.POLYMORPHIC)
    varies = any(k == key for k in cache.keys)
    try:
        with barrier.lowering():
            program, apart = _build_for(model, kind, args, training, varies)
            cache.keys.append(key)
            _keep(model, cache, program, apart, training)
    except Decline as problem:
        # A copy without the traceback, which would keep the batch alive.
        declined = Decline(problem.reason, problem.detail)
        if problem.reason is not Reason.ASSUMPTION:
            cache.declined.setdefault(key, [declined, 0])[0] = declined
        return declined
    return None


def _build_for(
    model: Any, kind: Any, args: Any, training: bool, varies: bool
) -> tuple[Program, bool]:
    """The program of a step; for any sizes, if it can be, once they turn out to vary."""
    if varies:
        with contextlib.suppress(Decline):
            return _build(model, kind_of(_NAMES, args, {}, _static_axes(model, True)), training)
    return _build(model, kind, training)


def _build(model: Any, kind: Any, training: bool) -> tuple[Program, bool]:
    """The program of a step, with the metrics in it where they can be traced."""
    body.check(model, training)
    apart = body.metrics_apart(model)
    try:
        program = build(model, kind, body.Step(training, apart))
    except Decline:
        if apart:
            raise
        apart = True
        program = build(model, kind, body.Step(training, apart))
    if program.stock_calls:
        layer = next(row.path for row in program.rows if not row.lowered)
        raise Decline(Reason.NO_RULE, f"{layer} runs stock Keras")
    return program, apart


def _keep(model: Any, cache: StepCache, program: Program, apart: bool, training: bool) -> None:
    program.home = "_keras_turbo_steps"
    barrier.protect(program)
    entry = guard.compile_entry(program)
    cache.programs.append(program)
    cache.trainable = model.trainable_weights[:]
    cache.parameters = list(model.parameters())
    cache.metrics = [layer._metrics for layer in model._flatten_layers()]
    cache.metrics_count = sum(map(len, cache.metrics))
    cache.entries[training] = ((entry, apart, program), *cache.entries[training])


def _stock(model: Any, data: Any, training: bool, why: Any) -> Any:
    """Run a step by stock Keras and count why; in strict mode that is an error.

    A model that overrides parts of its step runs as written, and is counted but no error.
    """
    step = stock_train_step if training else stock_test_step
    if why is MISS:
        return step(model, data)
    declined = model.__dict__["_keras_turbo_steps"].declined
    news = why.reason is Reason.ERROR and None not in declined
    if news or (dispatch.options.strict and why.reason not in QUIET | {Reason.OVERRIDE}):
        # An error of stock Keras comes first: it is what the user has to see.
        with dispatch.guard_stock():
            logs = step(model, data)
        if dispatch.options.strict:
            raise fallback.strict_error(model, why.reason, why.detail) from why.__cause__
        declined[None] = [why, max(RETRIES)]
        fallback.record(model, why.reason, why.detail)
        fallback.warn(
            f"keras_turbo: the lowered step of model '{model.name}' failed where stock Keras "
            f"did not ({why.detail}). Its steps run stock from now on; please report this."
        )
        return logs
    fallback.record(model, why.reason, why.detail)
    return step(model, data)


def _from_numpy(args: Any) -> Any:
    """The arguments with arrays as tensors; None if there are no arrays."""
    found = False

    def convert(item: Any) -> Any:
        nonlocal found
        if type(item) is not np.ndarray or item.dtype.hasobject or item.dtype.kind in "US":
            return item
        found = True
        return compat.backend.convert_to_tensor(item)

    try:
        converted = map_leaves(convert, args)
    except Exception:  # noqa: BLE001, stock Keras decides what the user sees
        return None
    return converted if found else None


def _coarse(item: Any) -> Any:
    """A hashable kind of arguments in which sizes do not count."""
    if isinstance(item, TensorKind):
        return item.dtype, len(item.sizes), item.mask is not None
    if isinstance(item, (tuple, list)):
        return type(item).__name__, *(_coarse(entry) for entry in item)
    if isinstance(item, dict):
        return tuple((key, _coarse(entry)) for key, entry in item.items())
    return item


def _ready(model: Any) -> bool:
    """Whether loss and metrics have been built, which stock Keras does at the first step."""
    for part in (model._compile_loss, model._compile_metrics):
        if part is not None and not part.built:
            return False
    return model.optimizer is None or model.optimizer.built


def _static_axes(model: Any, few: bool = False) -> Callable[[int, Any], frozenset[int]]:
    """Which axes of the batch the guard checks: all but the first, or as few as possible."""
    home = compat.default_device()

    def axes(position: int, tensor: torch.Tensor) -> frozenset[int]:
        if tensor.device != home:
            raise Decline(Reason.DEVICE, f"a batch on {tensor.device}")
        known = dispatch.axes_to_guard(model, position, tensor.ndim, tensor.dtype)
        return known if few else known | frozenset(range(1, tensor.ndim))

    return axes


def forget() -> None:
    """Drop all lowered steps."""
    for model in list(_models):
        model.__dict__.pop("_keras_turbo_steps", None)
