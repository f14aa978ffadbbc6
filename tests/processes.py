"""Child interpreters for the tests of the launcher: the same command with and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TURBO = ("-m", "keras_turbo")

OTHER_BACKEND = """
    class config:
        backend = staticmethod(lambda: "jax")
"""


def environment(home: Path, **extra: str) -> dict[str, str]:
    """An environment in which nobody has chosen a backend or an option."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KERAS", "PYTHON", "COVERAGE"))
    }
    return {**kept, "HOME": str(home), "OMP_NUM_THREADS": "1", **extra}


def python(
    *args: str, home: Path, stdin: str | None = None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter in the folder `home`, which is also the user's home."""
    return subprocess.run(
        [sys.executable, *args],
        cwd=home,
        env=environment(home, **extra),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write(folder: Path, files: dict[str, str]) -> None:
    """Write source files, dedented by their first line, below a folder."""
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = source.strip("\n").split("\n")
        indent = len(lines[0]) - len(lines[0].lstrip())
        path.write_text("\n".join(line[indent:] for line in lines) + "\n")
