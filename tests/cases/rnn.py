"""Rows of the recurrent layers and their wrappers.

A recurrence hands each step's rounding on to the next, and its gradients sum over all steps:
its rows have the tolerance of a model. Keras's own product of two float64 tensors comes out
as float32, so that whatever is computed cell by cell is float32 inside.
"""

from __future__ import annotations

from typing import Any

from keras import layers

from tests.cases.row import Row, Variant, v, x

_SEQUENCE = x(3, 5, 4)
_STATE = x(3, 6)
_DROPPED = {"dropout": 0.3, "seed": 3}
# The default, an orthogonal matrix, cannot be made in half precision.
_ANY_DTYPE = {"recurrent_initializer": "glorot_uniform"}
_CLIP = x(2, 3, 5, 2)


def _variants(states: int, *more: Variant) -> tuple[Variant, ...]:
    """What can be said of every layer that loops over a cell of 6 units."""

    def of(name: str, **kwargs: Any) -> Variant:
        return v(name, _SEQUENCE, units=6, **_ANY_DTYPE, **kwargs)

    everything = {"return_sequences": True, "return_state": True}
    return (
        of("last"),
        of("sequences", return_sequences=True),
        of("states", **everything),
        of("backwards", go_backwards=True, **everything),
        of("backwards_last", go_backwards=True),
        of("zeros_for_mask", zero_output_for_mask=True, **everything),
        of("initial", **everything, call={"initial_state": [_STATE] * states}),
        of("no_bias", use_bias=False),
        of("relu", activation="relu", return_sequences=True),
        of("unrolled", unroll=True, return_sequences=True),
        of("dropout", **_DROPPED),
        of("recurrent_dropout", recurrent_dropout=0.3, **_DROPPED),
        of("unseeded", dropout=0.4),
        of("all_dropped", dropout=1.0),
        of("regularized", kernel_regularizer="l2", activity_regularizer="l1"),
        *more,
    )


def _gated(states: int, *more: Variant) -> tuple[Variant, ...]:
    def of(name: str, **kwargs: Any) -> Variant:
        return v(name, _SEQUENCE, units=6, **_ANY_DTYPE, **kwargs)

    return _variants(
        states,
        of("cell_by_cell", use_cudnn=False, return_sequences=True),
        of("hard", recurrent_activation="hard_sigmoid", return_state=True),
        of("hard_backwards", recurrent_activation="hard_sigmoid", go_backwards=True),
        of("linear", activation=None, recurrent_activation=None, use_bias=False),
        of("by_gate", implementation=1),
        *more,
    )


def _of_layer(name: str, cls: type, **kwargs: Any) -> Variant:
    return v(name, _SEQUENCE, layer=cls(6, return_sequences=True), **kwargs)


ROWS: tuple[Row, ...] = (
    Row(layers.LSTM, _gated(2), training=True, parts=5, float32_inside=True),
    Row(
        layers.GRU,
        _gated(
            1,
            v(
                "reset_before",
                _SEQUENCE,
                units=6,
                **_ANY_DTYPE,
                reset_after=False,
                return_sequences=True,
            ),
            v(
                "reset_before_hard",
                _SEQUENCE,
                units=6,
                **_ANY_DTYPE,
                reset_after=False,
                use_bias=False,
            ),
        ),
        training=True,
        parts=5,
        float32_inside=True,
    ),
    Row(layers.SimpleRNN, _variants(1), training=True, parts=5, float32_inside=True),
    Row(
        layers.LSTMCell,
        (
            v("plain", x(3, 4), [_STATE, _STATE], units=6, **_ANY_DTYPE),
            v("by_gate", x(3, 4), [_STATE, _STATE], units=6, **_ANY_DTYPE, implementation=1),
            v(
                "relu",
                x(3, 4),
                [_STATE, _STATE],
                units=6,
                **_ANY_DTYPE,
                activation="relu",
                use_bias=False,
            ),
        ),
        masks=False,
        float32_inside=True,
    ),
    Row(
        layers.GRUCell,
        (
            v("plain", x(3, 4), [_STATE], units=6, **_ANY_DTYPE),
            v("reset_before", x(3, 4), [_STATE], units=6, **_ANY_DTYPE, reset_after=False),
            v("by_gate", x(3, 4), [_STATE], units=6, **_ANY_DTYPE, implementation=1),
        ),
        masks=False,
        float32_inside=True,
    ),
    Row(
        layers.SimpleRNNCell,
        (
            v("plain", x(3, 4), [_STATE], units=6, **_ANY_DTYPE),
            v("single", x(3, 4), _STATE, units=6, **_ANY_DTYPE),
        ),
        masks=False,
        float32_inside=True,
    ),
    Row(
        layers.StackedRNNCells,
        (
            v(
                "two",
                x(3, 4),
                [[_STATE, _STATE], [x(3, 5)]],
                cells=[layers.LSTMCell(6), layers.GRUCell(5)],
            ),
        ),
        masks=False,
        float32_inside=True,
        parts=2,
    ),
    Row(
        layers.RNN,
        (
            v("cell", _SEQUENCE, cell=layers.GRUCell(6), return_sequences=True),
            v("states", _SEQUENCE, cell=layers.LSTMCell(6), return_state=True),
            v(
                "cells",
                _SEQUENCE,
                cell=[layers.LSTMCell(6), layers.SimpleRNNCell(5)],
                return_sequences=True,
                return_state=True,
            ),
            v(
                "dropped",
                _SEQUENCE,
                cell=[layers.LSTMCell(6, **_DROPPED), layers.GRUCell(5, **_DROPPED)],
            ),
            v("backwards", _SEQUENCE, cell=layers.SimpleRNNCell(6), go_backwards=True),
        ),
        training=True,
        parts=5,
        float32_inside=True,
    ),
    Row(
        layers.Bidirectional,
        (
            _of_layer("concat", layers.LSTM),
            _of_layer("gru", layers.GRU, merge_mode="sum"),
            _of_layer("both", layers.SimpleRNN, merge_mode=None),
            _of_layer("mean", layers.LSTM, merge_mode="ave"),
            _of_layer("product", layers.GRU, merge_mode="mul"),
            v("last", _SEQUENCE, layer=layers.LSTM(6)),
            v("states", _SEQUENCE, layer=layers.GRU(6, return_state=True)),
            v("dropout", _SEQUENCE, layer=layers.LSTM(6, **_DROPPED)),
        ),
        training=True,
        parts=5,
        float32_inside=True,
    ),
    Row(
        layers.TimeDistributed,
        (
            v("dense", x(3, 4, 5), layer=layers.Dense(6, activation="relu")),
            v("pooling", x(2, 3, 6, 5, 2), layer=layers.MaxPooling2D(2)),
            v("dropout", x(3, 4, 5), layer=layers.Dropout(0.4, seed=3)),
            v("normalization", x(3, 4, 5), layer=layers.BatchNormalization()),
            v("lstm", x(2, 3, 4, 5), layer=layers.LSTM(6)),
        ),
        training=True,
        parts=5,
        float32_inside=True,
    ),
    Row(
        layers.ConvLSTM1D,
        (
            v("plain", _CLIP, filters=3, **_ANY_DTYPE, kernel_size=2),
            v(
                "sequences",
                _CLIP,
                filters=3,
                **_ANY_DTYPE,
                kernel_size=3,
                padding="same",
                return_sequences=True,
                return_state=True,
            ),
            v(
                "dropout",
                _CLIP,
                filters=3,
                **_ANY_DTYPE,
                kernel_size=2,
                recurrent_dropout=0.3,
                **_DROPPED,
            ),
            v("strides", _CLIP, filters=3, **_ANY_DTYPE, kernel_size=2, strides=2, use_bias=False),
        ),
        training=True,
        parts=5,
        float32_inside=True,
    ),
    Row(
        layers.ConvLSTM2D,
        (
            v("plain", x(2, 3, 5, 4, 2), filters=3, **_ANY_DTYPE, kernel_size=2),
            v(
                "first",
                x(2, 3, 2, 5, 4),
                filters=3,
                **_ANY_DTYPE,
                kernel_size=2,
                data_format="channels_first",
                return_sequences=True,
            ),
        ),
        training=True,
        parts=5,
        float32_inside=True,
    ),
    Row(
        layers.ConvLSTM3D,
        (v("plain", x(2, 3, 4, 3, 3, 2), filters=3, **_ANY_DTYPE, kernel_size=2),),
        training=True,
        parts=5,
        float32_inside=True,
    ),
)
