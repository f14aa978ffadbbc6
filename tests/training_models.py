"""Small models and data for the tests of training, and the comparison of two trainings.

Targets are functions of the inputs plus noise, so that no gradient is near zero: where one
is, an adaptive optimizer turns the last bit of it into a full step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch
from keras import layers

import keras_turbo

TOLERANCE = 1e-5


def features(n: int = 80, d: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and regression targets."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(d, 1))) + rng.normal(size=(n, 1)) * 0.3
    return x, y.astype("float32")


def classes(n: int = 80, d: int = 6, k: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and class numbers."""
    x, _ = features(n, d)
    rng = np.random.default_rng(1)
    return x, np.argmax(x @ rng.normal(size=(d, k)) + rng.normal(size=(n, k)), 1)


def images(n: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(n, 8, 8, 2)).astype("float32")
    return x, (x.mean((1, 2, 3)) + rng.normal(size=n) * 0.1 > 0).astype("int64")


def tokens(n: int = 48, length: int = 9, vocabulary: int = 11) -> tuple[np.ndarray, np.ndarray]:
    """Token numbers, padded with 0 at the end, and the number that follows each."""
    rng = np.random.default_rng(3)
    x = rng.integers(1, vocabulary, (n, length))
    y = (x * 3 + rng.integers(0, 2, x.shape)) % vocabulary
    x[np.arange(length) >= rng.integers(3, length + 1, (n, 1))] = 0
    return x.astype("int32"), y.astype("int32")


def mlp(outputs: int = 1, **how: Any) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", **how),
            layers.Dense(8, activation="tanh", **how),
            layers.Dense(outputs, **how),
        ]
    )


def cnn() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(8, activation="tanh"),
            layers.Dropout(0.2, seed=6),
            layers.Dense(2, activation="softmax"),
        ]
    )


def transformer(vocabulary: int = 11, length: int = 9, width: int = 8) -> keras.Model:
    ids = keras.Input((length,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(ids), axis=1) - 1
    x = layers.Embedding(vocabulary, width)(ids) + layers.Embedding(length, width)(positions)
    normal = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(2, 4)
    x = x + attention(normal, normal, use_causal_mask=True)
    hidden = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(width)(hidden)
    return keras.Model(ids, layers.Dense(vocabulary)(x))


def lstm() -> keras.Model:
    penalty = keras.regularizers.L2(1e-3)
    return keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            layers.Embedding(11, 6),
            layers.LSTM(5, kernel_regularizer=penalty, recurrent_regularizer=penalty),
            layers.Dense(3, kernel_regularizer=penalty),
        ]
    )


def masked_text(vocabulary: int = 11) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            layers.Embedding(vocabulary, 6, mask_zero=True),
            layers.Dense(8, activation="tanh"),
            layers.Dense(vocabulary),
        ]
    )


def two_outputs() -> keras.Model:
    inputs = keras.Input((6,))
    x = layers.Dense(8, activation="tanh")(inputs)
    return keras.Model(inputs, [layers.Dense(1, name="value")(x), layers.Dense(3, name="kind")(x)])


def side(stock: bool) -> Any:
    """A block that runs stock Keras, or one that does nothing."""
    return keras_turbo.stock() if stock else contextlib.nullcontext()


def state(model: keras.Model) -> dict[str, np.ndarray]:
    """Every variable of a model and of its optimizer, by place."""
    found = list(model.variables) + list(model.metrics_variables)
    if model.optimizer is not None:
        found += model.optimizer.variables
    return {f"{i} {v.path}": v.value.detach().numpy().copy() for i, v in enumerate(found)}


def gradients(model: keras.Model) -> list[torch.Tensor | None]:
    return [v.value.grad for v in model.variables]


def trained_twice(
    make: Callable[[], keras.Model], train: Callable[[keras.Model], Any], seed: int = 11
) -> tuple[keras.Model, keras.Model, Any]:
    """Train under turbo and under stock Keras from one seed and assert that all is the same.

    Returns:
        The model under turbo, the stock one, and what training it returned.
    """
    results = []
    for stock in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed)
        with side(stock):
            model = make()
            results.append((model, plain(train(model)), state(model)))
    (turbo, got, got_state), (reference, want, want_state) = results
    assert_same(got, want)
    assert_same(got_state, {**want_state}, "variable")
    return turbo, reference, want


def plain(item: Any) -> Any:
    """A result of training as plain values: a history as its dict."""
    return item.history if isinstance(item, keras.callbacks.History) else item


def assert_same(got: Any, want: Any, what: str = "result", limit: float = TOLERANCE) -> None:
    """Assert that nested results agree, floats within the design's tolerance."""
    if isinstance(want, dict):
        left, right = list(got), list(want)
        if what == "variable":
            assert len(left) == len(right)
        else:
            assert left == right, f"{what}: {left} instead of {right}"
        for a, b in zip(left, right, strict=True):
            assert_same(got[a], want[b], f"{what} {b}", limit)
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), what
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{what}[{i}]", limit)
    elif want is None or isinstance(want, str):
        assert got == want, what
    else:
        if isinstance(want, (int, float)):
            assert type(got) is type(want), f"{what}: {type(got)} instead of {type(want)}"
        a, b = np.asarray(got), np.asarray(want)
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype}"
        if not a.size:
            return
        assert (np.isfinite(a) == np.isfinite(b)).all(), f"{what}: other non-finite places"
        a, b = np.nan_to_num(a).astype("float64"), np.nan_to_num(b).astype("float64")
        error = np.abs(a - b).max() / max(1.0, np.abs(b).max())
        assert error <= limit, f"{what}: {error:.3g} beyond {limit:g}"


def assert_lowered(model: keras.Model, *, apart: bool = False, test: bool | None = None) -> None:
    """Assert that a model's steps were lowered, with the metrics in the program or apart."""
    cache = model.__dict__["_keras_turbo_steps"]
    assert not cache.declined, cache.declined
    modes = (True, False) if test is None else ((False,) if test else (True,))
    found = [entry for mode in modes for entry in cache.entries[mode]]
    assert found and cache.programs
    assert all(is_apart is apart for _, is_apart, _ in found)
