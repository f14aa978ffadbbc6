"""The public switches: enable, disable, stock scope, and lowering by hand."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from keras_turbo import config, import_hook
from keras_turbo.stock_scope import StockScope

if TYPE_CHECKING:
    from torch import fx


def enable(
    mode: str | None = None,
    check: str | None = None,
    compile: Mapping[str, Any] | None = None,
) -> None:
    """Run Keras layers as lowered programs from now on, also those already built.

    An option that is not given comes from the environment variable `KERAS_TURBO` or
    `KERAS_TURBO_CHECK`, else it is `"on"` and `"first"`; an argument wins over both.
    Calling it again only changes the options. Where Keras is not imported yet, it takes effect
    as soon as it is. On another backend than torch, or on an unsupported version, it says so
    once on stderr and changes nothing.

    Args:
        mode: `"on"` by default, `"strict"` (a fallback raises `FallbackError`) or `"off"`.
        check: when results are compared with stock Keras: `"first"` by default, `"off"`
            or `"always"`.
        compile: how models with `jit_compile=True` are compiled: `mode` and `options`, as
            `torch.compile` takes them, such as `{"mode": "max-autotune"}`.

    Raises:
        ValueError: for an unknown mode, check or key, also in the environment.

    Example:

    >>> import keras_turbo
    >>> keras_turbo.enable()
    >>> keras_turbo.is_enabled()
    True
    """
    options = config.resolve(mode, check, compile)
    if options.mode == "off":
        disable()
        return
    if "keras" not in sys.modules:
        import_hook.install(lambda: enable(options.mode, options.check, options.compile))
        return
    problem = obstacle()
    if problem is not None:
        _say_once(f"keras_turbo: not active: {problem}.")
        return
    from keras_turbo import patch

    patch.install(options)


def disable() -> None:
    """Put stock Keras back; every patched attribute is the identical object again.

    Example:

    >>> import keras_turbo
    >>> keras_turbo.disable()
    >>> keras_turbo.is_enabled()
    False
    """
    import_hook.remove()
    patch = sys.modules.get("keras_turbo.patch")
    if patch is not None:
        patch.remove()


def is_enabled() -> bool:
    """Whether the patches are in force, or will be as soon as Keras is imported.

    Example:

    >>> import keras_turbo
    >>> keras_turbo.enable("off")
    >>> keras_turbo.is_enabled()
    False
    """
    patch = sys.modules.get("keras_turbo.patch")
    return import_hook.waiting() or (patch is not None and bool(patch.ledger()))


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """Run stock Keras inside this block, in this thread.

    Example:

    >>> import keras_turbo
    >>> with keras_turbo.stock():
    ...     pass
    """
    with StockScope():
        yield


def lower(layer_or_model: Any, training: bool = False) -> fx.GraphModule:
    """The program of a built layer or model as a module of its own.

    Args:
        layer_or_model: a built `keras.layers.Layer`.
        training: which of its programs.

    Returns:
        A `torch.fx.GraphModule` that takes the layer's input tensors, one by one, and whose
        parameters are the Keras variables' own `torch.nn.Parameter` objects.

    Raises:
        ValueError: if the layer is not built or cannot be lowered, with the reason.

    Example:

    >>> import keras, keras_turbo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> module = keras_turbo.lower(model)
    >>> print(len(list(module.parameters())))
    2
    """
    from keras_turbo import rules
    from keras_turbo.declared import declared_kind
    from keras_turbo.fallback import Decline, layer_path
    from keras_turbo.program import build

    rules.load()
    try:
        return build(layer_or_model, declared_kind(layer_or_model, training)).module()
    except Decline as declined:
        raise ValueError(
            f"keras_turbo.lower: '{layer_path(layer_or_model)}' of class "
            f"{type(layer_or_model).__name__} cannot be lowered: {declined}."
        ) from declined


def obstacle() -> str | None:
    """Why the imported Keras cannot be served, found out without importing torch for it."""
    settings = getattr(sys.modules["keras"], "config", None)
    if settings is None:
        return "this Keras is older than Keras 3"
    if settings.backend() != "torch":
        return f"the Keras backend is '{settings.backend()}', not 'torch'"
    try:
        from keras_turbo import compat, rules

        rules.load()
    except (ImportError, AttributeError) as error:
        return f"this Keras or torch is not supported ({error})"
    return compat.unsupported()


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
