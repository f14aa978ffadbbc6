"""The Keras models of the workloads, as a user would write them.

`workloads` refers to these functions. Every call builds a new model with random weights;
also those that start as zeros or ones are drawn at random, so that a mistake in any of
them shows.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

# Their signatures admit None for `weights` only in the documentation.
_applications: Any = keras.applications


def mlp(width: int, depth: int) -> Any:
    """A stack of equally wide Dense layers."""
    dense = [layers.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((width,)), *dense])


def cnn() -> Any:
    """Three convolutions, a max pooling, a global average and a classifier."""
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


def transformer(vocabulary: int, width: int, heads: int, depth: int) -> Any:
    """A causal language model of pre-normalized blocks."""
    ids = keras.Input((None,), dtype="int64")
    x = layers.Embedding(vocabulary, width, name="tokens")(ids)
    for i in range(depth):
        y = layers.LayerNormalization(name=f"norm_1_{i}")(x)
        attention = layers.MultiHeadAttention(heads, width // heads, name=f"attention_{i}")
        x = x + attention(y, y, use_causal_mask=True)
        y = layers.LayerNormalization(name=f"norm_2_{i}")(x)
        y = layers.Dense(4 * width, activation="gelu", name=f"up_{i}")(y)
        x = x + layers.Dense(width, name=f"down_{i}")(y)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(ids, layers.Dense(vocabulary, name="head")(x))


def resnet50(pixels: int) -> Any:
    """ResNet50 with logits: a softmax would flatten the differences to be compared."""
    return _applications.ResNet50(
        weights=None, input_shape=(pixels, pixels, 3), classifier_activation=None
    )


def mobilenet_v2(pixels: int) -> Any:
    """MobileNetV2 with logits."""
    return _applications.MobileNetV2(
        weights=None, input_shape=(pixels, pixels, 3), classifier_activation=None
    )


def dense(inputs: int, outputs: int) -> Any:
    """A single Dense layer with a relu."""
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(outputs, activation="relu")])


def einsum_dense(inputs: int, heads: int, size: int) -> Any:
    """A single EinsumDense layer that makes heads, as attention does."""
    layer = layers.EinsumDense("abc,cde->abde", output_shape=(None, heads, size), bias_axes="de")
    return keras.Sequential([keras.Input((None, inputs)), layer])


def conv(inputs: int, outputs: int) -> Any:
    """A single 3x3 convolution with a relu."""
    layer = layers.Conv2D(outputs, 3, padding="same", activation="relu")
    return keras.Sequential([keras.Input((None, None, inputs)), layer])


def layer_norm(width: int) -> Any:
    """A single LayerNormalization."""
    return keras.Sequential([keras.Input((None, width)), layers.LayerNormalization()])


def attention(width: int, heads: int) -> Any:
    """A single causal self-attention."""
    x = keras.Input((None, width))
    return keras.Model(
        x, layers.MultiHeadAttention(heads, width // heads)(x, x, use_causal_mask=True)
    )


def recurrent(kind: str, inputs: int, units: int, depth: int, both: bool) -> Any:
    """A stack of recurrent layers of one kind that return whole sequences."""
    stack: list[Any] = [getattr(layers, kind)(units, return_sequences=True) for _ in range(depth)]
    if both:
        stack = [layers.Bidirectional(layer) for layer in stack]
    return keras.Sequential([keras.Input((None, inputs)), *stack])


def randomise(model: Any, seed: int) -> None:
    """Draw every weight at random that an initializer would make all zeros or all ones."""
    seeds = keras.random.SeedGenerator(seed)
    for variable in model.variables:
        low, high = (0.5, 1.5) if variable.name in ("gamma", "moving_variance") else (-0.1, 0.1)
        if variable.name in ("gamma", "beta", "bias", "moving_mean", "moving_variance"):
            variable.assign(keras.random.uniform(variable.shape, low, high, seed=seeds))
