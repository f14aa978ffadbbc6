"""Lowering around a user's code that it must try out: nothing of the trial may be seen.

Layers without a rule inside a lowered model, and functions that are called as they are, run
once on meta tensors where their output shape cannot be known otherwise.
"""

from __future__ import annotations

import collections
import random

import keras
import numpy as np
import pytest
import torch
from keras import layers

from tests.compare import programs


class Counts(layers.Layer):
    """Notes each call in every kind of place, and draws from every kind of generator."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.calls = 0
        self.shapes, self.by_count, self.counts = [], {"first": [0]}, set()
        self.order = collections.OrderedDict(a=1, b=2)
        self.recent = collections.deque([torch.ones(2)], maxlen=3)
        self.inner = layers.Dense(4)
        self.numpy = np.random.default_rng(3)
        self.legacy = np.random.RandomState(3)
        self.python = random.Random(3)
        self.torch = torch.Generator().manual_seed(3)
        self.factors = []

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.by_count["first"][0] += 1
        self.by_count[self.calls] = x.dtype
        self.counts.add(self.calls)
        self.order.move_to_end("a")
        self.order[self.calls] = 1
        self.recent.append(self.calls)
        self.inner.mark = self.calls
        self.newly = self.calls
        drawn = [np.random.rand(), random.random(), self.numpy.random(), self.legacy.rand()]
        drawn += [self.python.random(), float(torch.rand(2)[0].cpu().sum()) if x.is_cpu else 0]
        drawn += [float(torch.rand((), generator=self.torch)) if x.is_cpu else 0]
        self.factors.append(drawn)
        return self.inner(x) * drawn[0]

    def seen(self):
        return (
            self.calls,
            list(self.shapes),
            {k: str(v) for k, v in self.by_count.items()},
            set(self.counts),
            list(self.order.items()),
            list(self.recent)[1:],
            (self.inner.mark, self.newly),
            self.factors,
            [self.numpy.random(), self.python.random(), self.legacy.rand()],
            [np.random.rand(), random.random(), float(torch.rand(1))],
        )


def run(make):
    keras.utils.set_random_seed(5)
    counts = Counts(name="counts")
    model = make(counts)
    outputs = [model(torch.ones(n, 4)).detach() for n in (2, 2, 3)]
    return model, outputs, counts.seen()


def functional(counts):
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(2)(counts(layers.Dense(4)(inputs))))


def sequential(counts):
    return keras.Sequential([keras.Input((4,)), layers.Dense(4), counts])


def late(counts):
    return keras.Sequential([layers.Dense(4), counts, layers.Dense(2)])


def fixed(counts):
    inputs = keras.Input(batch_shape=(2, 4))
    model = keras.Model(inputs, counts(inputs))
    return lambda x: model(x[:2])


def nested(counts):
    inputs = keras.Input((4,))
    return keras.Model(inputs, sequential(counts)(layers.Activation("relu")(inputs)))


@pytest.mark.allow_fallback("NO_RULE")
@pytest.mark.parametrize("make", [functional, sequential, late, nested])
def test_a_stock_node_leaves_no_trace_of_its_lowering(make, stock):
    _, want, wanted = stock(run, make)
    model, got, seen = run(make)
    assert programs(model) and programs(model)[0].stock_calls
    assert seen == wanted
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.allow_fallback("NO_RULE")
def test_a_fixed_batch_leaves_no_trace_either(stock):
    assert run(fixed)[2] == stock(run, fixed)[2]


def test_a_function_that_is_called_as_it_is(stock):
    def activation(x):
        return x * float(np.random.rand())

    def go():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation=activation)])
        return [model(torch.ones(2, 4)).detach() for _ in range(3)], np.random.rand()

    want, after = stock(go)
    got, then = go()
    assert after == then
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


@pytest.mark.allow_fallback("NO_RULE")
def test_a_layer_that_tells_its_shape_is_not_tried_at_all():
    calls = []

    class Tells(layers.Layer):
        def call(self, x):
            calls.append(x)
            return x[..., :2]

        def compute_output_shape(self, shape):
            return (*shape[:-1], 2)

    model = keras.Sequential([keras.Input((4,)), layers.Dense(4), Tells(), layers.Dense(2)])
    assert not calls
    model(torch.ones(2, 4))
    assert programs(model) and len(calls) == 1
