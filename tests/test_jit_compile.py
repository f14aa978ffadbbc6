"""`jit_compile=True`: compiled steps against eager ones, without Dynamo and without storms.

The compiler takes seconds, so a few models stand for many. Where only the dealings with the
compiler matter, a stand-in takes its place that runs the graph as it is.
"""

from __future__ import annotations

import contextlib
import sys

import keras
import numpy as np
import pytest
import torch
from keras import layers

import keras_turbo
from keras_turbo import compat
from keras_turbo.training import compiled as compiled_steps
from tests import training_models as tm

CLASSES = keras.losses.SparseCategoricalCrossentropy


@pytest.fixture
def compilations(monkeypatch):
    """The graphs that were compiled, by a compiler that runs them as they are."""
    found = []

    def compile_(module, examples, how):
        found.append((module, how))
        return module

    monkeypatch.setattr(compat, "inductor_compile", compile_)
    return found


def both(make, data, loss, optimizer="sgd", epochs=3, **how):
    """Train and use a model eagerly and compiled; assert that all is equal.

    Within 1e-4: a compiler contracts and reorders, and a dozen steps carry that on.
    """
    results = []
    for jit in (False, True):
        keras.utils.set_random_seed(3)
        model = make()
        model.compile(optimizer, loss, jit_compile=jit, **how)
        history = model.fit(
            *data, batch_size=16, epochs=epochs, verbose=0, validation_data=data
        ).history
        outputs = model.predict(data[0], batch_size=16, verbose=0)
        evaluated = model.evaluate(*data, batch_size=16, verbose=0, return_dict=True)
        results.append((history, keras.tree.flatten(outputs), evaluated, tm.state(model)))
    (a, p, e, s), (b, q, f, t) = results
    tm.assert_same(b, a, limit=1e-4)
    tm.assert_same(q, p, limit=1e-4)
    tm.assert_same(f, e, limit=1e-4)
    tm.assert_same(t, s, "variable", limit=1e-4)
    return model


def entries(model):
    steps = model.__dict__["_keras_turbo_steps"].joints
    predict = model.__dict__["_keras_turbo"].compiled["predict"]
    return [joints.entries for joints in (steps[True], steps[False], predict)]


def guide():
    """Integer classes, as in the guide on training."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="relu"),
            layers.Dense(16, activation="relu"),
            layers.Dense(3, activation="softmax"),
        ]
    )


def classifier():
    return keras.Sequential([keras.Input((6,)), layers.Dense(1, activation="sigmoid")])


def static_batch():
    """A convolutional network of one batch size, which predicts an image."""
    inputs = keras.Input(batch_shape=(16, 8, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    return keras.Model(inputs, layers.Conv2D(2, 3, padding="same")(x))


def with_preprocessing():
    """Squeeze-and-excitation behind a rescaling of its own."""
    inputs = keras.Input((8, 8, 2))
    x = layers.Rescaling(1 / 128.0, offset=-1)(inputs)
    x = layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False)(x)
    x = layers.Activation("swish")(layers.BatchNormalization()(x))
    gate = layers.Reshape((1, 1, 4))(layers.GlobalAveragePooling2D()(x))
    gate = layers.Conv2D(4, 1, activation="sigmoid")(gate)
    x = layers.GlobalAveragePooling2D()(layers.multiply([x, gate]))
    return keras.Model(inputs, layers.Dense(2)(x))


def several_outputs():
    inputs = keras.Input((6,))
    x = layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, {"one": layers.Dense(1)(x), "two": layers.Dense(2)(x)})


def dictionary():
    first, second = keras.Input((6,), name="first"), keras.Input((2,), name="second")
    x = layers.Concatenate()([layers.Dense(4, activation="tanh")(first), second])
    return keras.Model({"first": first, "second": second}, layers.Dense(1)(x))


@pytest.mark.parametrize("case", ["seeded_dropout", "guide", "preprocessing"])
def test_compiled_training_is_eager_training(case, turbo):
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()
    if case == "seeded_dropout":
        model = both(tm.cnn, tm.images(), CLASSES(), metrics=["accuracy"])
    elif case == "guide":
        metrics = [keras.metrics.SparseCategoricalAccuracy()]
        model = both(guide, tm.classes(), CLASSES(), "rmsprop", metrics=metrics)
    else:
        model = both(with_preprocessing, tm.images(), CLASSES(from_logits=True))
    assert all(entries(model))
    dynamo = sys.modules.get("torch._dynamo.utils")
    assert dynamo is None or not dynamo.counters["frames"]


def test_a_later_process_finds_compiled_code_on_disk(turbo):
    from torch._dynamo.utils import counters

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.sin.default, (x,)),))
    x = torch.randn(3, 5)
    counters["inductor"].clear()
    (result,) = compat.inductor_compile(torch.fx.GraphModule({}, graph), [x], {})(x)
    torch.testing.assert_close(result, x.sin())
    found = counters["inductor"]
    assert found["fxgraph_cache_miss"] + found["fxgraph_cache_hit"] == 1
    assert not found["fxgraph_cache_bypass"]


@pytest.mark.parametrize("case", ["static_batch", "dictionary", "autoencoder", "masked"])
def test_models_that_torch_compile_stumbles_over(case, turbo, compilations):
    if case == "static_batch":
        x, _ = tm.images()
        model = both(static_batch, (x, x), "mse")
    elif case == "dictionary":
        x, y = tm.features()
        model = both(dictionary, ({"first": x, "second": x[:, :2]}, y), "mse")
    elif case == "autoencoder":
        x, _ = tm.features()
        model = both(lambda: tm.mlp(6), (x, x), "mse", epochs=5)
    else:
        model = both(tm.masked_text, tm.tokens(), CLASSES(from_logits=True))
    assert all(entries(model))
    assert len(compilations) == 3


def test_outputs_keep_their_containers(turbo, compilations):
    x, y = tm.features()
    targets = {"one": y, "two": x[:, :2]}
    model = both(several_outputs, (x, targets), {"one": "mse", "two": "mae"})
    assert all(entries(model))
    outputs = model.predict_on_batch(x[:16])
    assert type(outputs) is dict and list(outputs) == ["one", "two"]
    assert type(model.predict_step(torch.from_numpy(x[:16]))) is dict


def test_shipped_metrics_that_cannot_be_traced_run_behind_a_compiled_step(turbo, compilations):
    x, y = tm.features()
    metrics = ["auc", keras.metrics.Precision(), "mae"]
    model = both(classifier, (x, (y > 0).astype("float32")), "mse", metrics=metrics)
    steps = model.__dict__["_keras_turbo_steps"].joints
    assert [apart for _, apart in steps[True].entries] == [True]
    assert len(compilations) == 3


@pytest.mark.allow_fallback("UNSUPPORTED")
def test_why_a_step_is_not_compiled_is_counted(turbo, compilations):
    inputs = keras.Input((6,))
    outputs = layers.Dense(1, activity_regularizer="l2")(inputs)
    model = keras.Model(inputs, outputs, name="regular")
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(*tm.features(32), batch_size=16, verbose=0)
    why = "UNSUPPORTED: jit_compile: a step with losses recorded on its layers"
    assert keras_turbo.fallbacks()["regular", why] == 1
    assert not compilations


@pytest.mark.parametrize("mode", ["train", "evaluate", "predict"])
def test_compiled_steps_read_live_weights(mode, turbo, compilations):
    """Weights that are replaced, frozen ones too, are those of the next step."""
    x, y = tm.features(16)
    model = tm.mlp()
    model.layers[0].trainable = False
    model.compile("sgd", "mse", jit_compile=True)

    def step(on):
        if mode == "train":
            return on.train_on_batch(x, y)
        return on.test_on_batch(x, y) if mode == "evaluate" else on.predict_on_batch(x)

    for _ in range(3):
        step(model)
    assert len(compilations) == 1
    for layer in model.layers:
        layer.kernel.value.data = layer.kernel.value.data * 3
    other = tm.mlp()
    other.layers[0].trainable = False
    other.set_weights(model.get_weights())
    other.compile("sgd", "mse", jit_compile=False)
    tm.assert_same(step(model), step(other))
    # Another order in memory is another kernel.
    kernel = model.layers[0].kernel.value
    kernel.data = kernel.data.t().contiguous().t() * 2
    other.set_weights(model.get_weights())
    tm.assert_same(step(model), step(other))


@pytest.mark.allow_fallback("NO_RULE")
def test_a_model_with_a_stock_layer_runs_eagerly(turbo, compilations):
    class Own(layers.Layer):
        def call(self, inputs):
            return inputs * 2

    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), Own(name="own"), layers.Dense(1)])
    keras_turbo.enable("on")
    model.compile("sgd", "mse", jit_compile=True)
    x, y = tm.features(32)
    model.fit(x, y, batch_size=16, verbose=0)
    model.predict(x, verbose=0)
    assert not compilations
    (why,) = model.__dict__["_keras_turbo"].compiled["predict"].declined.values()
    assert "own runs stock Keras" in str(why)


def test_nothing_but_a_change_of_the_model_compiles_again(turbo, compilations):
    model = tm.mlp()
    model.compile("sgd", "mse", jit_compile=True)
    x, y = tm.features()

    def train():
        model.fit(x, y, batch_size=16, verbose=0)

    train()
    assert len(compilations) == 1
    model.optimizer.learning_rate = 0.5
    model.set_weights([w + 1 for w in model.get_weights()])
    train()
    model.fit(x[:37], y[:37], batch_size=16, epochs=9, verbose=0)
    model.fit(x, y, batch_size=7, epochs=3, verbose=0)
    assert len(compilations) == 1
    model.layers[0].trainable = False
    model.compile("sgd", "mse", jit_compile=True)
    train()
    assert len(compilations) == 2


def test_the_batch_norm_and_the_loss_are_in_one_graph(turbo, compilations):
    model = tm.cnn()
    model.compile("adam", CLASSES(), metrics=["accuracy"], jit_compile=True)
    model.fit(*tm.images(), batch_size=16, verbose=0)
    ((module, _),) = compilations
    names = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert any("convolution_backward" in name for name in names)
    assert any("nll_loss" in name for name in names)
    assert sum("copy_" in name for name in names) >= 1
    assert not any("Generator" in name or "bernoulli" in name for name in names)


def test_training_goes_on_when_the_compiler_fails(turbo, monkeypatch):
    def fails(*_):
        raise RuntimeError("no C++ compiler\nat all")

    monkeypatch.setattr(compat, "inductor_compile", fails)
    reference = tm.mlp()
    model = keras.models.clone_model(reference)
    model.set_weights(reference.get_weights())
    reference.compile("sgd", "mse")
    model.compile("sgd", "mse", jit_compile=True)
    x, y = tm.features()
    want = reference.fit(x, y, epochs=2, shuffle=False, verbose=0).history
    with pytest.warns(RuntimeWarning, match=r"could not be compiled \(RuntimeError: no C\+\+"):
        got = model.fit(x, y, epochs=2, shuffle=False, verbose=0).history
    tm.assert_same(got, want)


def test_a_wrong_compiler_is_noticed(turbo, monkeypatch):
    def wrong(module, examples, how):
        return lambda *inputs: tuple(
            r * 2 if isinstance(r, torch.Tensor) else r for r in module(*inputs)
        )

    monkeypatch.setattr(compat, "inductor_compile", wrong)
    model = tm.mlp()
    model.compile("sgd", "mse", jit_compile=True)
    reference = keras.models.clone_model(model)
    reference.set_weights(model.get_weights())
    reference.compile("sgd", "mse")
    want = reference.fit(*tm.features(), shuffle=False, verbose=0).history
    with pytest.warns(RuntimeWarning, match="a compiled step differed"):
        got = model.fit(*tm.features(), shuffle=False, verbose=0).history
    tm.assert_same(got, want)
    assert model.__dict__["_keras_turbo_steps"].joints[True].entries


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_a_compiler_need_not_round_between_half_precision_operations(dtype, turbo, monkeypatch):
    """An error that half precision explains is none there, and is noticed in single precision."""

    def coarse(module, examples, how):
        def run(*inputs):
            scaled = lambda r: r * (1 + 4e-3) if r.is_floating_point() else r  # noqa: E731
            return tuple(map(scaled, module(*inputs)))

        return run

    monkeypatch.setattr(compat, "inductor_compile", coarse)
    model = tm.mlp(dtype=dtype)
    model.compile("sgd", "mse", jit_compile=True)
    noticed = pytest.warns(RuntimeWarning, match="a compiled step differed")
    with noticed if dtype == "float32" else contextlib.nullcontext():
        model.fit(*tm.features(), verbose=0)
    assert model.__dict__["_keras_turbo_steps"].joints[True].entries


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_step_of_the_users_own_runs_as_written(turbo):
    calls = []

    class Own(keras.Model):
        def train_step(self, data):
            calls.append(1)
            return super().train_step(data)

    inputs = keras.Input((6,))
    model = Own(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse", jit_compile=True)
    assert model.train_function is None
    model.make_train_function()
    model.train_function.function = model.train_function._torchdynamo_orig_callable
    model.fit(*tm.features(32), batch_size=16, verbose=0)
    assert calls == [1, 1]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_failing_torch_compile_gives_way(turbo):
    from keras_turbo.training.jit import OrEagerly

    def fails(data):
        raise torch._dynamo.exc.Unsupported("cannot be traced")

    step = OrEagerly(fails, lambda data: data + 1)
    with pytest.warns(RuntimeWarning, match=r"torch.compile failed \(Unsupported: cannot"):
        assert step(1) == 2
    assert step(2) == 3


def test_an_error_of_the_users_own_passes_through(turbo):
    from keras_turbo.training.jit import OrEagerly

    def step(data):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        OrEagerly(step, step)(1)


def test_compiling_is_announced_when_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(compiled_steps, "PATIENCE", 0.0)
    with compiled_steps.announced("a step"):
        keras.utils.set_random_seed(0)
        torch.randn(600, 600) @ torch.randn(600, 600)
        for _ in range(1000):
            if "compiling a step" in (text := capsys.readouterr().err):
                break
    assert "keras_turbo: compiling a step ..." in text
    assert "compiled in" in capsys.readouterr().err


def test_mode_and_options_reach_the_compiler(compilations, turbo):
    from keras_turbo import dispatch

    options = dispatch.options
    try:
        keras_turbo.enable("strict", compile={"mode": "max-autotune", "options": {"debug": True}})
        model = tm.mlp()
        model.compile("sgd", "mse", jit_compile=True)
        model.fit(*tm.features(), verbose=0)
    finally:
        keras_turbo.enable(options.mode, options.check)
    ((_, how),) = compilations
    assert how == {"mode": "max-autotune", "options": {"debug": True}}
    with pytest.raises(ValueError, match="got fullgraph"):
        keras_turbo.enable(compile={"fullgraph": True})
    assert np.isfinite(model.predict(tm.features()[0], verbose=0)).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_stock_scope_gets_stock_keras_functions(turbo, compilations):
    import keras_turbo

    model = tm.mlp()
    model.compile("sgd", "mse", jit_compile=True)
    with keras_turbo.stock():
        model.make_train_function()
    assert hasattr(model.train_function, "_torchdynamo_orig_callable")
    model.make_train_function(force=True)
    assert not hasattr(model.train_function, "_torchdynamo_orig_callable")
