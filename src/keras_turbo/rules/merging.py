"""Rules for `keras.layers` merging layers; Keras's own code, traced."""

from __future__ import annotations

from keras import layers

from keras_turbo.registry import trace_call

trace_call(
    layers.Add,
    layers.Average,
    layers.Concatenate,
    layers.Dot,
    layers.Maximum,
    layers.Minimum,
    layers.Multiply,
    layers.Subtract,
)
