"""The import hook: `enable` runs right after the user's own code has imported Keras.

Keras reads its backend from the environment when it is first imported, so the package must
never be the one that imports it. The hook waits on `sys.meta_path` for that import, lets
Keras's own loader do it, and takes itself out again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class _KerasFinder(MetaPathFinder):
    """Finds Keras as the other finders do, and asks its loader for one thing more."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then
        self.asking_others = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if name != "keras" or self.asking_others:
            return None
        self.asking_others = True
        try:
            spec = find_spec(name)
        finally:
            self.asking_others = False
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Loader) -> None:
        """Follow the next execution of Keras; the loader itself stays what it is."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != "keras":
                execute(module)
                return
            del loader.exec_module
            # Where this raises, the hook stays: the script may mend it and import again.
            execute(module)
            remove()
            self.then()

        loader.exec_module = exec_module


def install(then: Callable[[], None]) -> None:
    """Call a function once Keras is imported: now if it is, else after its first import.

    Args:
        then: called without arguments; its exceptions reach the importing code.

    Example:

    >>> from keras_turbo import import_hook
    >>> import keras
    >>> import_hook.install(lambda: print("keras is there"))
    keras is there
    """
    remove()
    if "keras" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _KerasFinder(then))


def remove() -> None:
    """Stop waiting for Keras."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _KerasFinder)]


def waiting() -> bool:
    """Whether the hook is in place and Keras is not imported yet."""
    return any(isinstance(finder, _KerasFinder) for finder in sys.meta_path)
