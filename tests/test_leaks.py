"""What must not stay behind: inputs and outputs of calls, programs of deleted models, patches.

Traps 24 and 26, and the promise that `disable()` leaves no trace.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import keras
import pytest
import torch
from keras import layers

import keras_turbo
from keras_turbo import patch


def small() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(5),
        ]
    )


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_26_no_call_keeps_its_inputs_or_outputs(training, gradients, without_collector):
    model = small()
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            model(torch.randn(2, 8, 8, 3), training=training)
        kept = []
        for _ in range(1000):
            x = torch.randn(2, 8, 8, 3)
            y = model(x, training=training)
            kept += [weakref.ref(x), weakref.ref(y)]
            del x, y
    assert not any(ref() is not None for ref in kept)


def test_26_a_deleted_model_is_freed():
    model = small()
    model(torch.randn(2, 8, 8, 3))
    gone = [weakref.ref(model), weakref.ref(model._keras_turbo.programs[0])]
    gone += [weakref.ref(variable._value) for variable in model.weights]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in gone)


def test_disable_restores_the_identical_objects():
    keras_turbo.enable()
    rows = patch.ledger()
    keras_turbo.enable()
    assert patch.ledger() == rows
    keras_turbo.disable()
    assert patch.ledger() == ()
    for row in rows:
        assert vars(row.owner).get(row.attribute, patch._ABSENT) is row.original
    first = {(row.owner, row.attribute): row.original for row in rows}
    keras_turbo.enable()
    assert {(row.owner, row.attribute): row.original for row in patch.ledger()} == first


def test_24_one_model_in_eight_threads():
    model = small()
    batches = [torch.randn(1 + i, 8, 8, 3) for i in range(8)]
    with keras_turbo.stock(), torch.no_grad():
        expected = [model(x, training=False) for x in batches]
    wrong: list[int] = []

    def serve(i: int) -> None:
        with torch.no_grad():
            answers = [model(batches[i], training=False) for _ in range(50)]
        if not all(torch.allclose(answer, expected[i], atol=1e-5) for answer in answers):
            wrong.append(i)
        served.append(i)

    served: list[int] = []
    threads = [threading.Thread(target=serve, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(served) == list(range(8))
    assert not wrong


def of_a_class_of_its_own(kind: str) -> weakref.ref:
    """Use a model with a layer whose class is defined in here, and let go of all of it."""
    bases = {
        "rule": layers.Dense,
        "traced": layers.LayerNormalization,
        "method": layers.LeakyReLU,
        "none": layers.Layer,
    }

    class Own(bases[kind]):
        if kind in ("method", "none"):

            def call(self, inputs):
                return inputs * 2

    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(5), Own(3) if kind == "rule" else Own()]
    )
    model.compile("sgd", "mse")
    for training in (False, True):
        with torch.no_grad():
            model(torch.randn(2, 4), training=training)
    model.train_on_batch(torch.randn(2, 4), torch.randn(model.compute_output_shape((2, 4))))
    return weakref.ref(Own)


@pytest.mark.parametrize("kind", ["rule", "traced"])
def test_26_a_class_of_the_users_is_freed(kind):
    gone = of_a_class_of_its_own(kind)
    gc.collect()
    assert gone() is None


@pytest.mark.allow_fallback("NO_RULE", "OVERRIDE")
def test_26_a_class_of_the_users_that_runs_stock_is_freed():
    gone = [of_a_class_of_its_own("none"), of_a_class_of_its_own("method")]
    gc.collect()
    assert not any(ref() is not None for ref in gone)
