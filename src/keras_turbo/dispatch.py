"""The hot path: from the patched `Layer.__call__` to a program, or to stock Keras.

`call` looks through the layer's inline cache. Each entry is a compiled guard with its
program behind it. Whatever is not served there goes through `miss`, which lowers, counts
and falls back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from keras_turbo import barrier, check, compat, fallback, guard
from keras_turbo.axes import axes_to_guard
from keras_turbo.config import Options
from keras_turbo.fallback import QUIET, Decline, Reason
from keras_turbo.guard import MISS
from keras_turbo.lowering import Row
from keras_turbo.program import Program, build
from keras_turbo.specs import kind_of, map_leaves
from keras_turbo.stock_scope import StockScope

MAX_ENTRIES = 16
MAX_RETRIES = 16
PATIENCE = 5.0
"""Seconds that a call waits for another thread's lowering before it runs stock Keras."""

is_compiling = torch.compiler.is_compiling
guard_stock = StockScope
stock_call: Callable[..., Any] = compat.Layer.__call__
options = Options()
caches: weakref.WeakSet[InlineCache] = weakref.WeakSet()
journal: dict[Row, None] | None = None
"""The rows of all programs so far, for a report that outlives the models; None if unwanted."""


class InlineCache:
    """A layer's short list of guarded programs, and why it has none where it has none.

    Copying or pickling a layer never copies its programs.
    """

    def __init__(self, layer: Any) -> None:
        self.entries: tuple[Callable[..., Any], ...] = ()
        self.programs: tuple[Program, ...] = ()
        self.declined: Decline | None = None
        self.permanent = False
        self.retries = 0
        self.compiled: dict[str, Any] = {}
        self.owner = weakref.ref(layer)
        caches.add(self)

    def add(self, program: Program, entry: Callable[..., Any]) -> None:
        with barrier.lock:
            # What it assumes may have changed since it was protected.
            if program.valid:
                self.programs = (program, *self.programs)
                self.entries = (entry, *self.entries)

    def replace(self, old: Callable[..., Any], new: Callable[..., Any]) -> None:
        """Put a checked entry in the place of the one that checked it."""
        with barrier.lock:
            self.entries = tuple(new if entry is old else entry for entry in self.entries)

    def discard(self, program: Program) -> None:
        with barrier.lock:
            keep = [i for i, p in enumerate(self.programs) if p is not program]
            self.entries = tuple(self.entries[i] for i in keep)
            self.programs = tuple(self.programs[i] for i in keep)
            self.compiled.clear()

    def deopt(self, entry: Callable[..., Any]) -> None:
        """Deopt the program behind an entry, if that is still in the cache."""
        with barrier.lock:
            for program, known in zip(self.programs, self.entries, strict=True):
                if known is entry:
                    barrier.deopt(program)

    def decline(self, layer: Any, problem: Decline) -> None:
        """Keep the layer on stock Keras until something about it changes."""
        self.declined = problem
        if problem.reason is not Reason.NO_RULE and self.retries < MAX_RETRIES:
            barrier.watch_decline(layer)

    def reconsider(self) -> None:
        """Something about the layer changed: lowering may be tried again."""
        if not self.permanent:
            self.retries += 1
            self.declined = None

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a Keras layer: its program where the guard passes, else stock Keras."""
    if is_compiling():
        from keras_turbo.compiling import while_compiling

        # Both are called here: a frame less that a graph break inside would break as well.
        found = while_compiling(self, args, kwargs)
        return stock_call(self, *args, **kwargs) if found is None else found[0](*found[1])
    cache = self._keras_turbo
    if cache is None:
        return miss(self, args, kwargs)
    for entry in cache.entries:
        try:
            outputs = entry(args, kwargs)
        except Exception as error:
            problem = error
            break
        if outputs is not MISS:
            return outputs
    else:
        return miss(self, args, kwargs)
    # Outside the handler, so that an error of stock Keras does not name ours as its context.
    try:
        return _recover(self, cache, entry, problem, args, kwargs)
    finally:
        del problem


def miss(layer: Any, args: Any, kwargs: Any) -> Any:
    """Serve a call that no entry served: lower it, or run stock Keras and say why."""
    if guard.thread_state.stock or getattr(layer, "_lock", True) or _symbolic(args, kwargs):
        return stock_call(layer, *args, **kwargs)
    reason = guard.ambient_reason()
    if reason is not None:
        return fall_back(layer, args, kwargs, *reason)
    if not layer.built:
        return stock_call(layer, *args, **kwargs)
    cache = _cache_of(layer)
    declined = cache.declined
    if declined is not None:
        if not _reconsider(layer, declined):
            return fall_back(layer, args, kwargs, declined.reason, declined.detail)
        cache.declined = None
        barrier.changed(layer, "hooks")
    return _serve(layer, cache, args, kwargs)


def _serve(layer: Any, cache: InlineCache, args: Any, kwargs: Any) -> Any:
    """Lower a call and run its program, or run stock Keras and say why."""
    # Stock Keras gets the caller's own arrays and containers, which it may write to.
    given = args, kwargs
    converted = from_numpy(layer, args, kwargs)
    if converted is not None:
        for entry in cache.entries:
            outputs = _run(layer, cache, entry, converted, given)
            if outputs is not MISS:
                warn_of_array(layer, args, kwargs)
                return outputs
    known = cache.entries
    with barrier.lowering(PATIENCE) as mine:
        entry = None
        if mine and cache.entries is known:
            entry = _lower(layer, cache, *(converted or given))
    if entry is None:
        if mine:
            # Another thread has lowered a call of this layer since we looked.
            return call(layer, *args, **kwargs)
        with guard_stock():
            return stock_call(layer, *args, **kwargs)
    if isinstance(entry, Decline):
        if entry.reason is Reason.ERROR:
            return _own_up(layer, cache, entry, args, kwargs)
        outputs = fall_back(layer, args, kwargs, entry.reason, entry.detail)
        # Only now: a call that stock Keras refuses too says nothing about the next one.
        if entry.reason not in _PER_CALL:
            cache.decline(layer, entry)
        return outputs
    outputs = _run(layer, cache, entry, converted or given, given)
    if outputs is MISS:
        return fall_back(layer, args, kwargs, Reason.UNSUPPORTED, "guard")
    if converted is not None and cache.programs:
        warn_of_array(layer, args, kwargs)
    return outputs


def warn_of_array(layer: Any, args: Any, kwargs: Any) -> None:
    """Warn of an array as stock Keras does, which its conversion by us would have hidden."""
    inputs = args[0] if args else kwargs.get("inputs")
    if type(inputs) is np.ndarray:
        compat.warn_of_array(layer, inputs)


def _run(
    layer: Any, cache: InlineCache, entry: Callable[..., Any], arguments: Any, given: Any
) -> Any:
    """An entry's outputs or `MISS`; stock Keras's for the given arguments where it raises."""
    try:
        return entry(*arguments)
    except Exception as error:
        problem = error
    try:
        return _recover(layer, cache, entry, problem, *given)
    finally:
        del problem


_PER_CALL = frozenset(
    {
        Reason.INPUT,
        Reason.STRUCTURE,
        Reason.SHAPE,
        Reason.MASK,
        Reason.DEVICE,
        Reason.POLYMORPHIC,
        Reason.ASSUMPTION,
    }
)
"""Reasons that lie in one call's arguments and say nothing about the next call."""


def _lower(layer: Any, cache: InlineCache, args: Any, kwargs: Any) -> Callable[..., Any] | Decline:
    """A new entry for a call, or why there is none."""
    try:
        try:
            return _new_entry(layer, cache, args, kwargs)
        except Decline as declined:
            if declined.reason is not Reason.ASSUMPTION:
                raise
            return _new_entry(layer, cache, args, kwargs)
    except Decline as declined:
        # A copy without the traceback, which would keep the arguments alive.
        return Decline(declined.reason, declined.detail)
    except Exception as error:
        return fallback.bug(error, options.strict)


def _new_entry(layer: Any, cache: InlineCache, args: Any, kwargs: Any) -> Callable[..., Any]:
    kind = kind_of_call(layer, args, kwargs)
    if len(cache.programs) >= MAX_ENTRIES:
        raise Decline(Reason.POLYMORPHIC)
    program = build(layer, kind)
    barrier.protect(program)
    entry = guard.compile_entry(program)
    if options.check != "off" and check.comparable(program):
        entry = check.checking(program, entry, options.check == "always")
    cache.add(program, entry)
    if journal is not None:
        journal.update(dict.fromkeys(program.rows))
    layer.__dict__["_called"] = True
    return entry


def kind_of_call(layer: Any, args: Any, kwargs: Any) -> Any:
    """The kind of a real call of a layer, in the current surroundings."""
    ambient = compat.ambient()
    context = ambient.get("current_call_ctx")
    scope = ambient.get("autocast_scope")
    home = compat.default_device()

    def static_axes(position: int, tensor: Any) -> frozenset[int]:
        if tensor.device != home:
            raise Decline(Reason.DEVICE, f"an input is on {tensor.device}")
        return axes_to_guard(layer, position, tensor.ndim, tensor.dtype)

    return kind_of(
        tuple(layer._call_signature.parameters),
        args,
        kwargs,
        static_axes,
        context_training=None if context is None else context.get_value("training"),
        autocast=None if scope is None else str(scope.dtype),
        autocast_dtype=None
        if scope is None or scope.dtype is None
        else compat.to_torch_dtype(scope.dtype),
    )


def program_of_kind(layer: Any, kind: Any) -> Program:
    """A valid program of a layer for a kind of call, lowered if there is none yet.

    Raises:
        Decline: when the layer cannot be lowered.
    """
    cache = _cache_of(layer)
    for program in cache.programs:
        if program.kind == kind:
            return program
    program = build(layer, kind)
    if program.fixed:
        raise Decline(Reason.SHAPE, "a size that is not known")
    barrier.protect(program)
    cache.add(program, guard.compile_entry(program))
    return program


def _cache_of(layer: Any) -> InlineCache:
    cache = layer.__dict__.get("_keras_turbo")
    if cache is None:
        cache = layer.__dict__["_keras_turbo"] = InlineCache(layer)
    return cache


def fall_back(layer: Any, args: Any, kwargs: Any, reason: Reason, detail: str = "") -> Any:
    """Run stock Keras and count why; in strict mode a call that succeeds is an error."""
    if not options.strict or reason in QUIET:
        fallback.record(layer, reason, detail)
        return stock_call(layer, *args, **kwargs)
    # An error of stock Keras comes first: it is what the user has to see.
    with guard_stock():
        stock_call(layer, *args, **kwargs)
    raise fallback.strict_error(layer, reason, detail)


def _reconsider(layer: Any, declined: Decline) -> bool:
    """Whether the state that made a layer decline is gone."""
    if declined.reason is Reason.HOOKS:
        return not compat.has_hooks(layer)
    return False


def _symbolic(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, compat.KerasTensor) for leaf in compat.tree.flatten((args, kwargs)))


def from_numpy(layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments with arrays converted as stock Keras converts them, if there are any."""
    found = False
    functional = isinstance(layer, compat.Function) or getattr(layer, "_functional", None)

    def convert(item: Any) -> Any:
        nonlocal found
        if type(item) is not np.ndarray:
            return item
        found = True
        if functional or not layer._convert_input_args:
            return compat.backend.convert_to_tensor(item)
        return layer.dtype_policy.convert_input(item, layer.autocast, layer.input_dtype)

    try:
        converted = map_leaves(convert, (args, kwargs))
    except Exception:
        return None
    return converted if found else None


def _recover(
    layer: Any, cache: InlineCache, entry: Any, error: Exception, args: Any, kwargs: Any
) -> Any:
    """A program raised: let stock Keras raise its own error, or own up to the bug."""
    if isinstance(error, (fallback.FallbackError, compat.StopRecomputation)):
        raise error
    if isinstance(error, Decline):
        # A stock node did something that could not be foreseen.
        problem = Decline(error.reason, error.detail)
    else:
        problem = fallback.bug(error, options.strict)
    return _own_up(layer, cache, problem, args, kwargs, entry)


def _own_up(
    layer: Any, cache: InlineCache, problem: Decline, args: Any, kwargs: Any, entry: Any = None
) -> Any:
    """Run stock Keras for good after a program failed, unless that fails as well."""
    with guard_stock():
        outputs = stock_call(layer, *args, **kwargs)
    cache.deopt(entry)
    cache.declined = problem
    cause, problem.__cause__ = problem.__cause__, None
    if options.strict:
        raise fallback.strict_error(layer, problem.reason, problem.detail) from cause
    fallback.record(layer, problem.reason, problem.detail)
    if problem.reason is not Reason.ERROR:
        return outputs
    fallback.warn(
        f"keras_turbo: {'lowering' if entry is None else 'the program of'} layer "
        f"'{fallback.layer_path(layer)}' failed where stock Keras did not ({problem.detail}). "
        "It runs stock from now on; please report this."
    )
    return outputs
