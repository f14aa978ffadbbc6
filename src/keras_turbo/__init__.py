"""keras_turbo runs unchanged Keras 3 code on the PyTorch backend at the speed of torch.

Importing this package imports neither keras nor torch; the public names load what they
need when they are first used.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_turbo.api import disable, enable, is_enabled, lower, stock
    from keras_turbo.explain import Explanation, explain
    from keras_turbo.fallback import FallbackError, Reason, fallbacks
    from keras_turbo.registry import rule
    from keras_turbo.verify import Verification, verify

__version__ = "0.1.0"

_HOME = {
    "enable": "api",
    "disable": "api",
    "is_enabled": "api",
    "stock": "api",
    "lower": "api",
    "explain": "explain",
    "Explanation": "explain",
    "verify": "verify",
    "Verification": "verify",
    "fallbacks": "fallback",
    "FallbackError": "fallback",
    "Reason": "fallback",
    "rule": "registry",
}

__all__ = [
    "Explanation",
    "FallbackError",
    "Reason",
    "Verification",
    "disable",
    "enable",
    "explain",
    "fallbacks",
    "is_enabled",
    "lower",
    "rule",
    "stock",
    "verify",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'keras_turbo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"keras_turbo.{home}"), name)
    globals()[name] = value
    return value


class _Package(types.ModuleType):
    """Lets no module hide the public function of the same name once it is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """Entry point of `%load_ext keras_turbo`."""
    from keras_turbo import _ipython

    _ipython.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Entry point of `%unload_ext keras_turbo`."""
    from keras_turbo import _ipython

    _ipython.unload(shell)
