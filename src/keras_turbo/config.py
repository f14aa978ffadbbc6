"""Options of the package: what the user chose, parsed once.

`enable()` resolves its arguments and the environment into one frozen `Options`
object; everything downstream (dispatch, lowering) reads that object and never the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODES = ("on", "strict", "off")
CHECKS = ("off", "first", "always")
COMPILE_OPTIONS = ("mode", "options")


@dataclass(frozen=True)
class Options:
    """The resolved options.

    Attributes:
        mode: `"on"` runs programs and falls back to stock Keras silently, `"strict"`
            raises `FallbackError` on a fallback, `"off"` changes nothing.
        check: when a program's outputs are compared with stock Keras: `"off"`,
            `"first"` (the first no-grad call) or `"always"`.
        compile: `mode` and `options` for the compiler, for models with `jit_compile=True`.
    """

    mode: str = "on"
    check: str = "first"
    compile: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def strict(self) -> bool:
        return self.mode == "strict"


def resolve(
    mode: str | None = None,
    check: str | None = None,
    compile: Mapping[str, Any] | None = None,
) -> Options:
    """Combine arguments and environment into `Options`.

    The environment supplies whatever is not given as an argument, so that `KERAS_TURBO=off`
    switches off every program that does not insist.

    Args:
        mode: one of `"on"`, `"strict"`, `"off"`; None for `KERAS_TURBO`, else `"on"`.
        check: one of `"off"`, `"first"`, `"always"`; None for `KERAS_TURBO_CHECK`, else
            `"first"`.
        compile: what `enable` got.

    Raises:
        ValueError: for a value outside those lists, naming where it came from.

    Example:

    >>> from keras_turbo.config import resolve
    >>> resolve("strict", "off").strict
    True
    """
    env_mode = _environment("KERAS_TURBO", MODES)
    env_check = _environment("KERAS_TURBO_CHECK", CHECKS)
    if mode is not None:
        _validate("mode", mode, MODES)
    if check is not None:
        _validate("check", check, CHECKS)
    unknown = set(compile or ()) - set(COMPILE_OPTIONS)
    if unknown:
        wanted = " and ".join(COMPILE_OPTIONS)
        raise ValueError(f"keras_turbo: compile takes {wanted}; got {', '.join(sorted(unknown))}.")
    return Options(mode or env_mode or "on", check or env_check or "first", dict(compile or {}))


def _environment(name: str, allowed: tuple[str, ...]) -> str | None:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return None
    _validate(f"environment variable {name}", value, allowed)
    return value


def _validate(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"keras_turbo: {what} must be one of {', '.join(allowed)}; got {value!r}.")
