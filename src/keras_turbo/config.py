"""Options of the package: what the user chose, parsed once.

`enable()` resolves its arguments and the environment into one frozen `Options`
object; everything downstream (dispatch, lowering) reads that object and never the
environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

MODES = ("on", "strict", "off")
CHECKS = ("off", "first", "always")


@dataclass(frozen=True)
class Options:
    """The resolved options.

    Attributes:
        mode: `"on"` runs programs and falls back to stock Keras silently, `"strict"`
            raises `FallbackError` on a fallback, `"off"` changes nothing.
        check: when a program's outputs are compared with stock Keras: `"off"`,
            `"first"` (the first no-grad call) or `"always"`.
    """

    mode: str = "on"
    check: str = "first"

    @property
    def strict(self) -> bool:
        return self.mode == "strict"


def resolve(mode: str | None = None, check: str | None = None) -> Options:
    """Combine arguments and environment into `Options`.

    The environment supplies whatever is not given as an argument, so that `KERAS_TURBO=off`
    switches off every program that does not insist.

    Args:
        mode: one of `"on"`, `"strict"`, `"off"`; None for `KERAS_TURBO`, else `"on"`.
        check: one of `"off"`, `"first"`, `"always"`; None for `KERAS_TURBO_CHECK`, else
            `"first"`.

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
    return Options(mode or env_mode or "on", check or env_check or "first")


def _environment(name: str, allowed: tuple[str, ...]) -> str | None:
    value = os.environ.get(name, "").strip().lower()
    if not value:
        return None
    _validate(f"environment variable {name}", value, allowed)
    return value


def _validate(what: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"keras_turbo: {what} must be one of {', '.join(allowed)}; got {value!r}.")
