"""Prepared optimizer updates against stock Keras: every formula with every option, step by step."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import torch

from tests import training_models as tm

SHAPES = ((3, 4), (4,), (2, 3, 2), (1,))
STEPS = 12

FORMULAS = {
    "SGD": {},
    "SGD momentum": {"momentum": 0.9},
    "SGD nesterov": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {},
    "RMSprop centered": {"centered": True},
    "RMSprop momentum": {"momentum": 0.7, "centered": True, "rho": 0.8},
    "Adam": {},
    "Adam slow": {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 0.1},
    "Adam amsgrad": {"amsgrad": True},
    "AdamW": {},
    "Adamax": {"epsilon": 1e-3},
    "Nadam": {},
    "Adagrad": {},
    "Adadelta": {"learning_rate": 1.0},
    "Lion": {},
}

OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "clipnorm": {"clipnorm": 0.7},
    "clipvalue": {"clipvalue": 0.3},
    "global_clipnorm": {"global_clipnorm": 0.9},
    "averages": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 4},
    "accumulation": {"gradient_accumulation_steps": 3},
    "scale": {"loss_scale_factor": 64.0},
    "schedule": {"learning_rate": keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)},
    "everything": {
        "weight_decay": 0.05,
        "clipnorm": 0.5,
        "use_ema": True,
        "gradient_accumulation_steps": 2,
        "loss_scale_factor": 4.0,
    },
}


def made(formula, option, dtype="float32", constraint=None):
    rng = np.random.default_rng(0)
    variables = [
        keras.Variable(rng.normal(size=shape), dtype=dtype, name=f"v{i}")
        for i, shape in enumerate(SHAPES)
    ]
    variables[0].constraint = constraint
    options = {"learning_rate": 0.01, **FORMULAS[formula], **OPTIONS[option]}
    optimizer = getattr(keras.optimizers, formula.split()[0])(**options)
    optimizer.build(variables)
    return optimizer, variables


def gradients(step, dtype):
    generator = torch.Generator().manual_seed(step)
    kind = getattr(torch, dtype)
    return [torch.randn(shape, generator=generator).to(kind) for shape in SHAPES]


def walked(formula, option, is_stock, dtype="float32", constraint=None):
    """All values after each step; `is_stock` says which steps stock Keras makes."""
    optimizer, variables = made(formula, option, dtype, constraint)
    seen = []
    for step in range(STEPS):
        with tm.side(is_stock(step)), torch.no_grad():
            optimizer.apply(gradients(step, dtype), variables)
        everything = [*variables, *optimizer.variables]
        seen.append([v.value.detach().clone() for v in everything])
    return optimizer, seen


def same(got, want, limit):
    for step, (left, right) in enumerate(zip(got, want, strict=True)):
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            if not b.dtype.is_floating_point:
                assert torch.equal(a, b)
                continue
            error = (a - b).abs().max() / max(1.0, float(b.abs().max()))
            assert error <= limit, f"step {step}, value {i}: {float(error):.3g}"


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("formula", FORMULAS)
def test_against_stock(formula, option):
    optimizer, got = walked(formula, option, lambda step: False)
    _, want = walked(formula, option, lambda step: True)
    assert optimizer.__dict__["_keras_turbo_update"] is not None
    same(got, want, 2e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_stock_and_turbo_in_turns_share_their_state(formula):
    _, got = walked(formula, "everything", lambda step: step % 3 == 1)
    _, want = walked(formula, "everything", lambda step: True)
    same(got, want, 2e-6)


@pytest.mark.parametrize("formula", FORMULAS)
def test_double_precision_and_constraints(formula):
    keras.config.set_floatx("float64")
    constraint = keras.constraints.MaxNorm(0.8)
    optimizer, got = walked(formula, "plain", lambda step: False, "float64", constraint)
    _, want = walked(formula, "plain", lambda step: True, "float64", constraint)
    assert optimizer.__dict__["_keras_turbo_update"] is not None
    same(got, want, 1e-12)


@pytest.mark.parametrize("formula", ["SGD", "Adam", "RMSprop", "Lion"])
@pytest.mark.parametrize("option", ["plain", "clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_gradients_that_are_not_finite_or_zero(formula, option, value):
    results = []
    for stock in (False, True):
        optimizer, variables = made(formula, option)
        for step in range(3):
            grads = gradients(step, "float32")
            if step == 1:
                grads[0][0, 0], grads[1][:] = value, 0.0
            with tm.side(stock), torch.no_grad():
                optimizer.apply(grads, variables)
        tensors = [v.value.detach() for v in (*variables, *optimizer.variables)]
        # The fused kernel moves Adam's mean by a difference: once infinite it is NaN at the next
        # step, where Keras's stays infinite. The weight is NaN by then in both.
        if formula == "Adam" and value == float("inf"):
            tensors = [torch.where(t.isfinite(), t, torch.nan) for t in tensors]
        results.append(tensors)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6, equal_nan=True)


def test_some_of_the_variables_and_missing_gradients():
    results = []
    for stock in (False, True):
        optimizer, variables = made("Adam", "averages")
        with tm.side(stock), torch.no_grad():
            grads = gradients(0, "float32")
            optimizer.apply(grads[:2], variables[:2])
            optimizer.apply(grads, variables)
            grads[1] = None
            with pytest.warns(UserWarning, match="Gradients do not exist"):
                optimizer.apply(grads, variables)
            optimizer.apply(gradients(1, "float32"))
        results.append([[v.value.detach() for v in (*variables, *optimizer.variables)]])
    same(*results, 2e-6)


def test_an_attribute_written_between_steps():
    results = []
    for stock in (False, True):
        optimizer, variables = made("SGD momentum", "plain")
        with tm.side(stock), torch.no_grad():
            for step in range(6):
                optimizer.apply(gradients(step, "float32"), variables)
                if step == 1:
                    optimizer.momentum = 0.5
                if step == 2:
                    optimizer.clipnorm = 0.1
                if step == 3:
                    optimizer.learning_rate = 0.5
        results.append([[v.value.detach() for v in (*variables, *optimizer.variables)]])
    same(*results, 2e-6)


def test_a_variable_with_another_parameter_behind_it():
    optimizer, variables = made("Adam", "plain")
    with torch.no_grad():
        optimizer.apply(gradients(0, "float32"), variables)
        variables[0]._value = torch.nn.Parameter(torch.zeros(3, 4))
        optimizer.apply(gradients(1, "float32"), variables)
    assert variables[0].value.detach().any()


def test_unknown_variables_are_refused_in_keras_words(stock):
    optimizer, variables = made("Adam", "plain")
    stranger = [keras.Variable(np.zeros(shape)) for shape in SHAPES]
    optimizer.apply(gradients(0, "float32"), variables)
    for call in (optimizer.apply, lambda *args: stock(optimizer.apply, *args)):
        with pytest.raises(ValueError, match="Unknown variable"):
            call(gradients(0, "float32"), stranger)
