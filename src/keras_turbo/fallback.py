"""Why a call ran stock Keras: reasons, their counters, and the error of strict mode.

Lowering raises `Decline` with a reason; dispatch records the reason per layer path and,
in strict mode, turns it into a `FallbackError`.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import warnings
from collections import Counter
from typing import Any


class Reason(enum.Enum):
    """Why a call fell back, or why a program was discarded."""

    NO_RULE = "no lowering rule for this class"
    OVERRIDE = "a subclass or instance overrides what the rule relies on"
    NOT_BUILT = "the layer is not built yet"
    SYMBOLIC = "symbolic inputs"
    STATELESS = "inside a stateless scope"
    DEVICE = "tensors or weights on another device, or inside a device scope"
    DISTRIBUTION = "a distribution is active"
    REMAT = "rematerialisation is active"
    QUANTIZED = "the layer is quantized"
    HOOKS = "torch hooks are registered"
    TRANSFORM = "inside a torch.func transform, a trace or a torch mode"
    INPUT = "an input that is not a plain tensor"
    STRUCTURE = "arguments of a structure that is not lowered"
    SHAPE = "an input shape that stock Keras must adjust or refuse"
    MASK = "a mask that cannot be known at lowering"
    CONTROL_FLOW = "Python control flow on tensor values"
    SIDE_EFFECT = "the call writes attributes or other state"
    CONSTANT = "the call reads a tensor that is not a Keras variable"
    UNSUPPORTED = "the rule does not cover this configuration"
    MISMATCH = "the program's result differed from stock Keras"
    ERROR = "the program raised where stock Keras did not"
    POLYMORPHIC = "too many different kinds of input"
    ASSUMPTION = "an attribute that the program relied on has changed"


QUIET = frozenset({Reason.SYMBOLIC, Reason.NOT_BUILT, Reason.STATELESS, Reason.TRANSFORM})
"""Reasons that strict mode does not raise for: no computation was slowed down by them."""


class Decline(Exception):
    """Raised inside a rule, or by the lowering context, when a layer cannot be lowered."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


class FallbackError(RuntimeError):
    """Raised in strict mode where a call would have fallen back to stock Keras."""


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
FRAMES = _PACKAGE, "<keras_turbo "
"""How the file names of this package's frames begin, generated code included."""
_lock = threading.Lock()
_counts: Counter[tuple[str, str, str, str]] = Counter()


def record(layer: Any, reason: Reason, detail: str = "") -> None:
    """Count one fallback of `layer`."""
    key = (layer_path(layer), type(layer).__name__, reason.name, detail)
    with _lock:
        _counts[key] += 1


def layer_path(layer: Any) -> str:
    """The path that names a layer in reports: its Keras path, else its name."""
    return getattr(layer, "path", None) or getattr(layer, "name", None) or type(layer).__name__


def reset() -> None:
    """Forget all counts."""
    with _lock:
        _counts.clear()


def fallbacks() -> dict[tuple[str, str], int]:
    """How often calls fell back to stock Keras since `enable()`.

    Returns:
        A dict from `(layer path, reason)` to the number of calls, most frequent first.
        The reason is the name of a `Reason`, followed by its detail where there is one.

    Example:

    >>> import keras_turbo
    >>> keras_turbo.fallbacks()
    {}
    """
    with _lock:
        items = list(_counts.items())
    result: Counter[tuple[str, str]] = Counter()
    for (path, _, reason, detail), count in items:
        result[path, f"{reason}: {detail}" if detail else reason] += count
    return dict(result.most_common())


def bug(error: Exception, strict: bool) -> Decline:
    """What becomes of an exception that only a bug of ours can have raised.

    Args:
        error: the exception.
        strict: whether to keep it as the cause, and with it everything its frames hold.
    """
    problem = Decline(Reason.ERROR, f"{type(error).__name__}: {error}")
    if strict:
        problem.__cause__ = error
    return problem


def warn(text: str) -> None:
    """Warn at the line that called into this package, however deep inside it we are."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FRAMES):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def strict_error(layer: Any, reason: Reason, detail: str) -> FallbackError:
    """The error that strict mode raises for a fallback of `layer`."""
    text = f"{reason.value} ({detail})" if detail else reason.value
    return FallbackError(
        f"keras_turbo (strict): layer '{layer_path(layer)}' of class "
        f"{type(layer).__name__} ran stock Keras: {reason.name}: {text}."
    )
