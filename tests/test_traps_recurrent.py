"""Traps of recurrent layers: masks of all shapes, kept states, sizes, weights that change.

Each test compares with stock Keras and, where the right answer is known without Keras,
with that answer.
"""

from __future__ import annotations

import keras
import pytest
import torch
from keras import layers

import keras_turbo
from tests.cases import randomize
from tests.compare import MODEL_TOLERANCE, agree, assert_lowered, both, close, programs

KINDS = [layers.LSTM, layers.GRU, layers.SimpleRNN]
over_kinds = pytest.mark.parametrize("kind", KINDS)

MASKS = {
    "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0], [0, 1, 1, 0, 1]],
    "nothing": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
    "nothing_at_all": [[0, 0, 0, 0, 0]] * 3,
}


def built(layer, *shape):
    with keras_turbo.stock(), torch.no_grad():
        layer(torch.randn(*(shape or (3, 5, 4))))
    randomize(layer)
    return layer


def masked(name):
    x = torch.randn(3, 5, 4)
    x._keras_mask = torch.tensor(MASKS[name], dtype=torch.bool)
    return x


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@over_kinds
def test_masks(kind, zeros, backwards, mask):
    how = {"zero_output_for_mask": zeros, "go_backwards": backwards}
    for sequences in (True, False):
        layer = built(kind(6, return_sequences=sequences, return_state=True, **how))
        agree(layer, masked(mask))
        agree(layer, masked(mask), initial_state=None)
        assert_lowered(layer)


@pytest.mark.parametrize("mask", MASKS)
@over_kinds
def test_masks_from_an_initial_state(kind, mask):
    count = 2 if kind is layers.LSTM else 1
    layer = built(kind(6, return_sequences=True, return_state=True))
    mask = torch.tensor(MASKS[mask], dtype=torch.bool)
    states = [torch.randn(3, 6) for _ in range(count)]
    agree(layer, torch.randn(3, 5, 4), mask=mask, initial_state=states)
    assert_lowered(layer)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sequences", [False, True])
@over_kinds
def test_masks_in_both_directions(kind, sequences, mask):
    layer = built(layers.Bidirectional(kind(6, return_sequences=sequences)))
    agree(layer, masked(mask))
    assert_lowered(layer)


@over_kinds
def test_a_masked_step_may_hold_anything(kind):
    """Infinities and NaN at steps that do not count reach neither outputs nor gradients."""
    layer = built(kind(6, return_sequences=True))
    x = masked("holes")
    x.data[~x._keras_mask] = torch.nan
    with torch.no_grad():
        got = layer(x)
        with keras_turbo.stock():
            want = layer(x)
    assert want.isfinite().all()
    close(got, want, tolerance=MODEL_TOLERANCE)


@over_kinds
def test_all_sizes_by_one_program(kind):
    layer = built(kind(6, return_sequences=True))
    for batch, steps in ((3, 5), (1, 1), (2, 1), (1, 7), (0, 4), (4, 9)):
        agree(layer, torch.randn(batch, steps, 4))
    assert len(programs(layer)) == 1


@over_kinds
def test_weights_that_change_between_calls(kind):
    layer = built(kind(6))
    x = torch.randn(3, 5, 4)
    before = agree(layer, x)
    layer.set_weights([w * 0.5 for w in layer.get_weights()])
    after = agree(layer, x)
    assert not torch.allclose(before, after)
    with torch.no_grad():
        layer.cell.kernel.value.copy_(torch.randn(layer.cell.kernel.shape))
    assert not torch.allclose(after, agree(layer, x))
    layer.cell.recurrent_kernel.value.data = torch.randn(layer.cell.recurrent_kernel.shape)
    agree(layer, x)


@over_kinds
def test_attributes_that_change_between_calls(kind):
    layer = built(kind(6, return_sequences=True))
    x = torch.randn(3, 5, 4)
    agree(layer, x)
    layer.cell.activation = keras.activations.relu
    agree(layer, x)
    layer.go_backwards = True
    agree(layer, x)
    layer.return_sequences = False
    assert agree(layer, x).shape == (3, 6)
    assert_lowered(layer)


@pytest.mark.parametrize("how", [{}, {"use_cudnn": False}])
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_kept_states(kind, how, stock):
    layer = built(kind(6, stateful=True, return_sequences=True, **how))
    twin = built(kind(6, stateful=True, return_sequences=True, **how))
    twin.set_weights(layer.get_weights())
    # Building draws states at random too.
    layer.reset_state(), twin.reset_state()
    with torch.no_grad():
        for again in (False, False, True, False):
            if again:
                layer.reset_state(), twin.reset_state()
            x = torch.randn(3, 5, 4)
            close(layer(x), stock(twin, x), tolerance=MODEL_TOLERANCE)
            for a, b in zip(layer.states, twin.states, strict=True):
                close(a.value, b.value, tolerance=MODEL_TOLERANCE)
    assert_lowered(layer)
    with pytest.raises(ValueError, match="batch size"):
        layer(torch.randn(2, 5, 4))


def test_kept_states_in_training(stock):
    layer = built(layers.SimpleRNN(6, stateful=True))
    layer.reset_state()
    twin = built(layers.SimpleRNN(6, stateful=True))
    twin.set_weights(layer.get_weights())
    twin.reset_state()
    for _ in range(2):
        x = torch.randn(3, 5, 4)
        layer(x).sum().backward()
        stock(twin, x).sum().backward()
    for a, b in zip(layer.weights, twin.weights, strict=True):
        close(a.value.grad, b.value.grad, tolerance=MODEL_TOLERANCE)


def test_a_cell_with_a_rule_of_the_users_own():
    class Cell(layers.Layer):
        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.units = self.state_size = units

        def build(self, shape):
            self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

        def call(self, inputs, states):
            output = keras.ops.tanh(keras.ops.matmul(inputs, self.kernel) + states[0])
            return output, [output]

    plain = layers.RNN(Cell(6), return_sequences=True)
    x = torch.randn(3, 5, 4)
    with keras_turbo.stock():
        plain(x)
    with pytest.raises(keras_turbo.FallbackError, match="NO_RULE"):
        plain(x)

    @keras_turbo.rule(Cell)
    def cell(ctx, layer, inputs, states):
        output = torch.tanh(torch.matmul(inputs, ctx.variable(layer.kernel)) + states[0])
        return output, [output]

    layer = built(layers.RNN(Cell(6), return_sequences=True))
    agree(layer, x)
    agree(layer, masked("holes"))
    assert_lowered(layer)


def test_dropout_moves_the_seed_outside_training_too(stock):
    layer = built(layers.LSTM(6, dropout=0.3, recurrent_dropout=0.2, seed=4))
    twin = built(layers.LSTM(6, dropout=0.3, recurrent_dropout=0.2, seed=4))
    twin.set_weights(layer.get_weights())
    for training in (True, False, None, True):
        x = torch.randn(3, 5, 4)
        got, want = layer(x, training=training), stock(twin, x, training=training)
        close(got, want, tolerance=MODEL_TOLERANCE)
        seeds = [v for v in layer.variables if v.path.endswith("seed_generator_state")]
        for a, b in zip(layer.variables, twin.variables, strict=True):
            assert torch.equal(a.value, b.value)
        assert seeds


def test_time_distributed_convolution():
    layer = layers.TimeDistributed(layers.Conv2D(3, 2))
    built(layer, 2, 3, 6, 5, 2)
    for steps in (3, 1, 4):
        agree(layer, torch.randn(2, steps, 6, 5, 2))
    assert_lowered(layer)


def test_an_unrolled_masked_sequence_backwards_is_an_error_of_stock_keras():
    layer = built(layers.SimpleRNN(6, unroll=True, go_backwards=True))
    keras_turbo.enable("on")
    want = both(layer, (masked("left"),))
    assert isinstance(want.error, AttributeError)
