"""The traps of training, 29 to 32: what a fast step could silently do otherwise."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch
from keras import layers, ops

import keras_turbo
from keras_turbo import fallback
from tests import training_models as tm
from tests.training_models import assert_lowered, assert_same, state, trained_twice


def linear(optimizer, loss="mse", **how):
    """A model of one weight, 1.0, without a bias."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
    model.set_weights([np.ones((1, 1), "float32")])
    model.compile(optimizer, loss, **how)
    return model


def mlp(loss="mse", optimizer="sgd", **how):
    def make():
        model = tm.mlp()
        model.compile(optimizer if isinstance(optimizer, str) else optimizer(), loss, **how)
        return model

    return make


def weight(model):
    return float(model.weights[0].value.detach().reshape(-1)[0])


# 29


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "RMSprop"])
def test_a_callback_sets_the_learning_rate_in_mid_epoch(optimizer):
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rate = self.model.optimizer.learning_rate
            self.model.optimizer.learning_rate = float(rate) * 0.5

    def train(model):
        return model.fit(*tm.features(), batch_size=16, epochs=3, callbacks=[Halve()], verbose=0)

    model, *_ = trained_twice(mlp(optimizer=getattr(keras.optimizers, optimizer)), train)
    assert_lowered(model)


def test_logs_reach_callbacks_as_floats():
    kinds = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kinds.append({key: type(value) for key, value in logs.items()})

        on_test_batch_end = on_train_batch_end

        def on_epoch_end(self, epoch, logs=None):
            self.on_train_batch_end(epoch, logs)

    def train(model):
        kinds.clear()
        data = tm.features()
        model.fit(*data, verbose=0, callbacks=[Look()], validation_data=data)
        return [sorted((key, kind.__name__) for key, kind in logs.items()) for logs in kinds]

    trained_twice(mlp(metrics=["mae"]), train)
    assert all(kind is float for logs in kinds for kind in logs.values())


def test_the_loss_of_an_epoch_is_weighted_by_the_samples():
    model = linear(keras.optimizers.SGD(0.0))
    x = np.zeros((5, 1), "float32")
    y = np.array([[0.0]] * 4 + [[2.0]], "float32")
    history = model.fit(x, y, batch_size=2, shuffle=False, epochs=3, verbose=0)
    assert history.history["loss"] == pytest.approx([0.8] * 3)
    assert model.evaluate(x, y, batch_size=2, verbose=0) == pytest.approx(0.8)
    assert_lowered(model)


# 30


def test_train_on_batch_reports_its_own_batch():
    model = linear(keras.optimizers.SGD(0.0))
    zeros = np.zeros((2, 1), "float32")
    for target in (1.0, 2.0, 3.0, 4.0):
        assert model.train_on_batch(zeros, zeros + target) == pytest.approx(target**2)
        assert model.test_on_batch(zeros, zeros - target) == pytest.approx(target**2)
    assert_lowered(model)


def test_gradient_accumulation():
    model = linear(
        keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
        loss=keras.losses.MeanSquaredError(),
    )
    x, y = np.ones((1, 1), "float32"), np.zeros((1, 1), "float32")
    seen = []
    for _ in range(4):
        model.train_on_batch(x, y)
        seen.append(weight(model))
    assert seen == pytest.approx([1.0, 0.8, 0.8, 0.64])
    assert int(model.optimizer.iterations) == 2
    assert_lowered(model, test=False)


# 31


class Own(keras.Model):
    """A functional model whose methods note that they ran."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.ran = []


class OwnTrainStep(Own):
    def train_step(self, data):
        self.ran.append("train")
        x, y = data
        loss = self.compute_loss(x, y, self(x, training=True))
        self.zero_grad()
        (loss * 2).backward()
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in self.trainable_variables])
        return {"mine": loss}


class OwnSteps(Own):
    def train_step(self, data):
        self.ran.append("train")
        return {**super().train_step(data), "extra": 1.0}

    def test_step(self, data):
        self.ran.append("test")
        return {**super().test_step(data), "extra": 2.0}

    def predict_step(self, data):
        self.ran.append("predict")
        return super().predict_step(data) + 1


class OwnLoss(Own):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.ran.append("loss")
        return super().compute_loss(x, y, y_pred, sample_weight) * len(self.ran)


class OwnMetrics(Own):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.ran.append("metrics")
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "own": len(self.ran)}


class OwnMetricsResult(Own):
    def get_metrics_result(self):
        self.ran.append("result")
        return {**super().get_metrics_result(), "own": float(len(self.ran))}


@pytest.mark.parametrize(
    ("cls", "counted", "lowered"),
    [
        (OwnTrainStep, {"train": 10}, False),
        (OwnSteps, {"train": 10, "test": 5, "predict": 3}, True),
        (OwnLoss, {"loss": 16}, False),
        (OwnMetrics, {"metrics": 16}, True),
        (OwnMetricsResult, {"result": 19}, True),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_overridden_methods_run_as_written(cls, counted, lowered):
    def make():
        inputs = keras.Input((6,))
        x = layers.Dense(4, activation="tanh")(inputs)
        model = cls(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    def train(model):
        x, y = tm.features()
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        if cls is OwnTrainStep:
            return history.history
        tested = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
        return [history.history, tested, model.predict(x, verbose=0)]

    model, reference, _ = trained_twice(make, train)
    assert model.ran == reference.ran
    assert all(model.ran.count(name) >= times for name, times in counted.items()), model.ran
    cache = model.__dict__.get("_keras_turbo_steps")
    assert bool(cache and cache.programs) is lowered
    assert model.__dict__["_keras_turbo"].programs or lowered


def test_an_own_loss_runs_at_every_step():
    factor = [1.0]

    def loss(y, y_pred):
        factor.append(factor[-1] * 0.5)
        return factor[-1] * ops.square(y - y_pred)

    class Loss(keras.losses.Loss):
        def call(self, y, y_pred):
            return loss(y, y_pred)

    for own in (loss, Loss):

        def make(own=own):
            del factor[1:]
            return mlp(own() if isinstance(own, type) else own, metrics=["mae"])()

        model, *_ = trained_twice(
            make, lambda m: m.fit(*tm.features(), batch_size=16, epochs=2, verbose=0)
        )
        assert_lowered(model)


def test_own_metrics_run_at_every_step():
    calls = [0]

    def drift(y, y_pred):
        calls[0] += 1
        return ops.mean(ops.abs(y - y_pred)) + calls[0]

    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.count = self.add_weight(name="count", initializer="ones")

        def update_state(self, y, y_pred, sample_weight=None):
            self.count.assign_add(1.0 if y_pred.requires_grad else 2.0)

        def result(self):
            return self.count + 0

        def reset_state(self):
            self.count.assign(100.0)

    def make():
        calls[0] = 0
        return mlp(metrics=[drift, Count(), "mae"])()

    def train(model):
        data = tm.features()
        return model.fit(*data, batch_size=16, epochs=3, verbose=0, validation_data=data)

    model, *_ = trained_twice(make, train)
    assert_lowered(model, apart=True)


def test_a_metric_that_cannot_be_traced_runs_behind_the_program():
    x, y = tm.classes()

    def make():
        model = tm.mlp(3)
        model.compile(
            "sgd",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.MeanIoU(3, sparse_y_pred=False)],
        )
        return model

    model, *_ = trained_twice(make, lambda m: m.fit(x, y, batch_size=16, epochs=2, verbose=0))
    assert model._keras_turbo_steps.programs


def test_an_own_optimizer_runs_as_written():
    class Slow(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, 0.5 * learning_rate * gradient)

        def scale_loss(self, loss):
            return loss * 3

    model, *_ = trained_twice(
        mlp(optimizer=Slow), lambda m: m.fit(*tm.features(), epochs=4, verbose=0)
    )
    assert_lowered(model)


def test_an_own_regularizer_and_an_annealed_one():
    class Anneal(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            for layer in self.model.layers:
                for regularizer in (layer.kernel_regularizer, layer.activity_regularizer):
                    regularizer.l2 = float(regularizer.l2) * 0.5

    class Half(keras.regularizers.Regularizer):
        l2 = 0.5

        def __call__(self, x):
            return self.l2 * ops.sum(ops.square(x))

    for regularizer in (keras.regularizers.L2, Half):

        def make(regularizer=regularizer):
            model = tm.mlp(
                kernel_regularizer=regularizer(), activity_regularizer=keras.regularizers.L2(0.1)
            )
            model.compile("sgd", "mse")
            return model

        def train(model):
            return model.fit(
                *tm.features(), batch_size=16, epochs=2, verbose=0, callbacks=[Anneal()]
            )

        model, *_ = trained_twice(make, train)
        assert_lowered(model)


# 32: everything that a step of the optimizer does besides its formula


HOW = {
    "epsilon": {"epsilon": 0.3},
    "decay": {"weight_decay": 0.2},
    "clipnorm": {"clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.02},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "ema at the end": {"use_ema": True, "ema_momentum": 0.8},
    "loss scale": {"loss_scale_factor": 128.0},
    "accumulation": {"gradient_accumulation_steps": 3},
    "schedule": {"learning_rate": keras.optimizers.schedules.CosineDecay(0.05, 15)},
    "callable rate": {"learning_rate": lambda: 0.01},
    "all": {
        "weight_decay": 0.1,
        "clipnorm": 0.1,
        "use_ema": True,
        "gradient_accumulation_steps": 2,
        "loss_scale_factor": 16.0,
    },
}


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
@pytest.mark.parametrize("how", HOW)
def test_options_of_optimizers(name, how):
    options = dict(HOW[how])
    if how == "epsilon" and name == "SGD":
        pytest.skip("SGD has no epsilon")

    def optimizer():
        return getattr(keras.optimizers, name)(**options)

    def train(model):
        return model.fit(*tm.features(), batch_size=16, epochs=4, verbose=0)

    model, *_ = trained_twice(mlp(optimizer=optimizer, metrics=["mae"]), train)
    assert_lowered(model)


@pytest.mark.parametrize("how", ["names", "variables"])
def test_exclusions_from_weight_decay(how):
    def make():
        model = tm.mlp()
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        if how == "names":
            optimizer.exclude_from_weight_decay(var_names=["bias"])
        else:
            optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
        model.compile(optimizer, "mse")
        return model

    model, *_ = trained_twice(make, lambda m: m.fit(*tm.features(), epochs=4, verbose=0))
    assert_lowered(model)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_constraints(optimizer):
    def make():
        model = tm.mlp(kernel_constraint=keras.constraints.MaxNorm(0.5), bias_constraint="non_neg")
        model.compile(getattr(keras.optimizers, optimizer)(0.05), "mse")
        return model

    model, *_ = trained_twice(make, lambda m: m.fit(*tm.features(), epochs=4, verbose=0))
    assert_lowered(model)


def test_dynamic_loss_scaling_skips_steps_that_are_not_finite():
    def make():
        inner = keras.optimizers.Adam(0.01)
        return mlp(
            optimizer=lambda: keras.optimizers.LossScaleOptimizer(
                inner, initial_scale=2.0**100, dynamic_growth_steps=3
            )
        )()

    def train(model):
        x, y = tm.features()
        scales = []
        for step in range(30):
            rows = x[:16] * (np.nan if step == 20 else 1.0)
            model.train_on_batch(rows, y[:16])
            scales.append(float(model.optimizer.dynamic_scale))
        return scales

    model, *_ = trained_twice(make, train)
    assert_lowered(model, test=False)


def test_steps_that_are_not_finite_spread_as_in_stock_keras():
    def train(model):
        x, y = tm.features()
        losses = [float(model.train_on_batch(x[:16], y[:16])) for _ in range(3)]
        losses.append(float(model.train_on_batch(x[:16] * np.inf, y[:16])))
        return [*losses, float(model.train_on_batch(x[:16], y[:16]))]

    trained_twice(mlp(optimizer="adam"), train)


def test_a_mixed_precision_model_gets_a_loss_scale():
    keras.config.set_dtype_policy("mixed_float16")
    model = tm.mlp()
    model.compile("adam", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    model.fit(*tm.features(), verbose=0)
    assert_lowered(model, test=False)


# Changes between steps


def steps(model, count=3, start=0):
    x, y = tm.features()
    rows = slice(start * 16, start * 16 + 16)
    return [float(np.ravel(model.train_on_batch(x[rows], y[rows]))[0]) for _ in range(count)]


def test_trainable_flips_between_steps():
    def train(model):
        seen = steps(model)
        model.layers[0].trainable = False
        seen += steps(model)
        model.layers[0].trainable = True
        model.layers[1].trainable = False
        return seen + steps(model)

    model, *_ = trained_twice(mlp(optimizer="adam"), train)
    assert_lowered(model, test=False)


def test_compiling_anew_with_another_loss_metric_and_optimizer():
    def train(model):
        seen = [steps(model)]
        model.compile("sgd", "mae", metrics=["mse"])
        seen.append(model.train_on_batch(*tm.features(), return_dict=True))
        seen.append(steps(model))
        model.compile("adam", lambda y, p: ops.square(y - p) * 3)
        seen.append(steps(model))
        model.compile("adam", "mse", weighted_metrics=["mae"])
        return [*seen, steps(model), model.evaluate(*tm.features(), verbose=0)]

    model, *_ = trained_twice(mlp(optimizer="adam", metrics=["mae"]), train)
    assert_lowered(model)


def test_a_declined_model_is_lowered_once_it_is_compiled_anew():
    x, y = tm.features()
    model = tm.two_outputs()
    model.compile("sgd", [lambda y, p: ops.abs(y - p), "mse"])
    targets = [y, np.repeat(y, 3, 1)]
    for _ in range(3):
        model.train_on_batch(x, targets)
    assert not model._keras_turbo_steps.programs
    assert "OVERRIDE" in str(keras_turbo.fallbacks())
    model.compile("sgd", ["mae", "mse"])
    for _ in range(3):
        model.train_on_batch(x, targets)
    assert_lowered(model, test=False)


def test_another_optimizer_assigned_between_steps():
    def train(model):
        seen = steps(model)
        model.optimizer = keras.optimizers.Adam(0.05)
        return seen + steps(model)

    trained_twice(mlp(), train)


def test_weights_and_optimizer_state_written_between_steps(tmp_path):
    def train(model):
        seen = steps(model)
        model.save_weights(tmp_path / "a.weights.h5")
        seen += steps(model)
        model.load_weights(tmp_path / "a.weights.h5")
        seen += steps(model)
        model.set_weights([w * 0.5 for w in model.get_weights()])
        model.optimizer.set_weights([v.numpy() * 0.5 for v in model.optimizer.variables])
        return seen + steps(model)

    model, *_ = trained_twice(mlp(optimizer=lambda: keras.optimizers.AdamW(0.01)), train)
    assert_lowered(model, test=False)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Nadam", "Lion"])
@pytest.mark.parametrize("stock_first", [True, False])
def test_checkpoints_move_between_stock_and_turbo(name, stock_first, tmp_path):
    file = tmp_path / "model.keras"
    how = {"momentum": 0.9} if name == "SGD" else {}

    def first(stock):
        keras.utils.set_random_seed(5)
        with tm.side(stock):
            model = mlp(optimizer=lambda: getattr(keras.optimizers, name)(0.01, **how))()
            steps(model)
            return model

    def second(model, stock):
        with tm.side(stock):
            return steps(model, start=1)

    model = first(stock_first)
    model.save(file)
    resumed = keras.models.load_model(file)
    losses = second(resumed, not stock_first)
    reference = first(True)
    assert_same(losses, second(reference, True))
    assert_same(state(resumed), state(reference), "variable")
    assert b"keras_turbo" not in file.read_bytes()


class Killed(Exception):
    pass


@pytest.mark.parametrize("stock_first", [True, False])
def test_a_killed_fit_resumes_with_backup_and_restore(stock_first, tmp_path):
    x, y = tm.features()

    class Kill(keras.callbacks.Callback):
        def __init__(self, at):
            super().__init__()
            self.at, self.steps = at, 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == self.at:
                raise Killed

    def run(stock, kill, folder):
        keras.utils.set_random_seed(8)
        with tm.side(stock):
            model = mlp(optimizer="adam")()
            backup = keras.callbacks.BackupAndRestore(folder, save_freq="epoch")
            extra = [Kill(kill)] if kill else []
            how = {"batch_size": 16, "epochs": 5, "verbose": 0, "shuffle": False}
            try:
                model.fit(x, y, callbacks=[backup, *extra], **how)
            except Killed:
                return None
        return model

    assert run(stock_first, 13, tmp_path / "a") is None
    resumed = run(not stock_first, 0, tmp_path / "a")
    whole = run(True, 0, tmp_path / "b")
    assert_same(resumed.get_weights(), whole.get_weights(), "variable")


def test_callbacks_of_keras(tmp_path):
    def train(model):
        data = tm.features()
        callbacks = [
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=10.0),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.ModelCheckpoint(
                tmp_path / "best.weights.h5", save_weights_only=True, save_best_only=True
            ),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1)),
        ]
        how = {"batch_size": 16, "epochs": 6, "verbose": 0, "validation_data": data}
        return model.fit(*data, callbacks=callbacks, **how)

    model, *_ = trained_twice(mlp(optimizer="adam", metrics=["mae"]), train)
    assert_lowered(model)


def test_errors_are_those_of_stock_keras(stock):
    x, y = tm.classes()
    model = tm.mlp(3)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.train_on_batch(x, y)
    model.train_on_batch(x, y)
    for bad in ((x[:, :4], y), (x, np.zeros((len(x), 2)))):
        with pytest.raises(Exception) as want:  # noqa: PT011
            stock(model.train_on_batch, *bad)
        with pytest.raises(want.type) as got:
            model.train_on_batch(*bad)
        assert str(got.value) == str(want.value)
    before = len(model._keras_turbo_steps.programs)
    model.train_on_batch(x, y)
    assert len(model._keras_turbo_steps.programs) == before > 0


def test_a_step_that_cannot_be_lowered_raises_in_strict_mode():
    model = tm.mlp()
    model.add(layers.Lambda(lambda x: x * 2))
    model.compile("sgd", "mse")
    with pytest.raises(keras_turbo.FallbackError, match="lambda"):
        model.fit(*tm.features(), verbose=0)
    fallback.reset()
