"""Faults of this package itself: whatever raises inside it, the user gets stock Keras.

An error while a layer or a step is lowered is a fallback with the reason ERROR: strict mode
raises it, the normal mode warns once, and the caller's own arguments go to stock Keras.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import torch
from keras import layers

import keras_turbo
from keras_turbo import barrier, dispatch, guard, program, registry
from keras_turbo.training import body, joint, kernels, steps
from tests.compare import both, programs

STAGES = [
    (dispatch, "kind_of_call"),
    (dispatch, "build"),
    (barrier, "protect"),
    (guard, "compile_entry"),
    (program, "run_passes"),
    (program.emit, "function"),
    (dispatch.check, "comparable"),
]


def breaking(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a bug")


def dense() -> keras.Layer:
    layer = layers.Dense(3, name="victim")
    layer.build((None, 4))
    return layer


@pytest.mark.parametrize(
    ("owner", "name"), STAGES, ids=lambda item: getattr(item, "__name__", item)
)
@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.allow_fallback("ERROR")
def test_an_error_while_lowering_warns_once(owner, name, as_array, monkeypatch, stock):
    layer = dense()
    x = np.random.normal(size=(2, 4)).astype("float32")
    x = x if as_array else torch.from_numpy(x)
    monkeypatch.setattr(owner, name, breaking)
    with pytest.warns(
        RuntimeWarning, match="lowering layer 'victim' failed.*ZeroDivisionError"
    ) as w:
        got = layer(x)
    assert [item.filename for item in w] == [__file__]
    assert torch.equal(got, stock(layer, x))
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)
    assert not programs(layer)
    assert keras_turbo.fallbacks() == {("victim", "ERROR: ZeroDivisionError: a bug"): 2}


@pytest.mark.parametrize(
    ("owner", "name"), STAGES, ids=lambda item: getattr(item, "__name__", item)
)
def test_an_error_while_lowering_raises_in_strict_mode(owner, name, monkeypatch):
    layer = dense()
    monkeypatch.setattr(owner, name, breaking)
    with pytest.raises(keras_turbo.FallbackError, match="ERROR") as caught:
        layer(torch.randn(2, 4))
    assert type(caught.value.__cause__) is ZeroDivisionError


def test_an_error_of_stock_keras_comes_first(monkeypatch):
    layer = dense()
    monkeypatch.setattr(dispatch, "build", breaking)
    with pytest.raises(ValueError, match="incompatible with the layer"):
        layer(torch.randn(2, 5))
    monkeypatch.undo()
    layer(torch.randn(2, 4))
    assert programs(layer)


@pytest.mark.allow_fallback("CONTROL_FLOW")
def test_a_rule_that_raises_is_a_fallback(monkeypatch, stock):
    layer = dense()
    rule = registry.Rule(layers.Dense, breaking)
    monkeypatch.setitem(registry._rules, layers.Dense, rule)
    x = torch.randn(2, 4)
    assert torch.equal(layer(x), stock(layer, x))


@pytest.mark.allow_fallback("ERROR")
def test_the_warning_names_the_line_that_called(monkeypatch):
    for x in (torch.randn(2, 4), np.ones((2, 4), "float32")):
        layer = dense()
        layer(torch.randn(2, 4))
        layer._keras_turbo.entries = (breaking,)
        with pytest.warns(RuntimeWarning, match="program of layer 'victim' failed") as w:
            layer(x)
        assert [item.filename for item in w] == [__file__]


class Marks(layers.Layer):
    """Writes into the arguments it is given, as some preprocessing layers do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True

    def call(self, data, other=None):
        data["images"][...] = 7
        data["seen"] = True
        data["other"] = other
        return data


@pytest.mark.allow_fallback("NO_RULE")
def test_stock_keras_gets_the_callers_own_arguments():
    layer = Marks()
    layer.built = True
    for _ in range(3):
        images, other = np.random.normal(size=(2, 3)), [np.zeros(2)]
        data = {"images": images}
        out = layer(data, other=other)
        assert out is data and data["seen"] and data["other"] is other
        assert data["images"] is images and (images == 7).all()


def arrays() -> dict[str, np.ndarray]:
    return {"a": np.random.normal(size=(2, 4)).astype("float32"), "b": np.ones((2, 4), "float32")}


class Adds(layers.Layer):
    def call(self, data):
        return data["a"] + data["b"]


@pytest.mark.allow_fallback("ERROR")
def test_a_failing_program_leaves_the_arrays_to_stock_keras(monkeypatch):
    registry.trace_call(Adds)
    layer = Adds()
    layer.built = True
    given = []
    stock = dispatch.stock_call

    def spy(layer, *args, **kwargs):
        given.append((args, kwargs))
        return stock(layer, *args, **kwargs)

    layer(arrays())
    assert programs(layer)
    layer._keras_turbo.entries = (breaking,)
    monkeypatch.setattr(dispatch, "stock_call", spy)
    data = arrays()
    with pytest.warns(RuntimeWarning, match="failed"):
        layer(data)
    ((args, kwargs),) = given
    assert args[0] is data and not kwargs
    monkeypatch.delitem(registry._rules, Adds)


def test_arrays_still_run_programs():
    layer = dense()
    x = np.random.normal(size=(2, 4)).astype("float32")
    for _ in range(3):
        assert torch.equal(layer(x), layer(torch.from_numpy(x)))
    assert len(programs(layer)) == 1
    both(layer, (torch.from_numpy(x),))


@pytest.mark.parametrize("kind", ["dict", "list", "inner"])
@pytest.mark.allow_fallback("SIDE_EFFECT")
def test_a_traced_call_that_writes_into_its_arguments_runs_stock(kind, stock, monkeypatch):
    class Writes(layers.Layer):
        def __init__(self):
            super().__init__()
            self._convert_input_args = False

        def call(self, data):
            if kind == "list":
                data.append(data[0] * 2)
                return data[1]
            place = data if kind == "dict" else data["inner"]
            place["x"] = place["x"] * 2
            return place["x"]

    def data():
        x = torch.ones(2, 3)
        return [x] if kind == "list" else {"x": x, "inner": {"x": x}}

    registry.trace_call(Writes)
    layer = Writes()
    layer.built = True
    for _ in range(2):
        got, want = data(), data()
        assert torch.equal(layer(got), stock(layer, want))
        for a, b in zip(keras.tree.flatten(got), keras.tree.flatten(want), strict=True):
            assert torch.equal(a, b)
    monkeypatch.delitem(registry._rules, Writes)


TRAINING_STAGES = [
    (body, "parts"),
    (body, "check"),
    (steps, "kind_of"),
    (steps, "build"),
    (barrier, "protect"),
    (guard, "compile_entry"),
    (program, "run_passes"),
]


def fitted(optimizer="adam") -> tuple[keras.Model, dict]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="victim")], name="model")
    model.compile(optimizer, "mse", metrics=["mae"])
    x, y = np.random.normal(size=(12, 4)), np.random.normal(size=(12, 3))
    history = model.fit(x, y, batch_size=2, epochs=2, verbose=0, validation_data=(x, y)).history
    return model, {**history, "weights": [w.numpy() for w in model.weights]}


def assert_equal_training(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, values in want.items():
        for a, b in zip(got[name], values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("owner", "name"), TRAINING_STAGES, ids=lambda i: getattr(i, "__name__", i)
)
@pytest.mark.filterwarnings("default::RuntimeWarning")
def test_an_error_while_a_step_is_lowered_leaves_training_as_it_is(owner, name, monkeypatch, stock):
    keras_turbo.enable("on")
    _, want = stock(fitted)
    monkeypatch.setattr(owner, name, breaking)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError") as warned:
        _, got = fitted()
    assert sum("step of model 'model'" in str(item.message) for item in warned) == 1
    assert_equal_training(got, want)
    assert ("model", "ERROR: ZeroDivisionError: a bug") in keras_turbo.fallbacks()


@pytest.mark.parametrize(
    ("owner", "name"), TRAINING_STAGES, ids=lambda i: getattr(i, "__name__", i)
)
def test_an_error_while_a_step_is_lowered_raises_in_strict_mode(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, breaking)
    with pytest.raises(keras_turbo.FallbackError, match=r"ERROR.*ZeroDivisionError: a bug"):
        fitted()


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [(kernels, "prepare", "optimizer 'adam"), (joint.Joints, "seen", "recording a step")],
)
def test_errors_around_a_step_leave_training_as_it_is(owner, name, said, monkeypatch, stock):
    keras_turbo.enable("on")
    _, want = stock(fitted)
    monkeypatch.setattr(owner, name, breaking)
    with pytest.warns(RuntimeWarning, match=said):
        _, got = fitted()
    assert_equal_training(got, want)


def test_an_error_of_stock_keras_has_no_context_of_ours(stock):
    layer, other = dense(), dense()
    optimizer = keras.optimizers.SGD()
    optimizer.build(layer.trainable_variables)
    grads = [torch.ones(v.shape) for v in other.trainable_variables]
    model, _ = fitted()
    for function, args in (
        (optimizer.apply, (grads, other.trainable_variables)),
        (layer, (torch.randn(2, 5),)),
        (model.train_on_batch, (np.ones((2, 5)), np.ones((2, 3)))),
    ):
        with pytest.raises(Exception) as want:  # noqa: PT011
            stock(function, *args)
        with pytest.raises(want.type) as got:
            function(*args)
        assert type(got.value.__context__) is type(want.value.__context__)


def test_lowering_leaves_the_warning_filters_alone(monkeypatch):
    changed = []
    monkeypatch.setattr(warnings, "_filters_mutated", lambda: changed.append(1), raising=False)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="gelu"),
            layers.BatchNormalization(),
            layers.Reshape((36, 4)),
            layers.LayerNormalization(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    x, y = np.random.normal(size=(6, 8, 8, 3)), np.eye(3)[[0, 1, 2] * 2]
    changed.clear()
    with torch.no_grad():
        model(torch.randn(2, 8, 8, 3))
    assert programs(model) and not changed
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    assert model._keras_turbo_steps.programs and not changed
