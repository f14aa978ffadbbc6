"""Traps 18 to 21: what surrounds a call decides what it does.

The training flag, device scopes, stateless scopes and torch's transforms, hooks: each
changes between two calls of one layer that already has programs.
"""

from __future__ import annotations

import threading

import keras
import pytest
import torch
from keras import layers
from torch.func import functional_call, grad, jvp, vmap

import keras_turbo
from tests.cases import randomize
from tests.compare import (
    MODEL_TOLERANCE,
    agree,
    assert_lowered,
    both,
    close,
    limits,
    programs,
    restore,
    snapshot,
)


def x(*shape):
    return torch.randn(shape)


def mlp():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="tanh"),
            layers.BatchNormalization(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(3),
        ]
    )
    randomize(model)
    return model


@keras.saving.register_keras_serializable("tests")
class Outer(layers.Layer):
    """A custom layer around others; `given` is what it passes as `training`, if anything."""

    def __init__(self, *given, default="none", **kwargs):
        super().__init__(**kwargs)
        self.given = given
        self.inner = layers.Dropout(0.5, seed=1)
        self.norm = layers.BatchNormalization()

    def build(self, shape):
        self.norm.build(shape)

    def call(self, inputs):
        more = {"training": self.given[0]} if self.given else {}
        return self.norm(self.inner(inputs, **more), **more)


class Knowing(Outer):
    """It takes the flag and uses it only for itself."""

    def call(self, inputs, training=None):
        return super().call(inputs) + (1.0 if training else 0.0)


class Trained(Outer):
    """Its own default is training."""

    def call(self, inputs, training=True):
        return super().call(inputs)


@pytest.mark.allow_fallback("NO_RULE")
@pytest.mark.parametrize("given", [(), (True,), (False,), (None,)], ids=str)
@pytest.mark.parametrize("cls", [Outer, Knowing, Trained])
def test_18_training_comes_from_the_argument_the_context_or_the_default(cls, given):
    layer = cls(*given)
    layer.build((None, 5))
    randomize(layer)
    wrapped = keras.Sequential([keras.Input((5,)), layer, layers.Dropout(0.3, seed=2)])
    inputs = x(6, 5)
    seen = []
    for called in (layer, wrapped):
        for call in ({}, {"training": True}, {"training": False}, {"training": None}):
            state = snapshot(called)
            seen.append(agree(called, inputs, **call))
            restore(called, state)
    same = [torch.equal(seen[1], other) for other in (seen[0], seen[2])]
    assert same[1] is (given != () and cls is not Knowing)
    assert all(programs(inner) for inner in (layer.inner, layer.norm))


def test_18_a_layers_own_default_is_used_outside_any_call():
    layer = layers.Dropout(0.5, seed=1)
    layer.build((None, 5))
    inputs = x(6, 5)
    assert torch.equal(agree(layer, inputs), inputs)
    assert torch.equal(agree(layer, inputs, training=None), inputs)
    assert not torch.equal(agree(layer, inputs, training=True), inputs)
    assert_lowered(layer)


def test_18_the_flag_of_a_model_that_is_called_in_a_functional_model():
    inner = mlp()
    entry = keras.Input((5,))
    fixed = keras.Model(entry, inner(entry, training=True))
    free = keras.Model(entry, inner(entry))
    inputs = x(6, 5)
    for call in ({}, {"training": True}, {"training": False}):
        for model in (fixed, free):
            agree(model, inputs, **call)
    state = snapshot(inner)
    fixed(inputs)
    assert any(not torch.equal(a, b) for a, b in zip(state, snapshot(inner), strict=True))
    assert_lowered(fixed)
    assert_lowered(free)


@pytest.mark.allow_fallback("DEVICE")
def test_19_a_meta_device_scope():
    model = mlp()
    inputs = x(3, 5)
    agree(model, inputs)
    with keras.device("meta"), torch.no_grad():
        got = model(inputs)
        with keras_turbo.stock():
            want = model(inputs)
    assert got.device == want.device == torch.device("meta")
    assert got.shape == want.shape
    assert agree(model, inputs).device.type == "cpu"


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_19_a_scope_of_the_same_device(name):
    keras_turbo.enable("on")
    model = mlp()
    with keras.device(name):
        assert agree(model, x(3, 5)).device.type == "cpu"
    assert agree(model, x(3, 5)).device.type == "cpu"


@pytest.mark.allow_fallback("DEVICE")
def test_19_a_thread_started_inside_a_scope_sees_the_default_device():
    layer = layers.Dense(3)
    layer.build((None, 5))
    layer(x(2, 5))
    found = {}

    def work():
        found["inside"] = layer(x(2, 5)).device.type

    with keras.device("meta"), torch.no_grad():
        assert layer(x(2, 5)).device.type == "meta"
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert layer(x(2, 5)).device.type == "meta"
    assert found == {"inside": "cpu"}


@pytest.mark.parametrize("where", ["weights", "inputs", "both"])
def test_19_weights_or_inputs_elsewhere(where):
    """Stock's answer or stock's error, for inputs, kernel and bias alike."""
    keras_turbo.enable("on")
    layer = layers.Dense(3)
    layer.build((None, 5))
    layer(x(2, 5))
    if where in ("weights", "both"):
        layer.to("meta")
    inputs = x(2, 5).to("meta") if where in ("inputs", "both") else x(2, 5)
    outcomes = []
    for stock in (True, False):
        try:
            if stock:
                with keras_turbo.stock(), torch.no_grad():
                    outcomes.append(layer(inputs).device)
            else:
                with torch.no_grad():
                    outcomes.append(layer(inputs).device)
        except Exception as error:  # noqa: BLE001 - compared below
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


def test_19_a_model_moved_there_and_back():
    keras_turbo.enable("on")
    model = mlp()
    inputs = x(3, 5)
    before = agree(model, inputs)
    model.to(torch.float64)
    both(model, (inputs,), tolerance=limits(MODEL_TOLERANCE, torch.float32))
    model.to(torch.float32)
    close(agree(model, inputs), before)


def test_20_a_stateless_call_uses_the_given_weights_and_changes_nothing():
    model = mlp()
    inputs = x(6, 5)
    agree(model, inputs)
    before = snapshot(model)
    trainable = [v.value.detach() * 2 + 0.1 for v in model.trainable_variables]
    others = [v.value.detach().clone() for v in model.non_trainable_variables]
    for training in (False, True):
        with keras_turbo.stock():
            want = model.stateless_call(trainable, others, inputs, training=training)
        got = model.stateless_call(trainable, others, inputs, training=training)
        close(got[0], want[0], tolerance=MODEL_TOLERANCE)
        for a, b in zip(got[1], want[1], strict=True):
            close(a, b, tolerance=MODEL_TOLERANCE)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model), strict=True))
    assert not torch.allclose(got[0], agree(model, inputs))


def dense(**kwargs):
    layer = layers.Dense(4, activation="tanh", **kwargs)
    layer.build((None, 4))
    randomize(layer)
    return layer


def test_20_functional_call_uses_the_given_parameters():
    layer = dense()
    inputs = x(3, 4)
    agree(layer, inputs)
    given = {n: torch.randn_like(p) for n, p in layer.named_parameters()}
    with keras_turbo.stock():
        want = functional_call(layer, given, (inputs,))
    got = functional_call(layer, given, (inputs,))
    close(got, want)
    agree(layer, inputs)


def _vmap(layer, inputs):
    return vmap(layer)(inputs)


def _grad(layer, inputs):
    return grad(lambda t: layer(t).sum())(inputs[0])


def _jvp(layer, inputs):
    return jvp(layer, (inputs[0],), (torch.ones_like(inputs[0]),))[1]


def _vmap_of_grad(layer, inputs):
    return vmap(grad(lambda t: layer(t[None]).sum()))(inputs[0])


def _jacobian(layer, inputs):
    return torch.func.jacrev(layer)(inputs[0])


def _hessian(layer, inputs):
    return torch.func.hessian(lambda t: layer(t).square().sum())(inputs[0, :2])


def _forward_ad(layer, inputs):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        return torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent


def _double_backward(layer, inputs):
    inputs = inputs.clone().requires_grad_()
    (first,) = torch.autograd.grad(layer(inputs).square().sum(), inputs, create_graph=True)
    return torch.autograd.grad(first.square().sum(), inputs)[0]


TRANSFORMS = [
    _vmap,
    _grad,
    _jvp,
    _vmap_of_grad,
    _jacobian,
    _hessian,
    _forward_ad,
    _double_backward,
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own use
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda f: f.__name__.strip("_"))
def test_20_transforms(transform):
    layer = dense()
    inputs = x(2, 3, 4)
    agree(layer, inputs[0])
    agree(layer, inputs)
    with keras_turbo.stock():
        want = transform(layer, inputs)
    close(transform(layer, inputs).detach(), want.detach())
    agree(layer, inputs[0])


def test_20_inference_mode():
    layer = dense()
    inputs = x(3, 4)
    with torch.inference_mode():
        first, second = layer(inputs), layer(inputs)
        with keras_turbo.stock():
            want = layer(inputs)
    assert first.is_inference() and second.is_inference() and want.is_inference()
    close(second, want)
    agree(layer, inputs)
    assert_lowered(layer)


class Counter:
    """Counts calls; a hook of any kind."""

    def __init__(self, result=None):
        self.calls = 0
        self.result = result

    def __call__(self, module, *args):
        if isinstance(module, layers.Dense):
            self.calls += 1
            return None if self.result is None else self.result(*args)
        return None


REGISTER = {
    "forward": lambda layer, hook: layer.register_forward_hook(hook),
    "pre_forward": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "backward": lambda layer, hook: layer.register_full_backward_hook(hook),
    "pre_backward": lambda layer, hook: layer.register_full_backward_pre_hook(hook),
    "global_forward": lambda layer, hook: torch.nn.modules.module.register_module_forward_hook(
        hook
    ),
    "global_pre_forward": (
        lambda layer, hook: torch.nn.modules.module.register_module_forward_pre_hook(hook)
    ),
    "global_backward": (
        lambda layer, hook: torch.nn.modules.module.register_module_full_backward_hook(hook)
    ),
}


@pytest.mark.allow_fallback("HOOKS")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
@pytest.mark.parametrize("kind", REGISTER)
def test_21_a_hook_fires_once_per_call(kind, inside):
    layer = dense()
    model = keras.Sequential([keras.Input((4,)), layer]) if inside else layer
    inputs = x(3, 4)
    model(inputs)

    def run():
        leaf = inputs.clone().requires_grad_()
        model(leaf).sum().backward()

    run()
    hook = Counter()
    handle = REGISTER[kind](layer, hook)
    run()
    run()
    assert hook.calls == 2
    handle.remove()
    run()
    assert hook.calls == 2
    before = sum(keras_turbo.fallbacks().values())
    run()
    assert sum(keras_turbo.fallbacks().values()) == before


@pytest.mark.allow_fallback("HOOKS")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
def test_21_a_returned_value_replaces_the_output(inside):
    layer = dense()
    model = keras.Sequential([keras.Input((4,)), layer]) if inside else layer
    inputs = x(3, 4)
    before = agree(model, inputs)
    handles = [
        layer.register_forward_hook(lambda module, args, output: output * 2),
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 0,)),
    ]
    changed = agree(model, inputs)
    close(changed, 2 * agree(model, inputs * 5) / 2)
    assert not torch.equal(changed, before)
    for handle in handles:
        handle.remove()
    assert torch.equal(agree(model, inputs), before)


@pytest.mark.allow_fallback("HOOKS")
def test_21_hooks_fire_in_predict_too():
    layer = dense()
    model = keras.Sequential([keras.Input((4,)), layer])
    inputs = x(6, 4)
    model.predict(inputs, batch_size=2, verbose=0)
    hook = Counter()
    handle = layer.register_forward_hook(hook)
    model.predict(inputs, batch_size=2, verbose=0)
    handle.remove()
    assert hook.calls == 3
    model.predict(inputs, batch_size=2, verbose=0)
    assert hook.calls == 3
