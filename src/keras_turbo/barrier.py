"""The write barrier: which programs depend on what, and their removal when it changes.

Writes to layer attributes and variables are watched by the patched `__setattr__` methods.
A write that changes a value some program assumed takes exactly those programs out of the
inline caches; they are lowered again at the next call. What other threads write while a
program is being lowered, before it can be watched, is noted by its `lowering`.
"""

from __future__ import annotations

import math
import threading
import weakref
from types import FunctionType
from typing import Any

from keras_turbo.fallback import Decline, Reason

# Properties of Keras objects, and the attributes that they are computed from.
_SOURCES = {
    "compute_dtype": ("_dtype_policy",),
    "variable_dtype": ("_dtype_policy",),
    "dtype": ("_dtype_policy",),
    "dtype_policy": ("_dtype_policy",),
    "input_dtype": ("_dtype_policy",),
    "quantization_mode": ("_dtype_policy",),
    "trainable": ("_trainable",),
    "supports_masking": ("_supports_masking",),
    "input_spec": ("_input_spec", "_manual_input_spec"),
    "kernel": ("_kernel", "lora_enabled", "_dtype_policy", "lora_alpha", "lora_rank"),
    "embeddings": ("_embeddings", "lora_enabled", "_dtype_policy", "lora_alpha", "lora_rank"),
    "layers": ("_layers",),
}
_OF_A_VARIABLE = ("_value", "_autocast", "_dtype")

lock = threading.RLock()
"""Held while the tables here or an inline cache are changed, never while other code runs."""
_lowering_lock = threading.RLock()
_lowering: lowering | None = None
"""The lowering in progress, of whatever thread."""
_dependents: dict[int, tuple[weakref.ref[Any], dict[str, weakref.WeakSet[Any]]]] = {}
_programs: weakref.WeakSet[Any] = weakref.WeakSet()
_declined: weakref.WeakSet[Any] = weakref.WeakSet()


class lowering:  # noqa: N801, used like a function
    """A block in which this thread lowers, and what other threads write meanwhile.

    Entering it gives whether this thread may lower. Threads wait for each other, because
    lowering may lay out a parameter anew that stock Keras would read meanwhile. But lowering can
    run code of the user's, which may wait for a lock that the waiting thread holds; so a call
    does not wait for ever, and runs stock Keras then.

    Args:
        timeout: how many seconds to wait for another thread that is lowering; -1 for no limit.
    """

    def __init__(self, timeout: float = -1) -> None:
        self.timeout = timeout
        self.thread = threading.get_ident()
        self.written: list[tuple[Any, str]] = []
        self.all_stale = False

    def __enter__(self) -> bool:
        global _lowering
        self.held = _lowering_lock.acquire(timeout=self.timeout)
        if self.held:
            self.outer, _lowering = _lowering, self
        return self.held

    def __exit__(self, *exc: object) -> None:
        global _lowering  # noqa: PLW0603, there is one at a time
        if self.held:
            _lowering = self.outer
            _lowering_lock.release()

    def outdated(self, program: Any) -> bool:
        """Whether another thread has written something that a program assumes."""
        reads: dict[int, set[str]] = {}
        for owner, names in program.reads:
            known = reads.setdefault(id(owner), set())
            for name in names:
                known.update((name, *_SOURCES.get(name, ())))
        for variable in program.variables:
            reads.setdefault(id(variable), set()).update(_OF_A_VARIABLE)
        return self.all_stale or any(
            id(owner) in reads and (name in reads[id(owner)] or _is_method(owner, name))
            for owner, name in self.written
        )


def _is_method(owner: Any, name: str) -> bool:
    return isinstance(getattr(type(owner), name, None), FunctionType)


def _watch(owner: Any, names: Any, program: Any) -> None:
    key = id(owner)
    known = _dependents.get(key)
    if known is None or known[0]() is not owner:
        known = (weakref.ref(owner, lambda _, key=key: _dependents.pop(key, None)), {})
        _dependents[key] = known
    for name in names:
        for source in (name, *_SOURCES.get(name, ())):
            known[1].setdefault(source, weakref.WeakSet()).add(program)


def protect(program: Any) -> None:
    """Make a program's assumptions effective.

    Raises:
        Decline: when one of them broke while the program was being lowered.
    """
    with lock:
        if _lowering is not None and _lowering.outdated(program):
            # Another try begins now, and sees what has been written until now.
            _lowering.written, _lowering.all_stale = [], False
            raise Decline(Reason.ASSUMPTION, "while it was lowered, in another thread")
        _programs.add(program)
        for owner, names in program.reads:
            _watch(owner, names, program)
        for variable in program.variables:
            _watch(variable, _OF_A_VARIABLE, program)


def watch_decline(layer: Any) -> None:
    """Let the next changed attribute of a layer that declined give it another try."""
    with lock:
        cache = layer.__dict__.get("_keras_turbo")
        if cache is not None:
            _watch(layer, (), None)
            _declined.add(cache)


def watched(owner: Any, name: str) -> bool:
    """Whether a write of this attribute may break an assumption."""
    if _lowering is not None:
        return True
    known = _dependents.get(id(owner))
    if known is None or known[0]() is not owner:
        return False
    if owner.__dict__.get("_keras_turbo") in _declined:
        return True
    return name in known[1] or _is_method(owner, name)


def changed(owner: Any, name: str) -> None:
    """Deopt the programs that assumed this attribute; all of the owner's for a method."""
    with lock:
        if _lowering is not None and _lowering.thread != threading.get_ident():
            _lowering.written.append((owner, name))
        known = _dependents.get(id(owner))
        if known is None or known[0]() is not owner:
            return
        cache = owner.__dict__.get("_keras_turbo")
        if cache in _declined:
            _declined.discard(cache)
            cache.reconsider()
        if name in known[1]:
            programs = list(known[1][name])
        elif _is_method(owner, name):
            programs = [p for programs in known[1].values() for p in programs]
        else:
            return
        for program in programs:
            deopt(program)


def deopt(program: Any) -> None:
    """Discard a program: its owner lowers again at the next call."""
    with lock:
        if not program.valid:
            return
        program.valid = False
        owner = program.owner()
        cache = None if owner is None else owner.__dict__.get(program.home)
        if cache is not None:
            cache.discard(program)


def deopt_all() -> None:
    """Discard every program, for a change that cannot be traced to single ones."""
    with lock:
        if _lowering is not None and _lowering.thread != threading.get_ident():
            _lowering.all_stale = True
        for program in list(_programs):
            deopt(program)


def losses_recorded(layer: Any) -> None:
    """Tell the programs that depend on a layer that it holds recorded losses."""
    with lock:
        known = _dependents.get(id(layer))
        if known is not None and known[0]() is layer:
            for programs in known[1].values():
                for program in programs:
                    program.clear_losses = True


def same(old: Any, new: Any) -> bool:
    """Whether replacing an attribute's value by another changes nothing."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(old, float):
        return old == new and math.copysign(1, old) == math.copysign(1, new)
    if isinstance(old, tuple):
        # Item by item: arrays in it have no plain equality.
        return len(old) == len(new) and all(map(same, old, new))
    return isinstance(old, (bool, int, str)) and old == new
