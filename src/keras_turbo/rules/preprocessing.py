"""Rules for `keras.layers` preprocessing layers that compute on tensors."""

from __future__ import annotations

from keras import layers

from keras_turbo.registry import trace_call

trace_call(layers.Rescaling)
