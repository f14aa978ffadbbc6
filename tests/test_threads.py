"""Several threads at once: lowering, changes of what is being lowered, and locks of the user's."""

from __future__ import annotations

import threading
import time

import keras
import numpy as np
import pytest
import torch
from keras import layers

import keras_turbo
from keras_turbo import dispatch, registry
from tests.compare import programs


def together(*functions):
    """Run functions in threads of their own; the first error of any of them is raised."""
    errors = []

    def run(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001, raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    if errors:
        raise errors[0]


def dense(units: int = 3) -> keras.Layer:
    layer = layers.Dense(units)
    layer.build((None, 4))
    return layer


def slowly(monkeypatch, owner, name):
    """Let lowering take its time; gives the events that it has begun and may go on."""
    begun, go_on = threading.Event(), threading.Event()
    original = getattr(owner, name)

    def slow(*args, **kwargs):
        begun.set()
        assert go_on.wait(20)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    return begun, go_on


def test_threads_that_meet_lower_once(monkeypatch, stock):
    layer, x = dense(), torch.randn(2, 4)
    want = stock(layer, x)
    barrier_ = threading.Barrier(8)
    build = dispatch.build

    def slow(*args):
        time.sleep(0.05)
        return build(*args)

    monkeypatch.setattr(dispatch, "build", slow)

    def serve():
        barrier_.wait()
        for _ in range(5):
            assert torch.allclose(layer(x), want)

    together(*[serve] * 8)
    layer(x)
    assert len(programs(layer)) == 1
    assert keras_turbo.fallbacks() == {}


def test_a_thread_does_not_wait_for_ever_for_another_that_lowers(monkeypatch, stock):
    monkeypatch.setattr(dispatch, "PATIENCE", 0.05)
    first, second, x = dense(), dense(), torch.randn(2, 4)
    want = stock(second, x)
    begun, go_on = slowly(monkeypatch, dispatch, "build")

    def other():
        assert begun.wait(20)
        assert torch.equal(second(x), want)
        assert not programs(second)
        go_on.set()

    together(lambda: first(x), other)
    assert programs(first)
    second(x)
    assert programs(second)


def test_no_thread_reads_a_parameter_that_is_being_laid_out(stock):
    for _ in range(4):
        model = keras.Sequential(
            [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(5)]
        )
        batches = [torch.randn(1 + i, 8, 8, 3) for i in range(6)]
        want = [stock(model, x).detach() for x in batches]
        start = threading.Barrier(len(batches))

        def serve(i, model=model, batches=batches, want=want, start=start):
            start.wait()
            for _ in range(10):
                assert torch.allclose(model(batches[i]), want[i], atol=1e-5)

        together(*(lambda i=i, serve=serve: serve(i) for i in range(len(batches))))


@pytest.mark.parametrize("name", ["build", "kind_of_call"])
def test_a_write_while_a_layer_is_lowered_is_seen(name, monkeypatch):
    layer, x = layers.LeakyReLU(0.5), -torch.ones(1, 3)
    layer.build((None, 3))
    original = getattr(dispatch, name)
    begun, go_on = threading.Event(), threading.Event()

    def slow(*args, **kwargs):
        result = original(*args, **kwargs)
        begun.set()
        assert go_on.wait(20)
        return result

    monkeypatch.setattr(dispatch, name, slow)

    def write():
        assert begun.wait(20)
        layer.negative_slope = 0.25
        go_on.set()

    together(lambda: layer(x), write)
    assert layer(x).tolist() == [[-0.25] * 3]
    assert programs(layer)


@pytest.mark.parametrize("change", ["trainable", "assigned", "hook", "policy", "unrelated"])
def test_kinds_of_changes_while_a_model_is_lowered(change, monkeypatch, stock):
    layer = dense()
    model = keras.Sequential([keras.Input((4,)), layer, layers.Dropout(0.5)])
    x, seen = torch.randn(2, 4), []
    begun, go_on = slowly(monkeypatch, dispatch, "build")
    keras_turbo.enable("on")

    def write():
        assert begun.wait(20)
        if change == "trainable":
            layer.trainable = False
        elif change == "assigned":
            layer.kernel._value = torch.nn.Parameter(torch.ones(4, 3))
        elif change == "hook":
            layer.register_forward_hook(lambda *_: seen.append(1))
        elif change == "policy":
            layer.dtype_policy = "mixed_bfloat16"
        else:
            keras.Sequential([keras.Input((4,)), layers.Dense(3)])
        go_on.set()

    together(lambda: model(x), write)
    seen.clear()
    got = model(x)
    counted = len(seen)
    want = stock(model, x)
    assert got.dtype == want.dtype and torch.allclose(got.float(), want.float(), atol=1e-2)
    assert counted == len(seen) - counted == (change == "hook")


def test_a_lock_of_the_users_around_calls_and_inside_one(monkeypatch):
    monkeypatch.setattr(dispatch, "PATIENCE", 0.05)
    lock, inside = threading.Lock(), threading.Event()

    class Locked(layers.Layer):
        def call(self, x):
            inside.set()
            with lock:
                return x * 2

    keras_turbo.enable("on")
    model = keras.Sequential([keras.Input((4,)), Locked(), layers.Dense(3)])
    other, x = dense(), torch.randn(2, 4)
    inside.clear()

    def holder():
        with lock:
            started.set()
            assert inside.wait(20)
            for _ in range(3):
                other(x)
                other.units = 3
                other.activation = None

    started = threading.Event()

    def lowers():
        assert started.wait(20)
        model(x)

    together(holder, lowers)


def test_an_attribute_whose_value_has_no_plain_equality():
    class Scales(layers.Layer):
        def __init__(self):
            super().__init__()
            self.factors = (np.ones(3, "float32"), 2.0)

        def call(self, x):
            return x * self.factors[1]

    registry.trace_call(Scales)
    layer, x = Scales(), torch.ones(2, 3)
    layer.built = True
    try:
        layer(x)
        layer.factors = (np.ones(3, "float32"), 2.0)
        layer.factors = (np.zeros(3, "float32"), 3.0)
        assert layer(x).tolist() == [[3.0] * 3] * 2
        layer.factors = (layer.factors[0], -0.0)
        assert torch.signbit(layer(x)).all()
        layer.factors = (layer.factors[0], 0.0)
        assert not torch.signbit(layer(x)).any()
    finally:
        del registry._rules[Scales]
