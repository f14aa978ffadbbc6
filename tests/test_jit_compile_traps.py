"""Models with `jit_compile=True` in the company of other features, next to eager stock Keras.

A stand-in for the compiler runs graphs as they are: these tests are about what surrounds it.
"""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest
from keras import layers

from keras_turbo import compat
from tests import training_models as tm


@pytest.fixture(autouse=True)
def compilations(monkeypatch):
    """The graphs that were compiled, by a compiler that runs them as they are."""
    found = []

    def compile_(module, examples, how):
        found.append(module)
        return module

    monkeypatch.setattr(compat, "inductor_compile", compile_)
    return found


def fit(model, **how):
    data = tm.features()
    return model.fit(*data, batch_size=16, epochs=2, verbose=0, **how).history


def predict(model):
    return model.predict(tm.features()[0], batch_size=16, verbose=0)


def evaluate(model, **how):
    return model.evaluate(*tm.features(), batch_size=16, verbose=0, return_dict=True, **how)


def again(model, path):
    return [fit(model), predict(model)]


def saved(model, path):
    first = fit(model)
    model.save(path / "model.keras")
    other = keras.models.load_model(path / "model.keras")
    assert other.jit_compile == model.jit_compile
    return [first, fit(other), predict(other), evaluate(other)]


def copied(model, path):
    found = [fit(model), predict(model)]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        found += [predict(other), fit(other), predict(other), predict(model)]
    return [*found, fit(model), predict(model)]


def weighted(model, path):
    weights = np.random.RandomState(0).rand(80).astype("float32")
    found = [evaluate(model, sample_weight=weights), evaluate(model)]
    return [*found, fit(model, sample_weight=weights), fit(model), evaluate(model)]


def reweighted(model, path):
    found = [fit(model), predict(model)]
    model.set_weights([w + 0.5 for w in model.get_weights()])
    found += [predict(model), evaluate(model), fit(model)]
    model.layers[0].trainable = False
    found += [fit(model), predict(model)]
    model.layers[0].trainable = True
    model.optimizer.learning_rate = 0.02
    return [*found, fit(model)]


def last_batch(model, path):
    x, y = (part[:37] for part in tm.features())
    history = model.fit(x, y, batch_size=16, epochs=5, verbose=0).history
    return [history, model.predict(x, batch_size=16, verbose=0)]


def kept(model, path):
    x, _ = tm.features()
    first = model.predict_on_batch(x[:16])
    before = np.array(first)
    model.predict_on_batch(x[16:32])
    assert np.array_equal(first, before)
    return [first]


@pytest.mark.parametrize(
    "use", [again, saved, copied, weighted, reweighted, last_batch, kept], ids=lambda f: f.__name__
)
def test_uses_of_a_compiled_model(use, turbo, compilations, tmp_path):
    results = []
    for jit in (False, True):
        keras.utils.set_random_seed(3)
        model = tm.mlp()
        model.compile("adam", "mse", metrics=["mae"], weighted_metrics=["mse"], jit_compile=jit)
        with tm.side(stock=not jit):
            results.append((use(model, tmp_path), tm.state(model)))
    (want, want_state), (got, got_state) = results
    tm.assert_same(got, want)
    tm.assert_same(got_state, want_state, "variable")
    assert compilations


OPTIMIZERS = {
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "accumulation_adam": lambda: keras.optimizers.Adam(gradient_accumulation_steps=3),
    "averages": lambda: keras.optimizers.Adam(use_ema=True, clipnorm=0.5, weight_decay=0.01),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers_behind_a_compiled_step(case, turbo, compilations):
    results = []
    for jit in (False, True):
        keras.utils.set_random_seed(3)
        model = tm.mlp()
        model.compile(OPTIMIZERS[case](), "mse", jit_compile=jit)
        with tm.side(stock=not jit):
            history = fit(model)
        results.append((history, tm.state(model), int(model.optimizer.iterations)))
    (want, want_state, steps), (got, got_state, taken) = results
    assert taken == steps
    tm.assert_same(got, want)
    tm.assert_same(got_state, want_state, "variable")
    assert len(compilations) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_an_own_predict_step_beside_a_compiled_training_step(turbo, compilations):
    class Own(keras.Model):
        def predict_step(self, data):
            return super().predict_step(data) * 2

    inputs = keras.Input((6,))
    model = Own(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse", jit_compile=True)
    fit(model)
    assert len(compilations) == 1
    model.make_predict_function()
    # As if `torch.compile` had given up.
    model.predict_function.function = model.predict_function._torchdynamo_orig_callable
    x, _ = tm.features(16)
    with tm.side(stock=True):
        want = 2 * keras.ops.convert_to_numpy(model(x))
    tm.assert_same(model.predict_on_batch(x), want)
