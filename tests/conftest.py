"""What every test starts from: stock Keras on torch, the package enabled in strict mode.

Strict mode turns each fallback into an error, so a test can only pass on programs. Where a
fallback is the right answer, the test says so by name with `@pytest.mark.allow_fallback`,
and then the named reasons, and no others, must have been counted.
"""

# ruff: noqa: E402 - Keras reads its backend from the environment when it is imported.
from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
for _name in ("KERAS_TURBO", "KERAS_TURBO_CHECK"):
    os.environ.pop(_name, None)

import zlib

import keras
import pytest
import torch

import keras_turbo
from keras_turbo import dispatch, fallback

torch.set_num_threads(2)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    # Keras's own conversion of variables to numpy meets a newer numpy than torch knows.
    config.addinivalue_line(
        "filterwarnings", "ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"
    )
    config.addinivalue_line(
        "markers",
        "allow_fallback(*reasons): run in mode 'on'; exactly these reasons must be counted",
    )


@pytest.fixture(autouse=True)
def turbo(request: pytest.FixtureRequest):
    """Enable the package for one test and leave no trace of the test behind."""
    marker = request.node.get_closest_marker("allow_fallback")
    keras.utils.set_random_seed(zlib.crc32(request.node.nodeid.encode()) % 2**31)
    keras_turbo.enable("on" if marker else "strict")
    fallback.reset()
    try:
        yield
        if marker and dispatch.options.mode != "strict":
            assert set(reasons()) == set(marker.args)
    finally:
        keras_turbo.disable()
        fallback.reset()
        keras.config.set_dtype_policy("float32")
        keras.config.set_floatx("float32")
        keras.config.set_image_data_format("channels_last")
        keras.backend.clear_session(free_memory=False)
        torch.set_grad_enabled(True)


def reasons() -> list[str]:
    """Names of the reasons counted since the test began, without the quiet ones."""
    names = {reason.split(":")[0] for _, reason in keras_turbo.fallbacks()}
    return sorted(names - {reason.name for reason in fallback.QUIET})


@pytest.fixture
def stock():
    """`stock(function, *args, **kwargs)` calls the function with stock Keras."""

    def call(function, *args, **kwargs):
        with keras_turbo.stock():
            return function(*args, **kwargs)

    return call
