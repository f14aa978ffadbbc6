"""Rows: programs for calls without gradients against stock Keras, bit for bit where it is."""

from __future__ import annotations

import keras
import pytest
import torch
from keras import layers, ops

import keras_turbo
from tests.cases.row import randomize
from tests.compare import programs


def block(x, width, heads=2):
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
    y = layers.Dense(2 * width, activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(width)(y)


def transformer():
    ids = keras.Input((None,), dtype="int32")
    x = layers.Embedding(7, 8)(ids)
    return keras.Model(ids, layers.Dense(7)(block(block(x, 8), 8)))


def positions():
    ids = keras.Input((5,), dtype="int32")
    table = layers.Embedding(5, 8)(ops.expand_dims(ops.arange(5), 0))
    return keras.Model(ids, block(layers.Embedding(7, 8)(ids) + table, 8))


def read_in_between():
    """Positions that something else reads with all their axes."""
    x = keras.Input((5, 8))
    y = layers.Dense(8, activation="relu")(layers.Dense(8)(x))
    z = layers.Conv1D(8, 3, padding="same")(y) + y
    return keras.Model(x, [layers.Dense(3)(z), y, ops.mean(z, axis=1), ops.transpose(z, (0, 2, 1))])


def four_axes():
    x = keras.Input((3, 4, 8))
    y = layers.Dense(6, activation="silu")(layers.LayerNormalization()(layers.Dense(8)(x)))
    return keras.Model(x, layers.Dense(2, use_bias=False)(y) * 2.0 + 1.0)


def scaled():
    """Operands that are no vector of features: by position, by batch, and a single number."""
    x, gate, scale = keras.Input((5, 8)), keras.Input((5, 1)), keras.Input((1, 8))
    y = layers.Dense(8)(layers.Dense(8)(x))
    return keras.Model([x, gate, scale], layers.Dense(4)(layers.Dense(8)(y * gate) * scale + 2.0))


def embedded_only():
    ids = keras.Input((5,), dtype="int32")
    return keras.Model(ids, layers.GlobalAveragePooling1D()(layers.Embedding(7, 8)(ids)))


def ids(batch, length):
    return torch.randint(-7, 7, (batch, length), dtype=torch.int32)


CASES = {
    "transformer": (transformer, lambda b: ids(b, 6)),
    "positions": (positions, lambda b: ids(b, 5)),
    "read_in_between": (read_in_between, lambda b: torch.randn(b, 5, 8)),
    "four_axes": (four_axes, lambda b: torch.randn(b, 3, 4, 8)),
    "not_contiguous": (four_axes, lambda b: torch.randn(b, 8, 4, 3).transpose(1, 3)),
    "scaled": (
        scaled,
        lambda b: [torch.randn(b, 5, 8), torch.randn(b, 5, 1), torch.randn(b, 1, 8)],
    ),
    "embedded_only": (embedded_only, lambda b: ids(b, 5)),
}


@pytest.mark.parametrize("case", CASES)
def test_without_gradients(case, turbo):
    make, data = CASES[case]
    model = make()
    randomize(model)
    for batch in (3, 1, 4, 0):
        x = data(batch)
        with torch.no_grad():
            got = keras.tree.flatten(model(x))
            again = keras.tree.flatten(model(x))
            with keras_turbo.stock():
                want = keras.tree.flatten(model(x))
        for a, b, c in zip(got, again, want, strict=True):
            assert a.shape == c.shape and a.dtype == c.dtype and torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-5)
    assert programs(model)


def test_products_of_positions_are_products_of_matrices(turbo):
    model = transformer()
    with torch.no_grad():
        model(ids(2, 6))
    (program,) = programs(model)
    names = program.run_without_gradients.__code__.co_names
    assert {"torch_mm", "torch_addmm"} <= set(names)
    assert not {"torch_matmul", "torch_linear", "torch_unflatten"} & set(names)
    assert "torch_matmul" in program.run.__code__.co_names


def test_results_are_the_callers_own(turbo):
    """No output shares memory with another output or with the next call's."""
    model = read_in_between()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        first = [t.clone() for t in model(x)]
        for output in model(x):
            output.add_(1.0)
        second = model(x)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)
