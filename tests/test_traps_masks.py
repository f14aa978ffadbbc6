"""Traps 13 to 15: masks, attention and batch normalization.

Each test compares with stock Keras and, where the right answer is known without Keras,
with that answer.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

from tests.cases import randomize
from tests.compare import (
    MODEL_TOLERANCE,
    agree,
    assert_lowered,
    both,
    close,
    limits,
    restore,
    snapshot,
)


def x(*shape):
    return torch.randn(shape)


def padded():
    tokens = torch.randint(1, 9, (3, 6))
    tokens[0, 4:] = 0
    tokens[1, 2:] = 0
    return tokens


def classifier(*middle):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int64"),
            layers.Embedding(9, 4, mask_zero=True),
            *middle,
            layers.GlobalAveragePooling1D(),
        ]
    )
    randomize(model)
    return model


def test_13_an_average_skips_padded_steps():
    dense = layers.Dense(4)
    model = classifier(dense, layers.Dropout(0.1))
    tokens = padded()
    got = agree(model, tokens)
    assert_lowered(model)
    table = model.layers[0].embeddings.value.detach()
    steps = table[tokens] @ dense.kernel.value.detach() + dense.bias.value.detach()
    real = (tokens != 0).float()[..., None]
    close(got, (steps * real).sum(1) / real.sum(1))


def test_13_the_mask_lands_on_the_output_of_dense():
    tokens = padded()
    entry = keras.Input((None,), dtype="int64")
    hidden = layers.Dense(4)(layers.Embedding(9, 4, mask_zero=True)(entry))
    model = keras.Model(entry, hidden)
    got = model(tokens)
    assert torch.equal(got._keras_mask, tokens != 0)
    agree(model, tokens)
    assert_lowered(model)


def test_13_losses_and_metrics_ignore_padded_steps(stock):
    tokens, targets = padded(), torch.randint(0, 4, (3, 6))
    entry = keras.Input((None,), dtype="int64")
    hidden = layers.Embedding(9, 4, mask_zero=True)(entry)
    model = keras.Model(entry, layers.Dense(4)(hidden))
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    got = model.evaluate(tokens, targets, verbose=0)
    np.testing.assert_allclose(got, stock(model.evaluate, tokens, targets, verbose=0), rtol=1e-5)
    other = targets.clone()
    other[tokens == 0] = (other[tokens == 0] + 1) % 4
    np.testing.assert_allclose(model.evaluate(tokens, other, verbose=0), got, rtol=1e-6)


def test_13_a_left_padded_lstm():
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int64"),
            layers.Embedding(9, 4, mask_zero=True),
            layers.LSTM(5, return_sequences=True, zero_output_for_mask=True),
        ]
    )
    tokens = torch.randint(1, 9, (2, 6))
    tokens[:, :3] = 0
    got = agree(model, tokens)
    assert not got[:, :3].any()
    close(got[:, 3:], agree(model, tokens[:, 3:]), tolerance=MODEL_TOLERANCE)
    assert_lowered(model)


def test_13_a_mask_set_by_hand():
    layer = layers.GlobalAveragePooling1D()
    layer.build((None, 4, 3))
    inputs = x(2, 4, 3)
    plain = agree(layer, inputs)
    inputs._keras_mask = torch.tensor([[True, True, False, False], [False, True, True, True]])
    masked = agree(layer, inputs)
    assert not torch.equal(plain, masked)
    close(masked[0], inputs[0, :2].mean(0))
    close(agree(layer, inputs, mask=~inputs._keras_mask)[0], inputs[0, 2:].mean(0))
    del inputs._keras_mask
    assert torch.equal(agree(layer, inputs), plain)


def attention(**kwargs):
    layer = layers.MultiHeadAttention(num_heads=2, key_dim=4, **kwargs)
    layer.build((None, None, 8), (None, None, 8))
    randomize(layer)
    return layer


def test_14_a_query_without_an_allowed_key():
    """It sees the mean of all values, not zeros and not NaN."""
    layer = attention()
    query, value = x(1, 3, 8), x(1, 5, 8)
    mask = torch.ones(1, 3, 5, dtype=torch.bool)
    mask[0, 1] = False
    got = agree(layer, query, value, attention_mask=mask)
    assert got.isfinite().all()
    uniform = agree(layer, query, value, attention_mask=torch.zeros(1, 3, 5, dtype=torch.bool))
    close(got[:, 1], uniform[:, 1])
    close(uniform[:, 0], uniform[:, 1])
    agree(layer, query, value, attention_mask=mask, return_attention_scores=True)


def test_14_one_query_and_five_keys_with_a_causal_mask():
    layer = attention()
    query, value = x(1, 1, 8), x(1, 5, 8)
    got = agree(layer, query, value, use_causal_mask=True)
    close(got, agree(layer, query, value[:, :1]))
    assert not torch.allclose(got, agree(layer, query, value))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_14_dropout_scores_and_masks(dropout, scores, causal, training):
    layer = attention(dropout=dropout, seed=3)
    query, value = x(2, 4, 8), x(2, 5, 8)
    call = {
        "return_attention_scores": scores,
        "use_causal_mask": causal,
        "training": training,
    }
    agree(layer, query, value, **call)
    agree(layer, query, value, attention_mask=torch.rand(2, 4, 5) < 0.6, **call)
    query._keras_mask, value._keras_mask = torch.rand(2, 4) < 0.6, torch.rand(2, 5) < 0.6
    agree(layer, query, value, **call)
    agree(layer, query, value, key=x(2, 5, 8), value_mask=torch.rand(2, 5) < 0.6, **call)
    assert_lowered(layer)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_14_grouped_heads(heads):
    query, key = keras.Input((3, 4, 5)), keras.Input((6, heads, 5))
    model = keras.Model([query, key], ops.dot_product_attention(query, key, key))
    agree(model, [x(2, 3, 4, 5), x(2, 6, heads, 5)])
    assert_lowered(model)


@pytest.mark.parametrize("setting", ["enable", "disable"])
def test_14_the_flash_setting(setting):
    before = keras.config.is_flash_attention_enabled()
    try:
        getattr(keras.config, f"{setting}_flash_attention")()
        layer = attention()
        both(layer, (x(2, 4, 8), x(2, 5, 8)), tolerance=MODEL_TOLERANCE)
    finally:
        (keras.config.enable_flash_attention if before else keras.config.disable_flash_attention)()


def batch_normalization(shape, **kwargs):
    layer = layers.BatchNormalization(**kwargs)
    layer.build(shape)
    randomize(layer)
    return layer


def test_15_momentum_is_the_kept_fraction_and_the_variance_is_biased():
    layer = batch_normalization((None, 5), momentum=0.9)
    inputs = x(4, 5)
    mean, variance = layer.moving_mean.value.clone(), layer.moving_variance.value.clone()
    agree(layer, inputs, training=True)
    close(layer.moving_mean.value, 0.9 * mean + 0.1 * inputs.mean(0))
    close(layer.moving_variance.value, 0.9 * variance + 0.1 * inputs.var(0, unbiased=False))
    assert_lowered(layer)


@pytest.mark.parametrize("batch", [1, 0])
@pytest.mark.parametrize("shape", [(5,), (4, 4, 5)])
def test_15_a_batch_of_one_and_an_empty_one(shape, batch):
    layer = batch_normalization((None, *shape))
    agree(layer, x(4, *shape), training=True)
    state = snapshot(layer)
    agree(layer, x(batch, *shape), training=True)
    restore(layer, state)  # an empty batch makes the moving statistics NaN, in stock too
    agree(layer, x(batch, *shape), training=False)


def test_15_a_mask_restricts_the_statistics():
    layer = batch_normalization((None, 4, 5), momentum=0.0)
    inputs = x(3, 4, 5)
    inputs._keras_mask = torch.rand(3, 4) < 0.6
    agree(layer, inputs, training=True)
    close(
        layer.moving_mean.value,
        inputs[inputs._keras_mask].mean(0),
        # Keras divides by the number of real steps plus 1e-7.
        tolerance=MODEL_TOLERANCE,
    )
    assert_lowered(layer)


def test_15_half_precision_inputs_need_float32_statistics():
    layer = batch_normalization((None, 5), dtype="mixed_float16")
    inputs = (300 * x(64, 5)).half()  # squares beyond float16
    got = agree(layer, inputs, training=True, tolerance=limits(MODEL_TOLERANCE, torch.float16))
    assert got.dtype == torch.float16 and got.isfinite().all()
    assert layer.moving_variance.value.isfinite().all()
    assert layer.moving_variance.value.max() > 100
    assert_lowered(layer)
