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
