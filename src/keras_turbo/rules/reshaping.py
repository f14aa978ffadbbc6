"""Rules for `keras.layers` reshaping layers; Keras's own code, traced."""

from __future__ import annotations

from keras import layers

from keras_turbo.registry import trace_call

trace_call(
    layers.Cropping1D,
    layers.Cropping2D,
    layers.Cropping3D,
    layers.Flatten,
    layers.Permute,
    layers.RepeatVector,
    layers.Reshape,
    layers.UpSampling1D,
    layers.UpSampling2D,
    layers.UpSampling3D,
    layers.ZeroPadding1D,
    layers.ZeroPadding2D,
    layers.ZeroPadding3D,
)
