"""What a reason's detail says: facts of the call, never the tracer's made-up sizes."""

from __future__ import annotations

import re

import keras
import pytest
import torch
from keras import layers

import keras_turbo
from keras_turbo import registry


def detail() -> str:
    """The detail of the only fallback so far."""
    ((_, reason),) = keras_turbo.fallbacks()
    keras_turbo.fallback.reset()
    return reason.partition(": ")[2]


@pytest.fixture
def on():
    keras_turbo.enable("on")


@pytest.mark.parametrize("batch", [0, 1, 2, 101, 103])
@pytest.mark.parametrize("inside", [False, True])
def test_a_shape_that_stock_keras_refuses_is_the_real_one(batch, inside, on):
    layer = layers.Conv2D(2, 3)
    layer.build((None, 8, 8, 3))
    model = keras.Sequential([keras.Input((8, 8, 3)), layer]) if inside else layer
    with pytest.raises(ValueError, match="incompatible"):
        model(torch.randn(batch, 8, 8, 4))
    assert detail() == f"({batch}, 8, 8, 4)"


def test_a_size_inside_a_model_is_real_or_none(on):
    inputs = keras.Input((None, 4))
    model = keras.Model(inputs, layers.Dense(2)(layers.ZeroPadding1D(1)(inputs)))
    model.layers[-1].input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: 5})
    with pytest.raises(ValueError, match="incompatible"):
        model(torch.randn(3, 6, 4))
    assert re.fullmatch(r"\((3|\?), (8|\?), 4\)", detail())


class Product(layers.Layer):
    def call(self, x, y):
        return torch.matmul(x, y)


class Reports(layers.Layer):
    def call(self, x, y):
        raise ValueError(f"cannot combine {x.shape} and {y.shape}")


@pytest.mark.parametrize("cls", [Product, Reports])
def test_errors_while_tracing_hold_no_made_up_sizes(cls, on, monkeypatch):
    registry.trace_call(cls)
    layer = cls()
    layer.built = True
    with pytest.raises((RuntimeError, ValueError)):
        layer(torch.randn(2, 5), torch.randn(3, 7))
    text = detail()
    assert text and not set(re.findall(r"\d+", text)) - set("12357")
    monkeypatch.delitem(registry._rules, cls)


def test_errors_that_speak_of_no_size_keep_their_words(on, monkeypatch):
    class Odd(layers.Layer):
        def call(self, x):
            return torch.linalg.inv(x)

    registry.trace_call(Odd)
    layer = Odd()
    layer.built = True
    with pytest.raises(RuntimeError):
        layer(torch.ones(3, 2, 2, dtype=torch.int64).int())
    assert "floating" in detail()
    monkeypatch.delitem(registry._rules, Odd)
