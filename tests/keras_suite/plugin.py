"""The pytest plugin of a run: stock or turbo, and one JSON line for each test.

`KERAS_SUITE_MODE` is `stock`, `on` or `strict`; under `stock` keras_turbo is not even
imported. `KERAS_SUITE_LOG` is the file that the lines go to, `KERAS_SUITE_TESTS` one that
names the only tests to run. Loaded with `-p`, in the process that distributes the tests
and in each worker.
"""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

MODE = os.environ.get("KERAS_SUITE_MODE", "stock")
LOG = os.environ.get("KERAS_SUITE_LOG")
TESTS = os.environ.get("KERAS_SUITE_TESTS")
CHECK = os.environ.get("KERAS_SUITE_CHECK", "first")
SECONDS = int(os.environ.get("KERAS_SUITE_SECONDS", "600"))

_counts: collections.Counter[str] = collections.Counter()


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: a marker of Keras's own tests")
    torch.set_num_threads(1)
    sys.modules["conftest"] = _conftest()
    if MODE != "stock":
        _enable()


def _conftest() -> ModuleType:
    """What Keras's tests import from the `conftest` of its repository, which no wheel has."""
    module = ModuleType("conftest")

    def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(backend == "torch", reason=reason)

    module.skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Addresses in the names of parametrized tests differ from process to process.
        item._nodeid = re.sub(r"0x[0-9a-f]+", "0x", item.nodeid)
    if TESTS:
        wanted = set(Path(TESTS).read_text(encoding="utf-8").splitlines())
        items[:] = [item for item in items if item.nodeid in wanted]
    for item in items:
        if "multi_device" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs several devices"))


def _enable() -> None:
    import keras_turbo
    from keras_turbo import dispatch

    keras_turbo.enable(MODE, CHECK)
    if not keras_turbo.is_enabled():
        raise pytest.UsageError("keras_turbo is not active")
    build = dispatch.build

    def counting_build(layer: Any, kind: Any) -> Any:
        program = build(layer, kind)
        run = program.run

        def counting_run(*args: Any) -> Any:
            _counts["served"] += 1
            return run(*args)

        program.run = counting_run
        _counts["lowered"] += 1
        return program

    dispatch.build = counting_build


def _fallbacks() -> collections.Counter[str]:
    if MODE == "stock":
        return collections.Counter()
    from keras_turbo import fallback

    counter: collections.Counter[str] = collections.Counter()
    with fallback._lock:
        for (_, layer, reason, detail), count in fallback._counts.items():
            counter[f"{reason}|{layer}|{detail}"] += count
    return counter


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    before, fallbacks = _counts.copy(), _fallbacks()
    item._keras_suite_before = (before, fallbacks)  # type: ignore[attr-defined]
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    def too_slow(*_: Any) -> None:
        raise TimeoutError(f"no result after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        counts, fallbacks = item._keras_suite_before  # type: ignore[attr-defined]
        numbers = {name: n - counts[name] for name, n in _counts.items() if n > counts[name]}
        reasons = {k: n - fallbacks[k] for k, n in _fallbacks().items() if n > fallbacks[k]}
        item.user_properties.append(("keras_suite", {**numbers, "fallbacks": reasons}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    if report.when != "call" and report.passed:
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    _write(
        {
            "test": report.nodeid,
            "outcome": outcome,
            "when": report.when,
            "seconds": round(report.duration, 3),
            "error": _first_error(report) if report.failed else "",
            **dict(report.user_properties).get("keras_suite", {}),
        }
    )


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.passed or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    _write(
        {
            "test": report.nodeid,
            "outcome": report.outcome,
            "when": "collect",
            "error": _first_error(report),
        }
    )


def _first_error(report: Any) -> str:
    """The first line of the exception, from a report of whatever form."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).splitlines()[0] if crash.message else "error"
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return (lines[0][1:] if lines else str(report.longrepr)[-300:]).strip()


def _write(line: dict[str, Any]) -> None:
    if LOG:
        with open(LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
