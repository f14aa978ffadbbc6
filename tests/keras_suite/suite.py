"""Running the tests of the installed Keras wheel in a subprocess, one mode at a time."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

QUICK = ("activations", "layers", "models")
"""What the quick run covers, as folders of `keras/src`."""

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

_ELSEWHERE = ("backend/jax", "backend/tensorflow", "backend/openvino", "backend/numpy")
"""Tests of other backends."""


_COMPLETE = (0, 1, 5)
"""Exit codes with which pytest has run all that it was given, or found nothing to run."""


def keras_source() -> Path:
    """The folder `keras/src` of the installed wheel."""
    spec = importlib.util.find_spec("keras")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "src"


def select(only: list[str]) -> list[Path]:
    """The test files under the given folders or files of `keras/src`; all of them for none."""
    source = keras_source()
    chosen = []
    for path in sorted(source.rglob("*_test.py")):
        name = path.relative_to(source).as_posix()
        if name.startswith(_ELSEWHERE):
            continue
        if not only or any(
            name == entry or name.startswith(entry.rstrip("/") + "/") for entry in only
        ):
            chosen.append(path)
    return chosen


@dataclass
class Result:
    """The outcome of one test in one mode."""

    outcome: str
    error: str = ""
    seconds: float = 0.0
    when: str = "call"


@dataclass
class Run:
    """The outcomes of all tests in one mode, and what keras_turbo counted meanwhile."""

    mode: str
    seconds: float = 0.0
    results: dict[str, Result] = field(default_factory=dict)
    uncollected: dict[str, str] = field(default_factory=dict)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    fallbacks: collections.Counter[str] = field(default_factory=collections.Counter)
    output: str = ""

    def count(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results.values())

    def summary(self) -> str:
        name = "stock" if self.mode == "stock" else f"turbo ({self.mode})"
        numbers = ", ".join(
            f"{self.count(outcome)} {outcome}"
            for outcome in ("passed", "failed", "skipped", "xfailed", "xpassed")
            if self.count(outcome) or outcome in ("passed", "failed")
        )
        text = f"{name}: {numbers} in {self.seconds:.0f} s"
        return f"{text}\n{self.output}".rstrip()


class Suite:
    """The chosen test files, and how to run them."""

    def __init__(
        self, files: list[Path], jobs: int, keyword: str | None, check: str, deep: bool = False
    ) -> None:
        self.files = files
        self.jobs = jobs
        self.keyword = keyword
        self.check = check
        self.deep = deep

    def header(self, only: list[str]) -> str:
        versions = ", ".join(
            f"{name} {metadata.version(name)}" for name in ("keras", "torch", "keras-turbo")
        )
        where = ", ".join(only) if only else "all"
        return (
            f"Keras's own tests ({where}: {len(self.files)} files), stock and turbo; "
            f"Python {platform.python_version()}, {versions}"
        )

    def run(self, mode: str, tests: list[str] | None = None) -> Run:
        """Run the files, or only some tests of them, in one mode."""
        site = keras_source().parent.parent
        files = self.files
        if tests is not None:
            files = sorted({site / test.partition("::")[0] for test in tests})
        run = Run(mode)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="keras_suite_") as folder:
            environment = self._environment(mode, folder)
            if tests is not None:
                chosen = Path(folder) / "tests"
                chosen.write_text("\n".join(tests), encoding="utf-8")
                environment["KERAS_SUITE_TESTS"] = str(chosen)
            logs = []
            with ThreadPoolExecutor(self.jobs) as pool:
                for number, share in enumerate(_shares(files, self.jobs)):
                    log = Path(folder) / f"log_{number}.jsonl"
                    logs.append((log, pool.submit(self._pytest, share, environment, log)))
            for log, done in logs:
                run.output += done.result()
                for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
                    _note(run, json.loads(line))
        run.seconds = time.monotonic() - start
        return run

    def _pytest(self, files: list[Path], environment: dict[str, str], log: Path) -> str:
        """Run some files in a process of their own; its output where it was cut off."""
        command = [
            *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short"),
            *("-c", str(HERE / "pytest.ini"), "--rootdir", str(keras_source().parent.parent)),
            *("-p", "tests.keras_suite.plugin", "-p", "no:cacheprovider"),
            *("--collect-in-virtualenv", "--continue-on-collection-errors"),
            *(("-k", self.keyword) if self.keyword else ()),
            *map(str, files),
        ]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**environment, "KERAS_SUITE_LOG": str(log)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode in _COMPLETE:
            return ""
        start = done.stdout.find("Fatal Python error")
        shown = done.stdout[start : start + 6000] if start >= 0 else done.stdout[-3000:]
        return f"pytest ended with {done.returncode}\n{shown}\n"

    def _environment(self, mode: str, folder: str) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KERAS_")}
        return {
            **environment,
            "KERAS_BACKEND": "torch",
            "KERAS_HOME": str(Path(folder) / "home"),
            "KERAS_SUITE_MODE": mode,
            "KERAS_SUITE_CHECK": self.check,
            "KERAS_SUITE_DEEP": str(int(self.deep)),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }


def _shares(files: list[Path], jobs: int) -> list[list[Path]]:
    """The files in shares of about equal size, several for each job, largest files first."""
    count = 1 if jobs == 1 else min(len(files), 4 * jobs)
    shares: list[list[Path]] = [[] for _ in range(count)]
    sizes = [0] * count
    for file in sorted(files, key=lambda path: path.stat().st_size, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(file)
        sizes[smallest] += file.stat().st_size
    return shares


def _note(run: Run, line: dict[str, Any]) -> None:
    test = line["test"]
    if line["when"] == "collect":
        run.uncollected[test] = line["error"]
        return
    run.counts.update({name: line.get(name, 0) for name in ("lowered", "served")})
    run.fallbacks.update(line.get("fallbacks", {}))
    known = run.results.get(test)
    # A test that passed and then failed in its clean-up has failed.
    if known is None or line["outcome"] == "failed":
        run.results[test] = Result(
            line["outcome"], line["error"], line.get("seconds", 0.0), line["when"]
        )
