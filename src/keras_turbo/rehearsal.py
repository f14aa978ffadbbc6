"""Running a user's code once more than stock Keras would, and leaving no trace of it.

Where nothing else tells the shape of what a layer or function returns, `stocknode.py` runs
it on meta tensors while it lowers. What such a rehearsal writes into attributes and draws
from random generators is put back, so that counters count and seeds give what they do with
stock Keras. What it prints, or does to objects of other kinds, stays done.
"""

from __future__ import annotations

import collections
import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from keras_turbo import compat

_ABSENT = object()


@contextlib.contextmanager
def rehearsal(subject: Any) -> Iterator[None]:
    """Put back what the block changes: attributes of layers, and random states.

    Args:
        subject: the layer that is run, with all layers inside it; or a function.
    """
    owners = subject._flatten_layers() if isinstance(subject, compat.Layer) else [subject]
    kept: dict[int, tuple[Any, Callable[[], Any]]] = {}
    for owner in owners:
        _keep(getattr(owner, "__dict__", None), kept)
    python, numbers, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        for _, put_back in kept.values():
            put_back()
        random.setstate(python)
        np.random.set_state(numbers)
        torch.set_rng_state(tensors)


def _keep(item: Any, kept: dict[int, tuple[Any, Callable[[], Any]]]) -> None:
    """Note how to put back a container and those inside it, or a random generator."""
    if id(item) in kept:
        return
    inner: list[Any] = []
    put_back: Callable[[], Any] = _nothing
    if isinstance(item, dict):
        inner = list(item.values())
        put_back = partial(_put_back_dict, item, dict(item))
    elif isinstance(item, (list, tuple, set, collections.deque)):
        inner = list(item)
        kind = next(k for k in (list, tuple, set, collections.deque) if isinstance(item, k))
        put_back = partial(_PUT_BACK[kind], item, inner)
    elif isinstance(item, np.random.Generator):
        put_back = partial(setattr, item.bit_generator, "state", item.bit_generator.state)
    elif isinstance(item, np.random.RandomState):
        put_back = partial(item.set_state, item.get_state())
    elif isinstance(item, random.Random):
        put_back = partial(item.setstate, item.getstate())
    elif isinstance(item, torch.Generator):
        put_back = partial(item.set_state, item.get_state())
    else:
        return
    kept[id(item)] = item, put_back
    for entry in inner:
        _keep(entry, kept)


def _nothing(*_: Any) -> None:
    pass


# Methods of the plain types, because Keras's containers watch what is written into them, and
# only where something changed: other threads may be reading.
def _put_back_dict(item: Any, contents: dict[Any, Any]) -> None:
    kind = collections.OrderedDict if isinstance(item, collections.OrderedDict) else dict
    for key in [key for key in item if key not in contents]:
        kind.__delitem__(item, key)
    for key, value in contents.items():
        if item.get(key, _ABSENT) is not value:
            kind.__setitem__(item, key, value)


def _put_back_list(item: Any, contents: list[Any]) -> None:
    if _differ(item, contents):
        list.__setitem__(item, slice(None), contents)


def _put_back_set(item: Any, contents: list[Any]) -> None:
    if item != set(contents):
        set.clear(item)
        set.update(item, contents)


def _put_back_deque(item: Any, contents: list[Any]) -> None:
    if _differ(item, contents):
        item.clear()
        item.extend(contents)


def _differ(item: Any, contents: list[Any]) -> bool:
    return len(item) != len(contents) or any(
        a is not b for a, b in zip(item, contents, strict=True)
    )


_PUT_BACK: dict[type, Callable[[Any, list[Any]], None]] = {
    list: _put_back_list,
    tuple: _nothing,
    set: _put_back_set,
    collections.deque: _put_back_deque,
}
