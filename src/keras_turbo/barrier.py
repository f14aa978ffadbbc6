"""The write barrier: which programs depend on what, and their removal when it changes.

Writes to layer attributes and variables are watched by the patched `__setattr__` methods.
A write that changes a value some program assumed takes exactly those programs out of the
inline caches; they are lowered again at the next call.
"""

from __future__ import annotations

import threading
import weakref
from types import FunctionType
from typing import Any

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

lock = threading.RLock()
_dependents: dict[int, tuple[weakref.ref[Any], dict[str, weakref.WeakSet[Any]]]] = {}
_programs: weakref.WeakSet[Any] = weakref.WeakSet()
_declined: weakref.WeakSet[Any] = weakref.WeakSet()


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
    """Make a program's assumptions effective."""
    with lock:
        _programs.add(program)
        for owner, names in program.reads:
            _watch(owner, names, program)
        for variable in program.variables:
            _watch(variable, ("_value", "_autocast", "_dtype"), program)


def watch_decline(layer: Any) -> None:
    """Let the next changed attribute of a layer that declined give it another try."""
    with lock:
        _watch(layer, (), None)
        _declined.add(layer.__dict__["_keras_turbo"])


def watched(owner: Any, name: str) -> bool:
    """Whether a write of this attribute may break an assumption."""
    known = _dependents.get(id(owner))
    if known is None or known[0]() is not owner:
        return False
    if owner.__dict__.get("_keras_turbo") in _declined:
        return True
    return name in known[1] or isinstance(getattr(type(owner), name, None), FunctionType)


def changed(owner: Any, name: str) -> None:
    """Deopt the programs that assumed this attribute; all of the owner's for a method."""
    with lock:
        known = _dependents.get(id(owner))
        if known is None or known[0]() is not owner:
            return
        cache = owner.__dict__.get("_keras_turbo")
        if cache in _declined:
            _declined.discard(cache)
            cache.reconsider()
        if name in known[1]:
            programs = list(known[1][name])
        elif isinstance(getattr(type(owner), name, None), FunctionType):
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
        for program in list(_programs):
            deopt(program)


def losses_recorded(layer: Any) -> None:
    """Tell the programs that depend on a layer that it holds recorded losses."""
    known = _dependents.get(id(layer))
    if known is not None and known[0]() is layer:
        for programs in list(known[1].values()):
            for program in list(programs):
                program.clear_losses = True


def same(old: Any, new: Any) -> bool:
    """Whether replacing an attribute's value by another changes nothing."""
    if old is new:
        return True
    if type(old) is type(new) and isinstance(old, (bool, int, float, str, tuple)):
        return old == new
    return False
