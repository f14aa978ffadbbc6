"""Verification finds what differs, and leaves everything as it was."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import torch

import keras_turbo
from keras_turbo import registry
from keras_turbo.state import Snapshot


class Wrong(keras.layers.Layer):
    """A layer for which the tests register rules that are wrong in one way each."""

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[-1:], initializer="ones", name="factor")
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x):
        self.count.assign(self.count + 1.0)
        self.add_loss(keras.ops.mean(x))
        return x * self.factor


def right(ctx, layer, x):
    ctx.assign(layer.count, ctx.variable(layer.count) + 1.0)
    ctx.add_loss(layer, torch.mean(x))
    return x * ctx.variable(layer.factor)


@pytest.fixture
def with_rule():
    def register(function):
        registry.rule(Wrong)(function)
        layer = Wrong(name="layer")
        layer.build((None, 4))
        return layer

    try:
        yield register
    finally:
        registry._rules.pop(Wrong, None)
        registry._overriding.clear()


def normal(*shape):
    return np.random.normal(size=shape).astype("float32")


def kinds(verification, ok):
    return {row.kind for row in verification.rows if row.ok is ok}


def model_with_everything():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, kernel_regularizer="l2", activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5)(x)
    x = keras.layers.GaussianNoise(0.1, seed=3)(x)
    return keras.Model(inputs, [keras.layers.Dense(3)(x), keras.ops.softmax(x)])


@pytest.mark.parametrize("training", [False, True])
def test_equal_in_every_respect(training):
    verification = keras_turbo.verify(model_with_everything(), normal(5, 6), training=training)
    assert verification.ok, str(verification)
    assert verification.max_abs_error < 1e-5
    assert {"output", "loss", "gradient", "variable", "input"} <= kinds(verification, True)
    assert sum(row.kind == "gradient" for row in verification.rows) == 7
    assert str(verification).endswith(f"equal to stock Keras (training={training})")


def test_masks_are_compared():
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(10, 4, mask_zero=True),
            keras.layers.Dense(3),
        ]
    )
    verification = keras_turbo.verify(model, np.random.randint(0, 3, (4, 5)))
    assert verification.ok
    assert "mask" in kinds(verification, True)


def test_structures_and_several_inputs():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, {"sum": a + b, "first": keras.layers.Dense(2)(a)})
    verification = keras_turbo.verify(model, {"a": normal(2, 3), "b": normal(2, 3)})
    assert verification.ok, str(verification)
    names = {row.name for row in verification.rows}
    assert {"output[0]", "output[1]", "input[0]", "input[1]"} <= names


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float64", "bfloat16"])
def test_dtype_policies(policy):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="tanh")])
    verification = keras_turbo.verify(model, normal(3, 6))
    assert verification.ok, str(verification)


def test_a_right_rule_passes(with_rule):
    verification = keras_turbo.verify(with_rule(right), normal(3, 4))
    assert verification.ok, str(verification)
    assert verification.max_abs_error == 0.0


def output(ctx, layer, x):
    return right(ctx, layer, x) + 1e-3


def variable(ctx, layer, x):
    ctx.add_loss(layer, torch.mean(x))
    return x * ctx.variable(layer.factor)


def loss(ctx, layer, x):
    ctx.assign(layer.count, ctx.variable(layer.count) + 1.0)
    return x * ctx.variable(layer.factor)


def gradient(ctx, layer, x):
    ctx.assign(layer.count, ctx.variable(layer.count) + 1.0)
    ctx.add_loss(layer, torch.mean(x))
    return x * ctx.variable(layer.factor).detach() + 0.0 * ctx.variable(layer.factor)


@pytest.mark.parametrize("wrong", [output, variable, loss, gradient])
def test_a_wrong_rule_is_found(wrong, with_rule):
    layer = with_rule(wrong)
    verification = keras_turbo.verify(layer, normal(3, 4))
    assert not verification.ok
    assert wrong.__name__ in kinds(verification, False)
    assert verification.max_abs_error > 1e-4
    assert "DIFFERS from stock Keras" in str(verification)
    assert float(layer.count.value) == 0.0


def fail():
    raise ZeroDivisionError("here")


def test_a_program_that_raises_is_found(with_rule):
    def failing(ctx, layer, x):
        ctx.effect(fail)
        return x

    verification = keras_turbo.verify(with_rule(failing), normal(3, 4))
    assert not verification.ok
    assert verification.rows[0].kind == "program"
    assert verification.max_abs_error == float("inf")
    assert "raised ZeroDivisionError: here" in str(verification)


def test_what_runs_stock_is_right_and_says_why():
    class Own(keras.layers.Layer):
        def call(self, x):
            return x + 1

    verification = keras_turbo.verify(Own(name="own"), normal(2, 3))
    assert verification.ok
    (row,) = verification.rows
    assert (row.name, row.kind) == ("own", "stock")
    inputs = keras.Input((3,))
    verification = keras_turbo.verify(
        keras.Model(inputs, Own(name="own")(keras.layers.Dense(3)(inputs))), normal(2, 3)
    )
    assert verification.ok
    assert [(r.name, r.detail) for r in verification.rows if r.kind == "stock"] == [
        ("own", "NO_RULE")
    ]
    assert "stock own: NO_RULE" in str(verification)


def test_an_error_of_stock_keras_comes_through():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Embedding(4, 2)])
    snapshot = Snapshot(model)
    with pytest.raises(IndexError):
        keras_turbo.verify(model, np.full((1, 3), 99))
    assert all(a is b for a, b in zip(snapshot.values, snapshot.current(), strict=True))


def random_numbers():
    return (
        random.random(),
        float(np.random.random()),
        torch.rand(()).item(),
        float(keras.random.uniform(())),
    )


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_changed(enabled):
    if not enabled:
        keras_turbo.disable()
    model = model_with_everything()
    x = torch.from_numpy(normal(5, 6))
    with keras_turbo.stock():
        y = model(x, training=True)[0]
        y.sum().backward()
    losses = model.losses
    grads = [v.value.grad for v in model.trainable_variables]
    copies = [g.clone() for g in grads]
    values = [v.value for v in model.variables]
    before = [value.detach().clone() for value in values]
    inputs = x.clone()

    keras.utils.set_random_seed(5)
    expected = random_numbers()
    keras.utils.set_random_seed(5)
    keras_turbo.verify(model, x, training=True)
    assert random_numbers() == expected

    assert torch.equal(x, inputs)
    assert not x.requires_grad
    assert x.grad is None
    for variable, value, old in zip(model.variables, values, before, strict=True):
        assert variable.value is value
        assert torch.equal(value, old)
    for weight, grad, copy in zip(model.trainable_variables, grads, copies, strict=True):
        assert weight.value.grad is grad
        assert torch.equal(grad, copy)
    assert len(model.losses) == len(losses)
    assert keras_turbo.is_enabled() is enabled


def test_a_backward_pass_that_is_still_to_come_stays_valid():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    with keras_turbo.stock():
        y = model(torch.from_numpy(normal(2, 4)))
    keras_turbo.verify(model, normal(2, 4))
    y.sum().backward()


def test_plain_attributes_that_a_call_writes_are_put_back():
    class Counting(keras.layers.Layer):
        calls = 0

        def call(self, x):
            self.calls += 1
            return x * 2.0

    inputs = keras.Input((4,))
    layer = Counting(name="counting")
    model = keras.Model(inputs, layer(keras.layers.Dense(4)(inputs)))
    before = layer.calls
    keras_turbo.verify(model, normal(2, 4))
    assert layer.calls == before
