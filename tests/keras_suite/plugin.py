"""The pytest plugin of a run: stock or turbo, and one JSON line for each test.

`KERAS_SUITE_MODE` is `stock`, `on` or `strict`; under `stock` keras_turbo is not even
imported. `KERAS_SUITE_LOG` is the file that the lines go to, `KERAS_SUITE_TESTS` one that
names the only tests to run. Loaded with `-p`.
"""

from __future__ import annotations

import collections
import json
import os
import re
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODE = os.environ.get("KERAS_SUITE_MODE", "stock")
LOG = os.environ.get("KERAS_SUITE_LOG")
TESTS = os.environ.get("KERAS_SUITE_TESTS")
CHECK = os.environ.get("KERAS_SUITE_CHECK", "first")
DEEP = os.environ.get("KERAS_SUITE_DEEP") == "1"
SECONDS = int(os.environ.get("KERAS_SUITE_SECONDS", "600"))

_counts: collections.Counter[str] = collections.Counter()


def pytest_configure(config: pytest.Config) -> None:
    for marker in ("requires_trainable_backend", "multi_device"):
        config.addinivalue_line("markers", f"{marker}: a marker of Keras's own tests")
    torch.set_num_threads(1)
    sys.modules["conftest"] = _conftest()
    if MODE != "stock":
        _enable()


def _stable(name: str) -> str:
    """A test's name without the addresses in it, which differ from process to process."""
    return re.sub(r"0x[0-9a-f]+", "0x", name)


def _conftest() -> ModuleType:
    """What Keras's tests import from the `conftest` of its repository, which no wheel has."""
    module = ModuleType("conftest")

    def skip_if_backend(backend: str, reason: str) -> pytest.MarkDecorator:
        return pytest.mark.skipif(backend == "torch", reason=reason)

    module.skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if TESTS:
        wanted = set(Path(TESTS).read_text(encoding="utf-8").splitlines())
        items[:] = [item for item in items if _stable(item.nodeid) in wanted]
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
    if DEEP:
        _serve_first_calls(dispatch)
        _check_with_gradients(dispatch)


def _serve_first_calls(dispatch: Any) -> None:
    """Build a layer before its first call, so that already that call can run a program.

    Keras's tests call most layers once; without this they would say little about programs.
    """
    miss = dispatch.miss

    def building_miss(layer: Any, args: Any, kwargs: Any) -> Any:
        wanted = not getattr(layer, "built", True) and not dispatch.guard.thread_state.stock
        wanted = wanted and not dispatch._symbolic(args, kwargs)
        if wanted and dispatch.guard.ambient_reason() is None:
            with dispatch.guard_stock():
                _build(layer, args, kwargs)
        return miss(layer, args, kwargs)

    dispatch.miss = building_miss


def _build(layer: Any, args: Any, kwargs: Any) -> None:
    from keras.src import backend, tree
    from keras.src.layers.layer import CallSpec

    def convert(item: Any) -> Any:
        converted = layer.dtype_policy.convert_input(item, layer.autocast, layer.input_dtype)
        mask = backend.get_keras_mask(item)
        if mask is not None:
            backend.set_keras_mask(converted, mask)
        return converted

    try:
        if layer._convert_input_args:
            args, kwargs = tree.map_structure(convert, args), tree.map_structure(convert, kwargs)
        spec = CallSpec(layer._call_signature, layer._call_context_args, args, kwargs)
        layer._assert_input_compatibility(spec.first_arg)
        with layer._open_name_scope():
            layer._maybe_build(spec)
    except Exception:  # noqa: BLE001, the call that follows meets the same error
        pass


def _check_with_gradients(dispatch: Any) -> None:
    """Compare every call of every comparable program, also where gradients are recorded."""
    from keras_turbo import check

    checking = check.checking
    check.checking = lambda program, entry, _: checking(program, entry, always=True)
    check.torch = SimpleNamespace(**{**vars(torch), "is_grad_enabled": lambda: False})


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
    if report.when != "call" and report.passed:
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    _write(
        {
            "test": _stable(report.nodeid),
            "outcome": outcome,
            "when": report.when,
            "seconds": round(report.duration, 3),
            "error": _first_error(report) if report.failed else "",
            **dict(report.user_properties).get("keras_suite", {}),
        }
    )


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.passed:
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
