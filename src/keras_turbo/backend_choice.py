"""Which backend Keras is told to use, and by whom, found out without importing Keras.

The launcher chooses torch where nothing else does; the doctor and the command line say where
a choice came from.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

# What Keras writes into its configuration file by itself, whatever backend it runs on.
_WRITTEN_BY_KERAS = {
    "floatx": "float32",
    "epsilon": 1e-07,
    "backend": "tensorflow",
    "image_data_format": "channels_last",
}


@dataclass(frozen=True)
class Choice:
    """A backend and the place where it was chosen."""

    backend: str
    where: str


def find() -> Choice | None:
    """The user's choice of a backend, or None where there is none.

    A configuration file that holds only what Keras itself writes at its first import is no
    choice: Keras leaves it behind on every machine, whatever backend is in use.

    Example:

    >>> import os
    >>> from keras_turbo import backend_choice
    >>> os.environ["KERAS_BACKEND"] = "torch"
    >>> backend_choice.find()
    Choice(backend='torch', where='KERAS_BACKEND')
    """
    backend = os.environ.get("KERAS_BACKEND")
    if backend:
        return Choice(backend, "KERAS_BACKEND")
    path = config_path()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config == _WRITTEN_BY_KERAS or "backend" not in config:
        return None
    return Choice(str(config["backend"]), str(path))


def config_path() -> Path:
    """Where Keras looks for its configuration file."""
    home = os.environ.get("KERAS_HOME")
    if home is not None:
        return Path(home, "keras.json").expanduser()
    base = Path.home()
    if not os.access(base, os.W_OK):
        base = Path("/tmp")  # noqa: S108, where Keras itself looks then
    return base / ".keras" / "keras.json"


def prefer_torch() -> None:
    """Choose torch where nobody has chosen a backend, for child processes too."""
    if find() is None:
        os.environ["KERAS_BACKEND"] = "torch"
