"""Rules for `keras.layers` normalization layers."""

from __future__ import annotations

from keras import layers

from keras_turbo.registry import trace_call

trace_call(
    layers.BatchNormalization,
    layers.GroupNormalization,
    layers.LayerNormalization,
    layers.RMSNormalization,
    layers.UnitNormalization,
)
