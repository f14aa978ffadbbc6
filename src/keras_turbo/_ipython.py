"""`%load_ext keras_turbo`: the switches, for notebooks.

IPython calls `load` when the extension is loaded and `unload` when it is taken out again.
"""

from __future__ import annotations

from typing import Any

from keras_turbo import api


def load(shell: Any) -> None:  # noqa: ARG001, the signature is IPython's
    """Enable the package, now or once the notebook imports Keras.

    Args:
        shell: the running `InteractiveShell`.

    Raises:
        ValueError: for an unknown value of `KERAS_TURBO` or `KERAS_TURBO_CHECK`.
    """
    api.enable()


def unload(shell: Any) -> None:  # noqa: ARG001, the signature is IPython's
    """Put stock Keras back.

    Args:
        shell: the running `InteractiveShell`.
    """
    api.disable()
