"""The examples in docstrings run, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import importlib.resources
import inspect
import pkgutil

import pytest

import keras_turbo
from keras_turbo import registry

MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(keras_turbo.__path__, "keras_turbo.")
    if not name.endswith("__main__")
)
DESCRIBED_BY_THEIR_MAKER = {"Explanation", "Verification", "FallbackError", "Reason"}


@pytest.fixture(autouse=True)
def rules_of_the_package(monkeypatch):
    """What an example registers is gone after it."""
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0


@pytest.mark.parametrize("name", sorted(set(keras_turbo.__all__) - DESCRIBED_BY_THEIR_MAKER))
def test_every_public_function_has_an_example(name):
    text = inspect.getdoc(getattr(keras_turbo, name))
    assert text is not None
    assert ">>>" in text


def test_the_readme_runs():
    path = importlib.resources.files(keras_turbo).joinpath("../../README.md")
    results = doctest.testfile(str(path), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
    assert results.attempted > 0
