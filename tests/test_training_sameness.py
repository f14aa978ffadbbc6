"""Training under turbo gives what stock Keras gives from the same seed: histories and weights."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from keras import layers

from tests import training_models as tm
from tests.training_models import assert_lowered, assert_same, state, trained_twice

MSE = "mse"
CLASSES = keras.losses.SparseCategoricalCrossentropy


def compiled(make, loss, optimizer="sgd", **how):
    def build():
        model = make()
        chosen = keras.optimizers.get(optimizer if isinstance(optimizer, str) else optimizer())
        model.compile(chosen, loss, **how)
        return model

    return build


def fit(x, y, **how):
    how = {"epochs": 4, "batch_size": 16, "verbose": 0, **how}
    return lambda model: model.fit(x, y, **how)


def test_mlp_with_adam():
    model, *_ = trained_twice(compiled(tm.mlp, MSE, "adam", metrics=["mae"]), fit(*tm.features()))
    assert_lowered(model)


def test_cnn_with_batch_normalization_and_seeded_dropout():
    make = compiled(tm.cnn, "sparse_categorical_crossentropy", "adam", metrics=["accuracy"])
    model, *_ = trained_twice(make, fit(*tm.images(), epochs=5))
    assert_lowered(model)


def test_unseeded_dropout_follows_the_global_seed():
    def make():
        return keras.Sequential([keras.Input((6,)), layers.Dropout(0.4), layers.Dense(1)])

    model, *_ = trained_twice(compiled(make, MSE), fit(*tm.features()))
    assert_lowered(model)


def test_causal_transformer():
    x, y = tm.tokens()
    make = compiled(tm.transformer, CLASSES(from_logits=True), "sgd", metrics=["accuracy"])
    model, *_ = trained_twice(make, fit(x, y, epochs=7))
    assert_lowered(model)


def test_lstm_with_l2():
    x, y = tm.tokens()
    make = compiled(tm.lstm, CLASSES(from_logits=True), "adam", metrics=["accuracy"])
    model, *_ = trained_twice(make, fit(x, y[:, 0] % 3, epochs=7))
    assert_lowered(model)


@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_recurrent_text_classifier(kind):
    """Padded tokens, two directions, dropout of units and of states: all in one step."""

    def make():
        stack = [
            layers.Bidirectional(kind(4, return_sequences=True, dropout=0.2, seed=2)),
            kind(5, recurrent_dropout=0.2, seed=3),
        ]
        start = [keras.Input((9,), dtype="int32"), layers.Embedding(11, 6, mask_zero=True)]
        return keras.Sequential([*start, *stack, layers.Dense(3)])

    x, y = tm.tokens()
    model, *_ = trained_twice(
        compiled(make, CLASSES(from_logits=True), "sgd", metrics=["accuracy"]),
        fit(x, y[:, 0] % 3, epochs=7),
    )
    assert_lowered(model)


@pytest.mark.parametrize("loss_weights", [None, [0.3, 2.0]])
@pytest.mark.parametrize("targets", [list, dict])
def test_several_outputs(loss_weights, targets):
    x, value = tm.features()
    _, kind = tm.classes()
    y = [value, kind] if targets is list else {"value": value, "kind": kind}
    loss = [MSE, CLASSES(from_logits=True)]
    if targets is dict:
        loss = dict(zip(y, loss, strict=True))
        loss_weights = loss_weights and dict(zip(y, loss_weights, strict=True))
    make = compiled(
        tm.two_outputs,
        loss,
        "adam",
        loss_weights=loss_weights,
        metrics={"value": ["mae"], "kind": ["accuracy"]},
        weighted_metrics={"value": ["mse"], "kind": []},
    )
    model, *_ = trained_twice(make, fit(x, y))
    assert_lowered(model)


def test_single_output_with_a_loss_weight():
    make = compiled(tm.mlp, MSE, "sgd", loss_weights=[0.25], metrics=["mse"])
    model, *_ = trained_twice(make, fit(*tm.features()))
    assert_lowered(model)


def test_class_weight():
    x, y = tm.classes()
    make = compiled(lambda: tm.mlp(3), CLASSES(from_logits=True), metrics=["accuracy"])
    model, *_ = trained_twice(make, fit(x, y, class_weight={0: 0.5, 1: 2.0, 2: 1.0}))
    assert_lowered(model)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_sample_weight(reduction):
    x, y = tm.features()
    weights = np.random.default_rng(4).uniform(0, 2, len(x)).astype("float32")
    make = compiled(
        tm.mlp,
        keras.losses.MeanSquaredError(reduction=reduction),
        lambda: keras.optimizers.SGD(1e-3),
        metrics=["mae"],
        weighted_metrics=["mae", "mse"],
    )
    model, *_ = trained_twice(make, fit(x, y, sample_weight=weights))
    assert_lowered(model)


def test_sample_weight_for_several_outputs():
    x, value = tm.features()
    _, kind = tm.classes()
    rng = np.random.default_rng(4)
    weights = [rng.uniform(0, 2, len(x)).astype("float32") for _ in range(2)]
    make = compiled(
        tm.two_outputs, [MSE, CLASSES(from_logits=True)], weighted_metrics=[["mae"], ["accuracy"]]
    )
    model, *_ = trained_twice(make, fit(x, [value, kind], sample_weight=weights))
    assert_lowered(model)


def test_masked_steps_count_neither_in_losses_nor_in_metrics():
    x, y = tm.tokens()
    make = compiled(
        tm.masked_text,
        CLASSES(from_logits=True),
        "sgd",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    model, *_ = trained_twice(make, fit(x, y))
    assert_lowered(model)


@pytest.mark.allow_fallback("SIDE_EFFECT")
def test_masks_with_temporal_sample_weights_stay_as_in_stock_keras():
    # Keras multiplies the mask into the batch's own weights, which the metrics then see.
    x, y = tm.tokens()
    weights = np.random.default_rng(5).uniform(0, 1, x.shape).astype("float32")
    make = compiled(tm.masked_text, CLASSES(from_logits=True), weighted_metrics=["accuracy"])
    trained_twice(make, fit(x, y, sample_weight=weights))


def test_temporal_sample_weights():
    x, y = tm.tokens()
    weights = np.random.default_rng(5).uniform(0, 1, x.shape).astype("float32")
    make = compiled(tm.transformer, CLASSES(from_logits=True), weighted_metrics=["accuracy"])
    model, *_ = trained_twice(make, fit(x, y, sample_weight=weights))
    assert_lowered(model)


@pytest.mark.parametrize(
    "penalty", [keras.regularizers.L1(0.01), keras.regularizers.L1L2(0.01, 0.02), "l2"]
)
def test_regularizers_of_weights_and_activity(penalty):
    def make():
        return tm.mlp(kernel_regularizer=penalty, activity_regularizer=penalty)

    model, *_ = trained_twice(compiled(make, MSE, metrics=["mse"]), fit(*tm.features()))
    assert_lowered(model)
    assert len(model.losses) == 6


class Annoyed(keras.layers.Layer):
    """Adds a loss of its own."""

    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.allow_fallback("NO_RULE")
def test_add_loss_of_a_layer():
    def make():
        return keras.Sequential([keras.Input((6,)), layers.Dense(4), Annoyed(), layers.Dense(1)])

    trained_twice(compiled(make, MSE), fit(*tm.features()))


def test_only_additional_losses():
    make = compiled(lambda: tm.mlp(kernel_regularizer="l2", use_bias=False), None)
    model, *_ = trained_twice(make, fit(tm.features()[0], None))
    assert_lowered(model)


OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "rmsprop": keras.optimizers.RMSprop,
    "rmsprop centered": lambda: keras.optimizers.RMSprop(1e-3, momentum=0.5, centered=True),
    "adam": keras.optimizers.Adam,
    "amsgrad": lambda: keras.optimizers.Adam(amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "adamax": keras.optimizers.Adamax,
    "nadam": keras.optimizers.Nadam,
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "lion": keras.optimizers.Lion,
    "ftrl": lambda: keras.optimizers.Ftrl(0.05),
    "lamb": keras.optimizers.Lamb,
    "adafactor": keras.optimizers.Adafactor,
    "muon": keras.optimizers.Muon,
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
    "schedule free": keras.optimizers.ScheduleFreeAdamW,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name):
    def make():
        model = tm.mlp()
        model.compile(OPTIMIZERS[name](), MSE, metrics=["mae"])
        return model

    model, *_ = trained_twice(make, fit(*tm.features()))
    assert_lowered(model)


def test_every_shipped_optimizer_is_tested():
    shipped = {
        item
        for item in vars(keras.optimizers).values()
        if isinstance(item, type) and issubclass(item, keras.optimizers.Optimizer)
    }
    tested = {keras.optimizers.MultiOptimizer}  # below
    tested |= {kind for make in OPTIMIZERS.values() for kind in type(make()).__mro__}
    assert shipped <= tested | {keras.optimizers.Optimizer}


def test_several_optimizers():
    def make():
        model = tm.mlp()
        slow, fast = keras.optimizers.SGD(0.05), keras.optimizers.Adam(1e-2)
        chosen = keras.optimizers.MultiOptimizer(lambda v: fast if "bias" in v.path else slow)
        model.compile(chosen, MSE)
        return model

    model, *_ = trained_twice(make, fit(*tm.features()))
    assert_lowered(model)


def test_evaluate_and_predict():
    x, y = tm.classes(77)
    make = compiled(lambda: tm.mlp(3), CLASSES(from_logits=True), metrics=["accuracy"])
    weights = np.linspace(0.1, 1, len(x)).astype("float32")

    def train(model):
        model.fit(x, y, epochs=1, verbose=0)
        return {
            "dict": model.evaluate(x, y, verbose=0, return_dict=True),
            "list": model.evaluate(x, y, verbose=0, batch_size=10, sample_weight=weights),
            "steps": model.evaluate(x, y, verbose=0, steps=2),
            "predict": model.predict(x, verbose=0),
            "again": model.predict(x, verbose=0, batch_size=9),
        }

    model, *_ = trained_twice(make, train)
    assert_lowered(model)


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_on_batch(convert):
    x, y = map(convert, tm.features())
    weights = convert(np.linspace(0.1, 1, len(x)).astype("float32"))

    def train(model):
        results = []
        for step in range(10):
            rows = slice(step * 7, step * 7 + 7)
            how = {"sample_weight": weights[rows]} if step % 3 == 2 else {}
            results.append(model.train_on_batch(x[rows], y[rows], **how))
            results.append(model.test_on_batch(x[rows], y[rows], return_dict=True, **how))
            results.append(model.predict_on_batch(x[rows]))
        return results

    model, *_ = trained_twice(compiled(tm.mlp, MSE, "adam", metrics=["mae"]), train)
    assert_lowered(model)


def test_train_on_batch_with_class_weight():
    x, y = tm.classes()

    def train(model):
        return [
            model.train_on_batch(x[:16], y[:16], class_weight={0: 1.0, 1: 3.0, 2: 0.5})
            for _ in range(5)
        ]

    model, *_ = trained_twice(compiled(lambda: tm.mlp(3), CLASSES(from_logits=True)), train)
    assert_lowered(model, test=False)


@pytest.mark.parametrize("how", ["split", "data", "weighted data"])
def test_validation(how):
    x, y = tm.features()
    z = tm.features(30, seed=9)
    extra = {
        "split": {"validation_split": 0.3},
        "data": {"validation_data": z, "validation_batch_size": 7, "validation_freq": 2},
        "weighted data": {"validation_data": (*z, np.linspace(0, 1, 30).astype("float32"))},
    }[how]
    make = compiled(tm.mlp, MSE, "adam", metrics=["mae"])
    model, *_ = trained_twice(make, fit(x, y, **extra))
    assert_lowered(model)


@pytest.mark.parametrize(
    "how",
    [
        {"initial_epoch": 2},
        {"batch_size": 17},
        {"batch_size": 7, "shuffle": False},
        {"shuffle": "batch", "batch_size": 9},
        {"steps_per_epoch": 3, "epochs": 1},
        {"batch_size": 200},
    ],
    ids=str,
)
def test_ways_to_walk_through_the_data(how):
    seen = []

    class Order(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, dict(logs)))

    def train(model):
        seen.clear()
        history = fit(*tm.features(), callbacks=[Order()], **how)(model)
        return {**history.history, "batches": [list(logs.values()) for _, logs in seen]}

    model, *_ = trained_twice(compiled(tm.mlp, MSE, "adam", metrics=["mae"]), train)
    assert_lowered(model)


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "uint8", "bool"])
def test_dtypes_of_arrays(dtype):
    x, y = tm.features()
    x = (x * 2).astype(dtype)
    model, *_ = trained_twice(compiled(tm.mlp, MSE, metrics=["mae"]), fit(x, y.astype("float64")))
    assert_lowered(model)


def generator(x, y):
    while True:
        for start in range(0, len(x), 16):
            yield x[start : start + 16], y[start : start + 16]


class Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(index * 16, index * 16 + 16)
        return self.x[rows], self.y[rows]


@pytest.mark.parametrize("source", ["generator", "PyDataset", "DataLoader", "tensors"])
def test_sources_of_data(source):
    x, y = tm.features()

    def train(model):
        how = {"epochs": 4, "verbose": 0}
        if source in ("generator", "DataLoader"):
            how["shuffle"] = False
        if source == "generator":
            return model.fit(generator(x, y), steps_per_epoch=5, **how)
        if source == "PyDataset":
            return model.fit(Sequence(x, y), **how)
        pair = torch.from_numpy(x), torch.from_numpy(y)
        if source == "tensors":
            return model.fit(*pair, batch_size=16, **how)
        data = torch.utils.data.TensorDataset(*pair)
        return model.fit(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True), **how)

    model, *_ = trained_twice(compiled(tm.mlp, MSE, "adam"), train)
    assert_lowered(model, test=False)


def test_gradients_stay_on_the_parameters():
    x, y = tm.features()
    kept = []

    def train(model):
        model.layers[1].trainable = False
        stale = model.layers[1].kernel.value
        for _ in range(3):
            stale.grad = torch.ones_like(stale)
            model.train_on_batch(x[:16], y[:16])
        kept.append(tm.gradients(model))
        return [None if g is None else g.numpy() for g in kept[-1]]

    model, *_ = trained_twice(compiled(tm.mlp, MSE, "adam"), train)
    assert_lowered(model, test=False)
    assert [g is None for g in kept[0]] == [False, False, True, True, False, False]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float64"])
def test_dtype_policies(policy):
    keras.config.set_dtype_policy(policy)
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    # Keras multiplies matrices and reduces in float32 under float64, too.
    limit = {"mixed_bfloat16": 2e-2, "mixed_float16": 2e-3, "float64": 1e-6}[policy]
    x, y = tm.features()
    results = []
    for stock in (False, True):
        keras.utils.set_random_seed(3)
        with tm.side(stock):
            model = tm.mlp()
            model.compile("adam", MSE, metrics=["mae"])
            history = fit(x, y)(model).history
            results.append((model, history, state(model)))
    assert_lowered(results[0][0])
    assert_same(results[0][1], results[1][1], limit=limit)
    assert_same(results[0][2], results[1][2], "variable", limit=limit)


def test_batches_of_many_lengths():
    rng = np.random.default_rng(7)
    batches = []
    for length in (5, 9, 4, 7, 6, 8, 5, 3, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21):
        x = rng.integers(1, 11, (8, length)).astype("int32")
        batches.append((x, (x * 3) % 11))

    def make():
        model = keras.Sequential(
            [keras.Input((None,), dtype="int32"), layers.Embedding(11, 6), layers.Dense(11)]
        )
        model.compile("sgd", CLASSES(from_logits=True), metrics=["accuracy"])
        return model

    model, *_ = trained_twice(make, lambda m: [m.train_on_batch(*batch) for batch in batches])
    assert_lowered(model, test=False)
    assert len(model._keras_turbo_steps.programs) == 2
