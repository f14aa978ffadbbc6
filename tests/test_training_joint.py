"""Joint programs: recorded steps give what autograd gives, and step back where only it can.

The same seed is trained with steps recorded and with steps run by autograd, and the two must
agree to the last bit; stock Keras is compared in `test_training_sameness.py`, whose trainings
are long enough to be recorded.
"""

from __future__ import annotations

import gc
import warnings
import weakref

import keras
import numpy as np
import pytest
import torch
from keras import layers

from keras_turbo.training import joint
from tests import training_models as tm

CLASSES = keras.losses.SparseCategoricalCrossentropy


def dropout_cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, padding="same", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.DepthwiseConv2D(3),
            layers.Dropout(0.3, seed=4),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(2),
        ]
    )


def shared():
    inputs = keras.Input((6,))
    dense = layers.Dense(6, activation="gelu")
    x = dense(dense(inputs)) + inputs
    return keras.Model(inputs, layers.Dense(1)(x))


CASES = {
    "mlp": (tm.mlp, "mse", tm.features, {}),
    "weighted": (tm.mlp, "huber", tm.features, {"sample_weight": True}),
    "cnn": (dropout_cnn, CLASSES(from_logits=True), tm.images, {}),
    "transformer": (tm.transformer, CLASSES(from_logits=True), tm.tokens, {}),
    "shared": (shared, "mse", tm.features, {}),
    "bfloat16": (
        lambda: tm.mlp(dtype="mixed_bfloat16"),
        "mse",
        tm.features,
        {},
    ),
}


def trained(case, steps, monkeypatch, record, optimizer="adam"):
    """A model after some steps on one batch, recorded or not, with each step's logs."""
    monkeypatch.setattr(joint, "RECORD_AFTER", 1 if record else 10**6)
    make, loss, data, how = CASES[case]
    keras.utils.set_random_seed(5)
    model = make()
    model.compile(optimizer, loss)
    x, y = (torch.tensor(a[:16]) for a in data())
    weights = torch.rand(16) if how.get("sample_weight") else None
    logs = [model.train_on_batch(x, y, weights) for _ in range(steps)]
    return model, logs


def joints(model):
    return model.__dict__["_keras_turbo_steps"].joints[True].entries


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_are_autograds_to_the_bit(case, monkeypatch, turbo):
    recorded, got = trained(case, 8, monkeypatch, True)
    plain, want = trained(case, 8, monkeypatch, False)
    assert joints(recorded) and not joints(plain)
    np.testing.assert_equal(np.asarray(got), np.asarray(want))
    pairs = zip(tm.state(recorded).values(), tm.state(plain).values(), strict=True)
    for a, b in pairs:
        np.testing.assert_array_equal(a, b)
    for a, b in zip(tm.gradients(recorded), tm.gradients(plain), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a, b) and a.stride() == b.stride()
            assert not a.requires_grad


def test_gradients_share_no_memory(monkeypatch, turbo):
    inputs = keras.Input((4,))
    one, two = layers.Dense(4, name="one"), layers.Dense(4, name="two")
    model = keras.Model(inputs, one(inputs) + two(inputs))
    model.compile("sgd", "mse")
    monkeypatch.setattr(joint, "RECORD_AFTER", 1)
    for _ in range(5):
        model.train_on_batch(torch.randn(8, 4), torch.randn(8, 4))
    assert joints(model)
    places = [v.value.grad.data_ptr() for v in model.trainable_variables]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("kind", ["hook", "post_accumulate"])
def test_hooks_of_parameters_run(kind, monkeypatch, turbo):
    model, _ = trained("mlp", 4, monkeypatch, True)
    assert joints(model)
    seen = []
    parameter = model.trainable_variables[0].value
    if kind == "hook":
        handle = parameter.register_hook(lambda grad: seen.append(1))
    else:
        handle = parameter.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    x, y = (torch.tensor(a[:16]) for a in tm.features())
    model.train_on_batch(x, y)
    assert seen == [1]
    handle.remove()
    model.train_on_batch(x, y)
    assert seen == [1]


def test_inputs_with_gradients_get_them(monkeypatch, turbo):
    model, _ = trained("mlp", 4, monkeypatch, True)
    x, y = (torch.tensor(a[:16]) for a in tm.features())
    x.requires_grad_()
    model.train_step((x, y))
    assert x.grad is not None and x.grad.abs().max() > 0


def test_other_sizes_and_orders_of_batches(monkeypatch, turbo):
    results = []
    for record in (True, False):
        model, _ = trained("mlp", 4, monkeypatch, record)
        x, y = (torch.tensor(a) for a in tm.features())
        for _ in range(3):
            model.train_on_batch(x[:5], y[:5])
            model.train_on_batch(x[:32:2], y[:32:2])
            model.train_on_batch(x.t().contiguous().t()[:16], y[:16])
        results.append(tm.state(model))
    for a, b in zip(results[0].values(), results[1].values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_frozen_layers_stay_frozen(monkeypatch, turbo):
    results = []
    for record in (True, False):
        model, _ = trained("mlp", 4, monkeypatch, record, "sgd")
        model.layers[0].trainable = False
        before = model.layers[0].kernel.numpy()
        x, y = (torch.tensor(a[:16]) for a in tm.features())
        for _ in range(4):
            model.train_on_batch(x, y)
        np.testing.assert_array_equal(before, model.layers[0].kernel.numpy())
        assert model.layers[1].kernel.value.grad is not None
        results.append(tm.state(model))
    for a, b in zip(results[0].values(), results[1].values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_that_move(monkeypatch, turbo):
    results = []
    for record in (True, False):
        model, _ = trained("mlp", 4, monkeypatch, record)
        for variable in model.trainable_variables:
            variable.value.data = variable.value.data.clone() + 0.25
        x, y = (torch.tensor(a[:16]) for a in tm.features())
        for _ in range(6):
            model.train_on_batch(x, y)
        assert bool(joints(model)) is record
        results.append(tm.state(model))
    for a, b in zip(results[0].values(), results[1].values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_recording_keeps_no_batch_alive(monkeypatch, turbo):
    model, _ = trained("cnn", 1, monkeypatch, True)
    model.layers[-2].trainable = True
    x, y = (torch.tensor(a[:16]) for a in tm.images())
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            model.train_on_batch(x, y)
        alive = weakref.ref(x)
        del x
        assert alive() is None
    finally:
        gc.enable()
    assert joints(model)


def test_a_step_that_differs_is_not_used(monkeypatch, turbo):
    monkeypatch.setattr(joint, "simplify", wrong)
    with pytest.warns(RuntimeWarning, match="differed from autograd"):
        recorded, got = trained("mlp", 6, monkeypatch, True)
    plain, want = trained("mlp", 6, monkeypatch, False)
    assert not joints(recorded)
    np.testing.assert_array_equal(got, want)
    for a, b in zip(tm.state(recorded).values(), tm.state(plain).values(), strict=True):
        np.testing.assert_array_equal(a, b)


def wrong(graph, constants):
    """A pass that changes a result."""
    node = next(n for n in graph.nodes if "mm" in n.name)
    with graph.inserting_after(node):
        double = graph.call_function(torch.mul, (node, 2.0))
    node.replace_all_uses_with(double, lambda user: user is not double)


def test_steps_with_data_dependent_sizes_stay_with_autograd(monkeypatch, turbo):
    def loss(y, y_pred):
        return torch.mean(torch.square(y - y_pred)[y > 0])

    monkeypatch.setattr(joint, "RECORD_AFTER", 1)
    model = tm.mlp()
    model.compile("sgd", loss)
    for _ in range(5):
        model.train_on_batch(*tm.features(16))
    assert not joints(model)


def test_warnings_at_every_step_stay(monkeypatch, turbo):
    """A mask that ends at a layer is warned of at each call, as by stock Keras."""

    def count(record, stock=False):
        monkeypatch.setattr(joint, "RECORD_AFTER", 1 if record else 10**6)
        with tm.side(stock):
            inputs = keras.Input((9,), dtype="int32")
            x = layers.Embedding(11, 4, mask_zero=True)(inputs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
            model.compile("sgd", "mse")
            ids, _ = tm.tokens(8)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for _ in range(6):
                    model.train_on_batch(ids, np.ones((8, 1), "float32"))
        if not stock:
            assert bool(joints(model)) is record
        return sum("mask attached" in str(w.message) for w in seen)

    assert count(False) == count(False, stock=True)
    # Recording and comparing run the step twice more.
    assert count(True) == count(False) + 2


def test_autocast_of_torch_reaches_autograd(monkeypatch, turbo):
    """Recorded operations have the dtypes of the surroundings they were recorded in."""
    results = []
    for record in (True, False):
        model, _ = trained("mlp", 4, monkeypatch, record)
        x, y = (torch.tensor(a[:16]) for a in tm.features())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(4):
                model.train_on_batch(x, y)
        for _ in range(4):
            model.train_on_batch(x, y)
        assert bool(joints(model)) is record
        results.append(tm.state(model))
    for a, b in zip(results[0].values(), results[1].values(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_under_no_grad_fails_as_before(monkeypatch, turbo):
    model, _ = trained("mlp", 4, monkeypatch, True)
    assert joints(model)
    x, y = (torch.tensor(a[:16]) for a in tm.features())
    before = model.get_weights()
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        model.train_on_batch(x, y)
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_that_begin_to_need_gradients_get_them(monkeypatch, turbo):
    monkeypatch.setattr(joint, "RECORD_AFTER", 1)
    model = tm.mlp()
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    x, y = (torch.tensor(a[:16]) for a in tm.features())
    for _ in range(4):
        model.train_on_batch(x, y)
    assert joints(model)
    kernel = model.layers[0].kernel.value
    assert kernel.grad is None
    kernel.requires_grad_(True)
    model.train_on_batch(x, y)
    assert kernel.grad is not None
