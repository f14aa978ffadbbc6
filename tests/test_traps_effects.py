"""Traps 22, 23, 25, 27 and 28: what a call leaves behind, refuses, or is turned into.

Losses, seed states, errors, symbolic building and export, each next to stock Keras.
"""

from __future__ import annotations

import contextlib
import io

import keras
import pytest
import torch
from keras import layers, ops
from keras.src import backend

import keras_turbo
from tests.cases import randomize
from tests.compare import (
    MODEL_TOLERANCE,
    agree,
    assert_lowered,
    assert_same_error,
    both,
    close,
    programs,
    restore,
    snapshot,
)


def x(*shape):
    return torch.randn(shape)


@keras.saving.register_keras_serializable("tests")
class Penalty(layers.Layer):
    """A custom layer that records a loss."""

    def call(self, inputs):
        self.add_loss(0.1 * ops.sum(ops.square(inputs)))
        return inputs


def regularized():
    shared = layers.Dense(5, activity_regularizer=keras.regularizers.L2(0.3), name="shared")
    entry = keras.Input((5,))
    hidden = layers.Dense(5, kernel_regularizer="l2", activity_regularizer="l1")(entry)
    hidden = layers.ActivityRegularization(l1=0.2)(shared(shared(hidden)))
    model = keras.Model(entry, hidden)
    randomize(model)
    return model


def losses(called, inputs, **call):
    called(inputs, **call)
    return [loss.detach().clone() for loss in called.losses]


def test_22_a_loss_per_use_divided_by_the_batch_size_and_cleared(stock):
    model = regularized()
    for batch in (4, 2, 4):
        inputs = x(batch, 5)
        got, want = losses(model, inputs), stock(losses, model, inputs)
        assert len(got) == len(want) == 5
        for a, b in zip(got, want, strict=True):
            close(a, b)
        both(model, (inputs,), tolerance=MODEL_TOLERANCE)
    assert_lowered(model)
    shared = model.get_layer("shared")
    alone = losses(shared, inputs)
    assert len(alone) == 1
    close(alone[0], 0.3 * shared(inputs).detach().square().sum() / 4)


@pytest.mark.allow_fallback("NO_RULE")
def test_22_losses_of_a_custom_layer_inside(stock):
    entry = keras.Input((5,))
    penalty = Penalty()
    model = keras.Model(entry, penalty(layers.Dense(5, activity_regularizer="l2")(penalty(entry))))
    randomize(model)
    inputs = x(4, 5)
    for _ in range(3):
        got, want = losses(model, inputs), stock(losses, model, inputs)
        assert len(got) == len(want) == 3
        for a, b in zip(got, want, strict=True):
            close(a, b)
    assert programs(model)[0].stock_calls == 2


@pytest.mark.allow_fallback("NO_RULE")
def test_22_losses_of_an_earlier_call_are_cleared_at_the_next():
    """Also when the earlier call was of an inner layer, or ran stock Keras."""
    model = regularized()
    inner = model.get_layer("shared")
    inputs = x(4, 5)
    model(inputs)
    inner(inputs)
    inner(inputs)
    assert len(losses(model, inputs)) == 5
    with keras_turbo.stock():
        inner(inputs)
        model(inputs)
    assert len(losses(model, inputs)) == 5
    penalty = Penalty()
    penalty(inputs)
    penalty(inputs)
    assert len(penalty.losses) == 1


def test_22_a_loss_added_by_hand_is_cleared_by_the_next_call(stock):
    model = keras.Sequential([keras.Input((5,)), layers.Dense(5)])
    inputs = x(4, 5)
    counts = []
    for run in (lambda f, *a: f(*a), stock):
        run(model, inputs)
        model.add_loss(ops.convert_to_tensor(2.0))
        model.layers[0].add_loss(ops.convert_to_tensor(3.0))
        before = len(model.losses)
        run(model, inputs)
        counts.append((before, len(model.losses)))
    assert counts[0] == counts[1] == (2, 0)


def test_22_training_on_activity_losses(stock):
    inputs, targets = x(8, 5), x(8, 5)
    histories = []
    model = regularized()
    state = snapshot(model)
    for run in (lambda f, *a, **k: f(*a, **k), stock):
        restore(model, state)
        model.compile("sgd", "mse")
        history = run(model.fit, inputs, targets, batch_size=4, epochs=2, shuffle=False, verbose=0)
        histories.append(history.history["loss"])
    assert histories[0] == pytest.approx(histories[1], rel=1e-5)
    assert histories[0][0] != histories[0][1]


def test_23_two_layers_with_one_seed_match_call_for_call():
    first, second = layers.Dropout(0.5, seed=1), layers.Dropout(0.5, seed=1)
    for layer in (first, second):
        layer.build((None, 50))
    inputs = x(4, 50)
    seen = []
    for expected in (1, 2):
        a, b = first(inputs, training=True), second(inputs, training=True)
        assert torch.equal(a, b)
        assert first.seed_generator.state.numpy().tolist() == [1, expected]
        seen.append(a)
    assert not torch.equal(*seen)
    agree(first, inputs, training=True)
    assert_lowered(first)


@pytest.mark.parametrize("training", [False, True])
def test_23_the_seed_state_moves_as_in_stock(training, stock):
    def make():
        return keras.Sequential(
            [
                keras.Input((4, 6)),
                layers.Dropout(0.5, seed=3),
                layers.SpatialDropout1D(0.5, seed=4),
                layers.GaussianNoise(0.5, seed=5),
                layers.GaussianDropout(0.5, seed=6),
                layers.Dropout(0.5, noise_shape=(None, 1, 6), seed=7),
            ]
        )

    model, twin = make(), make()
    inputs = x(4, 4, 6)
    for _ in range(3):
        got, want = model(inputs, training=training), stock(twin, inputs, training=training)
        assert torch.equal(got, want)
        for a, b in zip(model.variables, twin.variables, strict=True):
            assert torch.equal(a.value, b.value)
    assert_lowered(model)


def test_23_unseeded_layers_follow_the_global_seed(stock):
    inputs = x(4, 50)
    outputs = []
    for run in (lambda f, *a, **k: f(*a, **k), stock):
        keras.utils.set_random_seed(5)
        noise = [layers.Dropout(0.5), layers.GaussianNoise(1.0), layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((50,)), *noise])
        outputs.append([run(model, inputs, training=True) for _ in range(3)])
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(outputs[0][0], outputs[0][1])


def test_23_a_seed_generator_shared_by_two_layers(stock):
    inputs = x(4, 50)
    outputs = []
    for run in (lambda f, *a, **k: f(*a, **k), stock):
        generator = keras.random.SeedGenerator(9)
        pair = layers.Dropout(0.5), layers.Dropout(0.5)
        for layer in pair:
            layer._tracker.unlock()
            layer.seed_generator = generator
            layer._tracker.lock()
        model = keras.Sequential([keras.Input((50,)), *pair])
        outputs.append([run(model, inputs, training=True) for _ in range(2)])
        outputs[-1].append(generator.state.value.clone())
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.allow_fallback("REMAT")
def test_23_under_remat_as_stock():
    with keras.RematScope(mode="full"):
        layer = layers.Dense(5, activation="tanh")
    layer.build((None, 5))
    inputs = x(4, 5)
    layer(inputs)
    both(layer, (inputs,))
    model = keras.Sequential([keras.Input((5,)), layers.Dense(5), layer])
    both(model, (inputs,))


WRONG = {
    "rank": lambda: ((x(5),), {}),
    "last size": lambda: ((x(4, 6),), {}),
    "structure": lambda: (([x(4, 5), x(4, 5)],), {}),
    "dict": lambda: (({"a": x(4, 5)},), {}),
    "missing": lambda: ((), {}),
    "too many": lambda: ((x(4, 5), 1, 2, 3), {}),
    "none": lambda: ((None,), {}),
    "string": lambda: (("text",), {}),
    "unknown keyword": lambda: ((x(4, 5),), {"nonsense": 1}),
    "object": lambda: ((object(),), {}),
    "twice": lambda: ((x(4, 5),), {"inputs": x(4, 5)}),
    "training text": lambda: ((x(4, 5),), {"training": "yes"}),
    "complex": lambda: ((torch.randn(4, 5, dtype=torch.complex64),), {}),
    "sparse": lambda: ((x(4, 5).to_sparse(),), {}),
    "subclass": lambda: ((x(4, 5).as_subclass(torch.nn.Buffer),), {}),
}


def called():
    layer = layers.Dense(3, activation="tanh")
    layer.build((None, 5))
    model = keras.Sequential([keras.Input((5,)), layer])
    entry = keras.Input((5,), name="a")
    functional = keras.Model({"a": entry}, layer(entry))
    return {"layer": layer, "sequential": model, "functional": functional}


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")  # Keras's, both ways
@pytest.mark.filterwarnings("ignore:.*Casting complex values to real")  # once per process
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("kind", ["layer", "sequential", "functional"])
def test_25_the_same_error_and_then_the_next_call_is_fast(kind, what):
    keras_turbo.enable("on")
    target = called()[kind]
    good = {"a": x(4, 5)} if kind == "functional" else x(4, 5)
    target(good)
    known = programs(target)
    args, call = WRONG[what]()
    outcomes = []
    for scope in (keras_turbo.stock(), contextlib.nullcontext(), contextlib.nullcontext()):
        try:
            with scope:
                outcomes.append(target(*args, **call))
        except Exception as error:  # noqa: BLE001 - compared below
            outcomes.append(error)
    want = outcomes[0]
    for got in outcomes[1:]:
        if isinstance(want, Exception):
            assert_same_error(got, want)
        else:
            close(got, want, tolerance=MODEL_TOLERANCE)
    before = sum(keras_turbo.fallbacks().values())
    assert set(known) <= set(programs(target))
    target(good)
    assert sum(keras_turbo.fallbacks().values()) == before


def test_25_an_unbuilt_layer():
    layer = layers.Dense(3)
    assert layer(x(2, 5)).shape == (2, 3)
    agree(layer, x(2, 5))


def test_25_an_error_inside_the_model_names_the_layer():
    keras_turbo.enable("on")
    entry = keras.Input((None, 5))
    model = keras.Model(entry, layers.Reshape((-1, 4))(layers.Dense(3, name="inner")(entry)))
    model(x(2, 4, 5))
    errors = []
    for scope in (keras_turbo.stock(), contextlib.nullcontext()):
        with scope, pytest.raises(ValueError, match="Reshape") as caught:
            model(x(2, 3, 5))
        errors.append(caught.value)
    assert_same_error(errors[1], errors[0])
    agree(model, x(2, 8, 5))


def test_27_building_over_used_layers():
    dense, norm = layers.Dense(5, activation="relu"), layers.LayerNormalization()
    inputs = x(3, 5)
    direct = norm(dense(inputs))
    direct = norm(dense(inputs))
    entry = keras.Input((5,))
    model = keras.Model(entry, norm(dense(entry)))
    close(agree(model, inputs), direct.detach())
    assert_lowered(model)
    wider = keras.Model(entry, layers.Dense(2)(model(entry)))
    assert agree(wider, inputs).shape == (3, 2)
    assert_lowered(wider)


def test_27_what_keras_says_about_a_model_is_unchanged(stock):
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)]
    )
    agree(model, x(3, 5))

    def said():
        text = io.StringIO()
        model.summary(print_fn=lambda line, **_: text.write(line))
        spec = model.compute_output_spec(keras.KerasTensor((None, 5)))
        return (
            text.getvalue(),
            (spec.shape, spec.dtype),
            model.compute_output_shape((7, 5)),
            model.count_params(),
            model.to_json(),
            [v.path for v in model.variables],
            repr(model),
            len(model.get_config()["layers"]),
        )

    assert said() == stock(said)
    assert "turbo" not in model.to_json()


def test_27_symbolic_calls_during_eager_ones():
    """Keras evaluates a `call` symbolically while a model is built; no program may run there."""
    layer = layers.Dense(3)
    layer(x(2, 5))
    agree(layer, x(2, 5))
    output = layer(keras.Input((5,)))
    assert isinstance(output, keras.KerasTensor) and output.shape == (None, 3)
    spec = backend.compute_output_spec(lambda t: layer(t) * 2, keras.KerasTensor((4, 5)))
    assert spec.shape == (4, 3)
    assert_lowered(layer)


def exportable():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    randomize(model)
    model(x(3, 6))
    model(x(4, 6))
    return model


def test_28_torch_export_keeps_dynamic_dimensions():
    model = exportable().eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    inputs = x(3, 6)
    want = agree(model, inputs)
    exported = torch.export.export(model, (inputs,), dynamic_shapes=(({0: batch},),))
    close(exported.module()(inputs).detach(), want)
    more = x(7, 6)
    close(exported.module()(more).detach(), agree(model, more))
    assert not [n for n in exported.graph.nodes if "keras_turbo" in str(n.target)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is deprecated as a whole
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # about Keras's own branches
def test_28_jit_trace():
    model = exportable().eval()
    inputs, more = x(3, 6), x(7, 6)
    with torch.no_grad():
        traced = torch.jit.trace(model, inputs)
        close(traced(more), model(more), tolerance=MODEL_TOLERANCE)
        with keras_turbo.stock():
            close(traced(more), model(more), tolerance=MODEL_TOLERANCE)
    model.layers[0].kernel.assign(2 * model.layers[0].kernel.value)
    agree(model, inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("training", [False, True])
def test_28_torch_compile_sees_the_program_whole(backend, training):
    model = exportable()
    compiled = torch.compile(lambda t: model(t, training=training), backend=backend, fullgraph=True)
    for batch in (3, 4, 9):
        inputs = x(batch, 6)
        state = snapshot(model)
        got = compiled(inputs).detach()
        after = snapshot(model)
        restore(model, state)
        close(got, agree(model, inputs, training=training), tolerance=MODEL_TOLERANCE)
        for a, b in zip(after, snapshot(model), strict=True):
            close(a, b, tolerance=MODEL_TOLERANCE)
