"""Activation functions and `keras.ops` operations as nodes of a Functional model.

Each line of the table is one operation on symbolic tensors; the model around it runs at
several batch sizes and must hold no stock node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import pytest
import torch
from keras import layers, ops

from tests.cases import T, make, x
from tests.compare import assert_lowered, both

FUNCTIONS = {
    name: function
    for name, function in vars(keras.activations).items()
    if inspect.isfunction(function) and name not in ("deserialize", "get", "serialize")
}
THRESHOLD = FUNCTIONS.pop("threshold")  # takes two more arguments
NOT_SYMBOLIC = {"hard_silu", "hard_swish", "mish", "sparsemax"}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_activation(name, dtype):
    """As a layer of its own, inside Dense, and on tensors of several ranks."""
    function = FUNCTIONS[name]
    layer = layers.Activation(function, dtype=dtype)
    for shape in ((3, 6), (2, 3, 6), (1, 1, 2, 6)):
        want = both(layer, make((x(*shape),), dtype=dtype), exact=True, second=True)
        assert want.error is None
    assert_lowered(layer)
    dense = layers.Dense(6, activation=name, dtype=dtype)
    dense.build((None, 4))
    both(dense, make((x(3, 4),), dtype=dtype), exact=True)
    assert_lowered(dense)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activation_as_a_node(name):
    if name in NOT_SYMBOLIC:
        with pytest.raises(ValueError, match="KerasTensor"):
            FUNCTIONS[name](keras.Input((6,)))
    else:
        check(FUNCTIONS[name], x(3, 6))


def test_threshold_as_a_node():
    check(lambda a: THRESHOLD(a, 0.2, 0.1), x(3, 6))


def test_every_activation_is_tried():
    assert len(FUNCTIONS) > 25
    assert "relu" in FUNCTIONS and "softmax" in FUNCTIONS


A = x(3, 4, 6)
B = x(3, 4, 6)
ROW = x(3, 6)
FLAGS = x(3, 4, 6, dtype="bool")
COUNTS = x(3, 4, 6, dtype="int32")

OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[T, ...]]] = {
    "add": (lambda a, b: a + b, (A, B)),
    "add_number": (lambda a: a + 2.5, (A,)),
    "radd": (lambda a: 2.5 + a, (A,)),
    "sub": (lambda a, b: a - b, (A, B)),
    "rsub": (lambda a: 1.5 - a, (A,)),
    "mul": (lambda a, b: a * b, (A, B)),
    "div": (lambda a, b: a / b, (A, B)),
    "rdiv": (lambda a: 1.5 / a, (A,)),
    "pow": (lambda a: a**2, (A,)),
    "neg": (lambda a: -a, (A,)),
    "abs": (abs, (A,)),
    "mod": (lambda a: a % 3, (COUNTS,)),
    "floordiv": (lambda a: a // 3, (COUNTS,)),
    "matmul_operator": (lambda a, b: a @ ops.transpose(b, (0, 2, 1)), (A, B)),
    "compare": (lambda a, b: ops.cast(a > b, "float32"), (A, B)),
    "logic": (lambda a, b: ops.cast((a > 0) & (b > 0) | ~(a < b), "float32"), (A, B)),
    "broadcast": (lambda a, b: a + b[:, None], (A, ROW)),
    "slice_first": (lambda a: a[:, 0], (A,)),
    "slice_range": (lambda a: a[:, 1:3], (A,)),
    "slice_step": (lambda a: a[:, ::2, :-1], (A,)),
    "slice_ellipsis": (lambda a: a[..., 1:], (A,)),
    "slice_new_axis": (lambda a: a[:, None, :, None], (A,)),
    "slice_last": (lambda a: a[:, -1], (A,)),
    "reshape": (lambda a: ops.reshape(a, (-1, 8, 3)), (A,)),
    "reshape_all": (lambda a: ops.reshape(a, (-1, 24)), (A,)),
    "transpose": (lambda a: ops.transpose(a, (0, 2, 1)), (A,)),
    "swapaxes": (lambda a: ops.swapaxes(a, 1, 2), (A,)),
    "moveaxis": (lambda a: ops.moveaxis(a, 1, -1), (A,)),
    "concatenate": (lambda a, b: ops.concatenate([a, b], axis=-1), (A, B)),
    "concatenate_middle": (lambda a, b: ops.concatenate([a, b, a], axis=1), (A, B)),
    "stack": (lambda a, b: ops.stack([a, b], axis=1), (A, B)),
    "split": (lambda a: ops.split(a, 3, axis=-1)[1], (A,)),
    "split_at": (lambda a: ops.split(a, [1, 3], axis=1), (A,)),
    "expand_dims": (lambda a: ops.expand_dims(a, 1), (A,)),
    "squeeze": (lambda a: ops.squeeze(a[:, :1], 1), (A,)),
    "repeat": (lambda a: ops.repeat(a, 2, axis=1), (A,)),
    "tile": (lambda a: ops.tile(a, (1, 2, 1)), (A,)),
    "pad": (lambda a: ops.pad(a, ((0, 0), (1, 2), (0, 0))), (A,)),
    "pad_reflect": (lambda a: ops.pad(a, ((0, 0), (1, 1), (0, 0)), mode="reflect"), (A,)),
    "pad_value": (lambda a: ops.pad(a, ((0, 0), (1, 1), (0, 2)), constant_values=2.5), (A,)),
    "flip": (lambda a: ops.flip(a, axis=1), (A,)),
    "roll": (lambda a: ops.roll(a, 1, axis=1), (A,)),
    "mean": (lambda a: ops.mean(a, axis=1), (A,)),
    "mean_all_but_batch": (lambda a: ops.mean(a, axis=(1, 2), keepdims=True), (A,)),
    "mean_of_integers": (lambda a: ops.mean(a, axis=1), (COUNTS,)),
    "sum": (lambda a: ops.sum(a, axis=-1), (A,)),
    "sum_of_integers": (lambda a: ops.sum(a, axis=-1), (COUNTS,)),
    "max": (lambda a: ops.max(a, axis=1), (A,)),
    "min": (lambda a: ops.min(a, axis=-1, keepdims=True), (A,)),
    "prod": (lambda a: ops.prod(a, axis=-1), (A,)),
    "var": (lambda a: ops.var(a, axis=-1), (A,)),
    "std": (lambda a: ops.std(a, axis=-1), (A,)),
    "any": (lambda a: ops.any(a, axis=1), (FLAGS,)),
    "all": (lambda a: ops.all(a, axis=-1), (FLAGS,)),
    "argmax": (lambda a: ops.argmax(a, axis=-1), (A,)),
    "argsort": (lambda a: ops.argsort(a, axis=-1), (A,)),
    "sort": (lambda a: ops.sort(a, axis=-1), (A,)),
    "top_k": (lambda a: ops.top_k(a, 2), (A,)),
    "cumsum": (lambda a: ops.cumsum(a, axis=1), (A,)),
    "logsumexp": (lambda a: ops.logsumexp(a, axis=-1), (A,)),
    "norm": (lambda a: ops.norm(a, axis=-1), (A,)),
    "normalize": (lambda a: ops.normalize(a, axis=-1), (A,)),
    "relu": (ops.relu, (A,)),
    "relu6": (ops.relu6, (A,)),
    "gelu": (ops.gelu, (A,)),
    "gelu_exact": (lambda a: ops.gelu(a, approximate=False), (A,)),
    "silu": (ops.silu, (A,)),
    "sigmoid": (ops.sigmoid, (A,)),
    "tanh": (ops.tanh, (A,)),
    "softmax": (ops.softmax, (A,)),
    "softmax_axis": (lambda a: ops.softmax(a, axis=1), (A,)),
    "log_softmax": (ops.log_softmax, (A,)),
    "softplus": (ops.softplus, (A,)),
    "elu": (lambda a: ops.elu(a, alpha=0.7), (A,)),
    "leaky_relu": (lambda a: ops.leaky_relu(a, 0.1), (A,)),
    "hard_sigmoid": (ops.hard_sigmoid, (A,)),
    "exp": (ops.exp, (A,)),
    "expm1": (ops.expm1, (A,)),
    "log": (lambda a: ops.log(ops.abs(a) + 1), (A,)),
    "log1p": (lambda a: ops.log1p(ops.square(a)), (A,)),
    "sqrt": (lambda a: ops.sqrt(ops.square(a) + 1), (A,)),
    "rsqrt": (lambda a: ops.rsqrt(ops.square(a) + 1), (A,)),
    "square": (ops.square, (A,)),
    "sin_cos": (lambda a: ops.sin(a) * ops.cos(a), (A,)),
    "erf": (ops.erf, (A,)),
    "floor_ceil": (lambda a: ops.floor(a) + ops.ceil(a) * ops.round(a), (A,)),
    "sign": (ops.sign, (A,)),
    "clip": (lambda a: ops.clip(a, -0.5, 0.7), (A,)),
    "maximum": (ops.maximum, (A, B)),
    "maximum_number": (lambda a: ops.maximum(a, 0.2), (A,)),
    "minimum": (ops.minimum, (A, B)),
    "power": (lambda a: ops.power(ops.abs(a), 1.5), (A,)),
    "subtract": (ops.subtract, (A, B)),
    "divide_no_nan": (ops.divide_no_nan, (A, B)),
    "where": (lambda a, b: ops.where(a > b, a, b), (A, B)),
    "where_number": (lambda a: ops.where(a > 0, a, 0.3), (A,)),
    "logical_and": (lambda a: ops.logical_and(a, ops.logical_not(a)), (FLAGS,)),
    "isnan": (ops.isnan, (A,)),
    "cast_down": (lambda a: ops.cast(a, "float16"), (A,)),
    "cast_int": (lambda a: ops.cast(a * 3, "int32"), (A,)),
    "cast_bool": (lambda a: ops.cast(a, "bool"), (COUNTS,)),
    "stop_gradient": (lambda a, b: ops.stop_gradient(a) * b, (A, B)),
    "matmul": (lambda a, b: ops.matmul(a, ops.transpose(b, (0, 2, 1))), (A, B)),
    "dot": (lambda a, b: ops.dot(a, ops.transpose(b[0])), (A, B)),
    "einsum": (lambda a, b: ops.einsum("bij,bkj->bik", a, b), (A, B)),
    "einsum_one": (lambda a: ops.einsum("bij->bji", a), (A,)),
    "tensordot": (lambda a, b: ops.tensordot(a, ops.transpose(b[0]), axes=1), (A, B)),
    "outer": (lambda a: ops.outer(a[0, 0], a[0, 1]), (A,)),
    "one_hot": (lambda a: ops.one_hot(a, 10), (COUNTS,)),
    "take": (lambda a: ops.take(a, [2, 0], axis=1), (A,)),
    "take_along_axis": (lambda a: ops.take_along_axis(a, ops.argsort(a, axis=1), axis=1), (A,)),
    "zeros_like": (lambda a: ops.zeros_like(a) + a, (A,)),
    "ones_like": (lambda a: ops.ones_like(a) * a, (A,)),
    "full_like": (lambda a: ops.full_like(a, 2.5) * a, (A,)),
    "tril": (ops.tril, (A,)),
    "diagonal": (lambda a: ops.diagonal(a, axis1=1, axis2=2), (A,)),
    "average_pool": (lambda a: ops.average_pool(a, 2, 2), (A,)),
    "max_pool": (lambda a: ops.max_pool(a, 2, 2), (A,)),
    "unstack": (lambda a: ops.unstack(a, axis=1)[2], (A,)),
    "attention": (
        lambda a, b: ops.dot_product_attention(*(ops.reshape(t, (-1, 4, 2, 3)) for t in (a, b, a))),
        (A, B),
    ),
    "attention_causal": (
        lambda a, b: ops.dot_product_attention(
            *(ops.reshape(t, (-1, 4, 2, 3)) for t in (a, b, a)), is_causal=True
        ),
        (A, B),
    ),
}

# Stock makes one fused call here too, but on tensors in another memory order.
INEXACT = {"attention", "attention_causal"}


def check(function, *sources, exact=True):
    entries = [keras.Input(source.shape[1:], dtype=source.dtype) for source in sources]
    model = keras.Model(entries, function(*entries))

    def inputs(batch):
        made = make(list(sources), batch)
        return (made[0] if len(made) == 1 else made,)

    want = both(model, inputs(3), exact=exact, second=True)
    assert want.error is None
    for batch in (1, 2, 0):
        both(model, inputs(batch), exact=exact)
    both(model, inputs(3), exact=exact, grad=False)
    assert_lowered(model)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_as_a_node(name):
    function, sources = OPERATIONS[name]
    check(function, *sources, exact=name not in INEXACT)


def test_a_constant_operand_is_used_at_each_call():
    weights = torch.randn(6)
    entry = keras.Input((4, 6))
    model = keras.Model(entry, entry * weights + ops.convert_to_tensor(weights))
    both(model, make((x(3, 4, 6),)), exact=True)
    assert_lowered(model)
