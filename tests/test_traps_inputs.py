"""Traps 11, 12, 16 and 17: inputs that are not plain float32 tensors, and aliases.

Each test compares with stock Keras and, where the right answer is known without Keras,
with that answer.
"""

from __future__ import annotations

import keras
import pytest
import torch
from keras import layers, ops

import keras_turbo
from tests.cases import randomize
from tests.compare import (
    MODEL_TOLERANCE,
    agree,
    assert_lowered,
    assert_same,
    both,
    close,
    limits,
    observe,
    programs,
)

DTYPES = ["int8", "int16", "int32", "int64", "uint8", "bool", "float16", "bfloat16", "float64"]


def x(*shape):
    return torch.randn(shape)


def of(dtype, *shape):
    dtype = getattr(torch, dtype)
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    values = x(*shape) if dtype.is_floating_point else torch.randint(1, 9, shape)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_11_inputs_of_another_dtype(dtype):
    """The kernel is never cast to the input's dtype, which would truncate it to zeros."""
    layer = layers.Dense(6, use_bias=False)
    layer.build((None, 5))
    inputs = of(dtype, 3, 5)
    got = agree(layer, inputs, tolerance=limits(MODEL_TOLERANCE, torch.float32))
    assert got.dtype == torch.float32
    close(got, inputs.float() @ layer.kernel.value.detach(), tolerance=MODEL_TOLERANCE)
    assert_lowered(layer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_11_inputs_of_another_dtype_to_a_model(dtype):
    """A Functional model casts to the dtypes that it declares."""
    entry, image = keras.Input((5,)), keras.Input((4,), dtype="uint8")
    model = keras.Model(
        [entry, image], layers.Dense(3)(layers.concatenate([entry, layers.Rescaling(0.1)(image)]))
    )
    agree(model, [of(dtype, 3, 5), of(dtype, 3, 4)])
    assert_lowered(model)


@pytest.mark.parametrize("operation", ["matmul", "einsum"])
def test_11_int8_products_are_int32(operation):
    a, b = (keras.Input((4, 4), dtype="int8") for _ in range(2))
    product = ops.matmul(a, b) if operation == "matmul" else ops.einsum("bij,bjk->bik", a, b)
    model = keras.Model([a, b], product)
    inputs = [torch.randint(-128, 127, (3, 4, 4), dtype=torch.int8) for _ in range(2)]
    got = agree(model, inputs)
    assert got.dtype == torch.int32 and got.abs().max() > 127
    assert_lowered(model)


@keras.saving.register_keras_serializable("tests")
class Scale(layers.Layer):
    """A custom layer: no rule, so a stock node inside a program."""

    def build(self, shape):
        self.factor = self.add_weight(shape=shape[-1:], initializer="random_normal")

    def call(self, inputs):
        self.seen = (inputs.dtype, ops.convert_to_tensor(self.factor).dtype)
        return inputs * self.factor


@pytest.mark.allow_fallback("NO_RULE")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_12_a_mixed_precision_model(policy):
    keras.config.set_dtype_policy(policy)
    scale = Scale()
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="tanh"),
            scale,
            layers.Dense(6, dtype="float32"),
            layers.LayerNormalization(),
            layers.Dense(3),
        ]
    )
    randomize(model)
    half = getattr(torch, policy[6:])
    got = agree(model, x(3, 5), tolerance=limits(MODEL_TOLERANCE, half))
    assert got.dtype == half
    assert scale.seen == (half, half)
    assert all(v.value.dtype == torch.float32 for v in model.variables)
    assert programs(model)[0].stock_calls == 1


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_12_int64_into_a_mixed_dense(policy):
    layer = layers.Dense(6, dtype=policy)
    layer.build((None, 5))
    got = agree(layer, of("int64", 3, 5))
    assert str(got.dtype) == f"torch.{policy[6:]}"


ALIASES = {
    "activation": lambda: layers.Activation("relu"),
    "tanh": lambda: layers.Activation("tanh"),
    "relu_layer": layers.ReLU,
    "reshape": lambda: layers.Reshape((10,)),
    "flatten": layers.Flatten,
    "identity": layers.Identity,
    "dropout": lambda: layers.Dropout(0.5),
    "linear": lambda: layers.Activation("linear"),
}


@pytest.mark.parametrize("first", ALIASES)
def test_16_the_callers_input_is_unchanged(first):
    """Through every chain of layers that may return a view of its input."""
    entry = keras.Input((2, 5))
    hidden = layers.Activation("relu")(layers.Flatten()(ALIASES[first]()(entry)))
    model = keras.Model(entry, layers.Activation("sigmoid")(hidden + 1.5))
    inputs = x(3, 2, 5)
    kept = inputs.clone()
    for training in (False, True):
        agree(model, inputs, training=training)
        with torch.no_grad():
            model(inputs, training=training)
        assert torch.equal(inputs, kept)
    assert_lowered(model)


@pytest.mark.parametrize("between", [*ALIASES, None])
@pytest.mark.parametrize("source", ["dense", "conv", "input"])
def test_16_a_tensor_before_and_after_its_activation(source, between):
    """In-place operations must not reach a tensor that is an output too."""
    entry = keras.Input((2, 5))
    before = {"dense": layers.Dense(5), "conv": layers.Conv1D(5, 1), "input": layers.Identity()}[
        source
    ](entry)
    hidden = before if between is None else ALIASES[between]()(before)
    after = layers.Activation("relu")(hidden)
    model = keras.Model(entry, [before, after, hidden, layers.Activation("tanh")(after)])
    randomize(model)
    inputs = x(3, 2, 5)
    for training in (False, True):
        agree(model, inputs, training=training)
    with torch.no_grad():
        outputs = model(inputs)
    assert (outputs[0] < 0).any() and (outputs[1] >= 0).all()
    assert_lowered(model)


def test_16_changing_an_output_does_not_change_the_next_call():
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(5), layers.Activation("relu"), layers.Reshape((5, 1))]
    )
    inputs = x(3, 5)
    with torch.no_grad():
        want = model(inputs).clone()
        model(inputs).mul_(0).add_(7.0)
        assert torch.equal(model(inputs), want)
    for variable in model.variables:
        assert not (variable.value == 7).any()


def test_16_an_output_that_is_a_weight_or_a_constant_is_safe():
    entry = keras.Input((3,))
    offset = torch.full((3,), 2.5)
    model = keras.Model(entry, [ops.zeros_like(entry) + offset, entry])
    inputs = x(2, 3)
    with torch.no_grad():
        first = model(inputs)
        kept = first[0].clone()
        first[0].add_(1.0)
        assert torch.equal(model(inputs)[0], kept)
    agree(model, inputs)


NESTED = {
    "dict": lambda a, b: {"left": a, "right": b},
    "list": lambda a, b: [a, b],
    "tuple": lambda a, b: (a, b),
    "nested": lambda a, b: {"left": [a], "rest": (b, {"deep": a})},
}


@pytest.mark.parametrize("structure", NESTED)
def test_17_nested_structures(structure):
    a, b = keras.Input((3,), name="left"), keras.Input((4,), name="right")
    packed = NESTED[structure](a, b)
    if structure == "nested":
        packed["rest"][1]["deep"] = keras.Input((3,))
    flat = keras.tree.flatten(packed)
    joined = layers.Concatenate()(flat)
    model = keras.Model(packed, {"sum": layers.Dense(2)(joined), "raw": [joined, flat[0]]})
    data = NESTED[structure](x(2, 3), x(2, 4))
    agree(model, data)
    assert_lowered(model)
    both(model, (keras.tree.map_structure(lambda t: t.numpy(), data),), tolerance=MODEL_TOLERANCE)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8", "bool", "float16"])
def test_17_numpy_arrays(dtype):
    layer = layers.Dense(4)
    layer.build((None, 5))
    model = keras.Sequential([keras.Input((5,)), layer])
    data = of(dtype, 3, 5).numpy()
    for called in (layer, model):
        agree(called, data)
        assert_lowered(called)


@keras.saving.register_keras_serializable("tests")
class Optional(layers.Layer):
    def call(self, a, b=None):
        return a if b is None else a + b


@pytest.mark.allow_fallback("NO_RULE")
def test_17_an_optional_input_that_is_none():
    a, b = keras.Input((3,)), keras.Input((3,), optional=True)
    model = keras.Model([a, b], layers.Dense(2)(Optional()(a, b)))
    inputs = x(2, 3)
    first = agree(model, [inputs, None])
    second = agree(model, [inputs, x(2, 3)])
    assert not torch.equal(first, second)
    assert torch.equal(agree(model, [inputs, None]), first)


RANKS = {
    "missing axis": (lambda: keras.Input((4, 1)), (3, 4)),
    "missing axis of a vector": (lambda: keras.Input((1,)), (3,)),
    "axis too many": (lambda: keras.Input((4,)), (3, 4, 1)),
    "two axes too many": (lambda: keras.Input((4,)), (3, 4, 1, 1)),
}


@pytest.mark.allow_fallback("SHAPE")
@pytest.mark.parametrize("what", RANKS)
def test_17_a_rank_off_by_one(what):
    """Keras squeezes or expands an axis of size one, and refuses anything else."""
    make, shape = RANKS[what]
    entry = make()
    model = keras.Model(entry, layers.Dense(2)(entry))
    model(x(3, *entry.shape[1:]))
    both(model, (x(*shape),), tolerance=MODEL_TOLERANCE)


def test_17_non_contiguous_and_empty_inputs():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            layers.Conv2D(4, 3, padding="same"),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    for inputs in (
        x(3, 6, 6, 3).transpose(1, 2),
        x(6, 6, 6, 3)[::2],
        x(3, 3, 6, 6).permute(0, 2, 3, 1),
        x(1, 6, 6, 3).expand(3, 6, 6, 3),
        x(3, 6, 6, 1).expand(3, 6, 6, 3),
        x(0, 6, 6, 3),
    ):
        agree(model, inputs)
    assert_lowered(model)


def test_17_extra_keyword_arguments():
    keras_turbo.enable("on")
    layer = layers.Dense(2)
    layer.build((None, 3))
    inputs = x(2, 3)
    agree(layer, inputs, training=None)
    both(layer, (), {"inputs": inputs})
    for call in ({"extra": 1}, {"mask": None}, {"mask": torch.ones(2, dtype=torch.bool)}):
        both(layer, (inputs,), call)


def test_17_a_constant_argument_is_part_of_the_kind():
    layer = layers.MultiHeadAttention(num_heads=2, key_dim=4)
    layer.build((None, None, 8), (None, None, 8))
    query = x(2, 4, 8)
    first = agree(layer, query, query, use_causal_mask=True)
    second = agree(layer, query, query, use_causal_mask=False)
    third = agree(layer, query, query, use_causal_mask=1)
    assert not torch.equal(first, second)
    close(third, first)
    assert_same(observe(layer, (query, query)), observe(layer, (query, query)))
