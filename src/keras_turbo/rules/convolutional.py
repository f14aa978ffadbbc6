"""Rules for `keras.layers` convolutions."""

from __future__ import annotations

from keras import layers

from keras_turbo.registry import trace_call

trace_call(
    layers.Conv1D,
    layers.Conv2D,
    layers.Conv3D,
    layers.DepthwiseConv1D,
    layers.DepthwiseConv2D,
    layers.SeparableConv1D,
    layers.SeparableConv2D,
)
