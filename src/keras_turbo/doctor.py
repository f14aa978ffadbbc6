"""The doctor: what is installed, what was chosen, what is patched, and what stands in the way.

It enables the package in its own process, as a script would, and looks at the result.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from types import FunctionType
from typing import Any

from keras_turbo import __version__, api, backend_choice, config, tables

VARIABLES = ("KERAS_BACKEND", "KERAS_HOME", "KERAS_TURBO", "KERAS_TURBO_CHECK", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Findings:
    """What the doctor found.

    Attributes:
        facts: pairs of a name and a value.
        patches: the patched attributes, as `owner.attribute`.
        conflicts: what stands in the way of lowered programs, one sentence each.
    """

    facts: tuple[tuple[str, str], ...]
    patches: tuple[str, ...]
    conflicts: tuple[str, ...]

    def __str__(self) -> str:
        lines = [tables.text_table(("what", "found"), self.facts), "", "patched:"]
        lines += [f"  {patch}" for patch in self.patches] or ["  nothing"]
        lines += ["conflicts:"]
        lines += [f"  {conflict}" for conflict in self.conflicts] or ["  none"]
        return "\n".join(lines)


def examine() -> Findings:
    """Look at this machine, as a script run by `python -m keras_turbo` would find it.

    Example:

    >>> from keras_turbo import doctor
    >>> doctor.examine().conflicts
    ()
    """
    facts = [("keras-turbo", __version__), ("python", platform.python_version())]
    facts += [(name, _version(name)) for name in ("keras", "torch", "numpy")]
    choice = backend_choice.find()
    where = f"chosen by {choice.where}" if choice else "chosen by keras_turbo: nobody else did"
    facts.append(("backend", f"{choice.backend if choice else 'torch'}, {where}"))
    facts += [(name, value) for name in VARIABLES if (value := os.environ.get(name))]
    conflicts: list[str] = []
    backend_choice.prefer_torch()
    problem = _import_problem()
    if problem is None:
        facts += _torch_facts()
        conflicts += _replaced_call()
        problem = api.obstacle()
    if problem is not None:
        conflicts.append(f"not active: {problem}")
        return Findings(tuple(facts), (), tuple(conflicts))
    try:
        mode = config.resolve().mode
    except ValueError as error:
        conflicts.append(str(error))
        mode = "off"
    else:
        if mode == "off":
            conflicts.append("switched off by KERAS_TURBO")
    return Findings(tuple(facts), () if mode == "off" else _patches(mode), tuple(conflicts))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _import_problem() -> str | None:
    for name in ("keras", "torch"):
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001, a broken installation can raise anything
            return f"{name} cannot be imported: {error}"
    return None


def _torch_facts() -> list[tuple[str, str]]:
    import torch

    devices = ["cpu"]
    devices += [
        f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        devices.append("mps")
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    return [("devices", ", ".join(devices)), ("threads", threads)]


def _replaced_call() -> list[str]:
    """Say who else has replaced the method that every call of a layer goes through."""
    keras = sys.modules["keras"]
    layer: Any = keras.layers.Layer
    if api.is_enabled():
        return []
    call = layer.__call__
    home = os.path.dirname(str(keras.__file__))
    if isinstance(call, FunctionType) and call.__code__.co_filename.startswith(home + os.sep):
        return []
    source = getattr(getattr(call, "__code__", None), "co_filename", repr(call))
    return [f"Layer.__call__ has been replaced by another package ({source})"]


def _patches(mode: str) -> tuple[str, ...]:
    """What is patched once the package is enabled; it is left as it was found."""
    from keras_turbo import patch

    enabled = api.is_enabled()
    if not enabled:
        api.enable(mode)
    names = tuple(f"{row.owner.__name__}.{row.attribute}" for row in patch.ledger())
    if not enabled:
        api.disable()
    return names
