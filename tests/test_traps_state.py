"""Traps 1 to 10: the layer and its state change between two calls.

Every test calls under turbo first, so that there is a program to be wrong, then changes
something and compares with stock Keras.
"""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest
import torch
from keras import layers

from tests.cases import randomize
from tests.compare import MODEL_TOLERANCE, agree, assert_lowered, both, close, observe, programs


def dense_model():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.5, seed=1),
            layers.Dense(3, activation="softmax"),
        ]
    )
    randomize(model)
    return model


def x(*shape):
    return torch.randn(shape)


def tokens():
    return torch.randint(0, 9, (3, 4))


LORA = {
    "dense": (lambda: layers.Dense(6), lambda: x(3, 5)),
    "einsum_dense": (
        lambda: layers.EinsumDense("abc,cd->abd", (None, 6), bias_axes="d"),
        lambda: x(3, 4, 5),
    ),
    "embedding": (lambda: layers.Embedding(9, 6), tokens),
}


@pytest.mark.allow_fallback("UNSUPPORTED")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
@pytest.mark.parametrize("kind", LORA)
def test_01_lora_after_build(kind, inside):
    make, data = LORA[kind]
    layer = make()
    inputs = data()
    layer(inputs)
    called = layer
    if inside:
        entry = keras.Input(inputs.shape[1:], dtype=str(inputs.dtype).split(".")[1])
        called = keras.Model(entry, layers.Activation("tanh")(layer(entry)))
    before = agree(called, inputs)
    assert_lowered(called)
    weight = layer._embeddings if kind == "embedding" else layer._kernel
    base = weight.value.detach().clone()
    layer.enable_lora(4)
    matrix = layer.lora_kernel_b if kind != "embedding" else layer.lora_embeddings_b
    matrix.assign(x(*matrix.shape))
    after = agree(called, inputs)
    assert (after - before).abs().max() > 0.01
    assert torch.equal(weight.value, base)
    matrix.assign(2 * matrix.value)
    assert (agree(called, inputs) - after).abs().max() > 0.01


@pytest.mark.parametrize("mode", ["int8", "int4", "float8"])
@pytest.mark.allow_fallback("QUANTIZED")
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_02_quantize_after_a_call(mode, stock):
    model = dense_model()
    data = x(4, 5)
    before = model.predict(data, verbose=0)
    both(model, (data,), grad=False, tolerance=MODEL_TOLERANCE)
    model.quantize(mode)
    after = model.predict(data, verbose=0)
    np.testing.assert_array_equal(after, stock(model.predict, data, verbose=0))
    assert np.abs(after - before).max() > 0
    both(model, (data,), grad=False, tolerance=MODEL_TOLERANCE)


class WeightNormalized(layers.Dense):
    @property
    def kernel(self):
        kernel = super().kernel
        return kernel / keras.ops.norm(kernel, axis=0)


class Doubled(layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs)


class Unmasked(layers.Dense):
    def compute_mask(self, inputs, previous_mask=None):
        return None


class Halved(layers.Dense):
    @property
    def compute_dtype(self):
        return "float16"


class Renamed(layers.Dense):
    """Overrides nothing that a call uses."""

    def __init__(self, units, extra=3, **kwargs):
        super().__init__(units, **kwargs)
        self.extra = extra

    def get_config(self):
        return {**super().get_config(), "extra": self.extra}

    def build(self, input_shape):
        super().build(input_shape)

    def helper(self):
        return self.extra


@pytest.mark.allow_fallback("OVERRIDE")
@pytest.mark.parametrize("cls", [WeightNormalized, Doubled, Unmasked, Halved])
def test_03_a_subclass_that_overrides_something_runs_its_code(cls):
    layer = cls(6)
    inputs = x(3, 4, 5)
    inputs._keras_mask = torch.rand(3, 4) < 0.5
    layer(inputs)
    both(layer, (inputs,))
    plain = layers.Dense(6)
    plain.build(inputs.shape)
    plain.set_weights(layer.get_weights())
    want, got = plain(inputs), layer(inputs)
    same = want.dtype == got.dtype and torch.allclose(want, got)
    assert not same or (want._keras_mask is None) != (getattr(got, "_keras_mask", None) is None)


def test_03_a_subclass_that_overrides_only_its_construction_stays_fast():
    layer = Renamed(6)
    layer(x(3, 5))
    both(layer, (x(3, 5),), exact=True)
    assert_lowered(layer)


@pytest.mark.allow_fallback("OVERRIDE")
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
def test_04_call_assigned_on_the_instance(inside):
    layer = layers.Dense(5, name="changed")
    layer.build((None, 5))
    called = keras.Sequential([keras.Input((5,)), layers.Dense(5), layer]) if inside else layer
    inputs = x(3, 5)
    before = agree(called, inputs)
    original = layer.call
    layer.call = lambda inputs, training=None: 3 * original(inputs)
    after = agree(called, inputs)
    close(after, 3 * before)
    layer.call = lambda inputs, training=None: 5 * original(inputs)
    close(agree(called, inputs), 5 * before)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
def test_04_activation_and_rate_assigned_after_a_call(inside):
    dense, dropout = layers.Dense(5), layers.Dropout(0.5, seed=1)
    model = keras.Sequential([keras.Input((5,)), dense, dropout])
    randomize(model)
    if inside:
        model = keras.Sequential([keras.Input((5,)), model, layers.Dense(2)])
    inputs = x(3, 5)
    first = agree(model, inputs, training=True)
    dense.activation = keras.activations.relu
    second = agree(model, inputs, training=True)
    assert not torch.equal(first, second)
    dense.activation = lambda value: value * 7  # not Keras's: called as it is
    third = agree(model, inputs, training=True)
    assert not torch.equal(second, third)
    dense.activation = None
    dropout.rate = 0
    fourth = agree(model, inputs, training=True)
    close(fourth, agree(model, inputs, training=False))
    dense.bias = None
    assert not torch.equal(agree(model, inputs, training=True), fourth)


def _assign(layer, value):
    layer.kernel.assign(value)


def _set_weights(layer, value):
    layer.set_weights([value, layer.bias.numpy()])


def _optimizer(layer, value):
    optimizer = keras.optimizers.SGD(1.0)
    gradients = [layer.kernel.value.detach() - value, torch.zeros(6)]
    optimizer.apply([g.detach() for g in gradients], [layer.kernel, layer.bias])


def _torch_optimizer(layer, value):
    parameter = layer.kernel.value
    parameter.grad = parameter.detach() - value
    torch.optim.SGD([parameter], lr=1.0).step()


def _copy(layer, value):
    with torch.no_grad():
        layer.kernel.value.copy_(value)


def _data_copy(layer, value):
    layer.kernel.value.data.copy_(value)


def _data(layer, value):
    layer.kernel.value.data = value


def _in_place(layer, value):
    with torch.no_grad():
        layer.kernel.value.mul_(0).add_(value)


def _parameter(layer, value):
    """What `torch.nn.Module._apply` and some parametrizations do."""
    layer.kernel._value = torch.nn.Parameter(value)


def _state_dict(layer, value):
    name = next(n for n, p in layer.named_parameters() if p is layer.kernel.value)
    layer.load_state_dict({**layer.state_dict(), name: value})


WRITES = [
    _assign,
    _set_weights,
    _optimizer,
    _torch_optimizer,
    _copy,
    _data_copy,
    _data,
    _in_place,
    _parameter,
    _state_dict,
]


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__.strip("_"))
def test_05_weights_change(write, inside):
    layer = layers.Dense(6)
    layer.build((None, 5))
    model = keras.Sequential([keras.Input((5,)), layer, layers.Activation("tanh")])
    called = model if inside else layer
    inputs = x(3, 5)
    agree(called, inputs)
    value = x(5, 6)
    write(layer, value)
    got = agree(called, inputs)
    want = inputs @ value + layer.bias.value
    close(got, (want.tanh() if inside else want).detach())
    write(layer, 2 * value)
    want = inputs @ (2 * value) + layer.bias.value
    close(agree(called, inputs), (want.tanh() if inside else want).detach())


def test_05_load_weights(tmp_path):
    model, other = dense_model(), dense_model()
    inputs = x(3, 5)
    before = agree(model, inputs)
    other.set_weights([0.5 * w + 0.1 for w in model.get_weights()[:4]] + other.get_weights()[4:])
    other.save_weights(tmp_path / "w.weights.h5")
    model.load_weights(tmp_path / "w.weights.h5")
    after = agree(model, inputs)
    assert not torch.equal(before, after)
    close(after, agree(other, inputs))


def _clone(model):
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return clone


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), _clone],
    ids=["deepcopy", "copy", "pickle", "clone_model"],
)
def test_06_a_copy_runs_on_its_own_weights(copied):
    model = dense_model()
    inputs = x(3, 5)
    before = agree(model, inputs)
    twin = copied(model)
    close(agree(twin, inputs), before)
    assert not set(map(id, programs(twin))) & set(map(id, programs(model)))
    randomize(twin)
    assert not torch.equal(agree(twin, inputs), before)
    close(agree(model, inputs), before)
    assert twin.layers[0].kernel.value is not model.layers[0].kernel.value


def test_07_trainable_flips_between_steps():
    model = dense_model()
    inputs = x(3, 5)

    def gradients():
        want = both(model, (inputs,), {"training": True}, tolerance=MODEL_TOLERANCE)
        return len(want.gradients)

    assert gradients() == 1 + 4
    model.layers[0].trainable = False
    assert gradients() == 1 + 2
    model.trainable = False
    assert gradients() == 1
    model.trainable = True
    assert gradients() == 1 + 4


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
def test_07_a_frozen_batch_normalization_does_not_train(inside):
    layer = layers.BatchNormalization()
    layer.build((None, 5))
    randomize(layer)
    model = keras.Sequential([keras.Input((5,)), layer]) if inside else layer
    inputs = x(6, 5)
    moving = layer.moving_mean.numpy().copy()
    trained = agree(model, inputs, training=True)
    assert np.abs(layer.moving_mean.numpy() - moving).max() > 0
    layer.trainable = False
    moving = layer.moving_mean.numpy().copy()
    frozen = agree(model, inputs, training=True)
    assert not torch.equal(trained, frozen)
    np.testing.assert_array_equal(layer.moving_mean.numpy(), moving)
    close(frozen, agree(model, inputs, training=False))
    layer.trainable = True
    agree(model, inputs, training=True)
    assert np.abs(layer.moving_mean.numpy() - moving).max() > 0


def test_08_a_sequential_model_grows_and_shrinks():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(6)])
    inputs = x(3, 5)
    assert agree(model, inputs).shape == (3, 6)
    outer = keras.Sequential([keras.Input((5,)), model])
    agree(outer, inputs)
    model.add(layers.Dense(4))
    assert agree(model, inputs).shape == (3, 4)
    agree(outer, inputs)
    model.pop()
    assert agree(model, inputs).shape == (3, 6)
    model.add(layers.Dense(2, activation="relu"))
    assert agree(model, inputs).shape == (3, 2)
    assert_lowered(model)


def test_08_a_sequential_model_without_declared_input():
    model = keras.Sequential([layers.Dense(6)])
    inputs = x(3, 5)
    model(inputs)
    assert agree(model, inputs).shape == (3, 6)
    model.add(layers.Dense(4))
    model(inputs)
    assert agree(model, inputs).shape == (3, 4)
    model.pop()
    model(inputs)
    assert agree(model, inputs).shape == (3, 6)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in_a_model"])
def test_09_a_dtype_policy_changes_after_build(inside):
    layer = layers.Dense(6)
    layer.build((None, 5))
    model = keras.Sequential([keras.Input((5,)), layer]) if inside else layer
    inputs = x(3, 5)
    agree(model, inputs)
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        layer.dtype_policy = policy
        want = both(model, (inputs,), exact=True)
        assert want.error is None
        assert str(want.outputs.dtype).endswith(keras.DTypePolicy(policy).compute_dtype)


def test_09_the_global_policy_changes():
    old = layers.Dense(6)
    old.build((None, 5))
    inputs = x(3, 5)
    agree(old, inputs)
    keras.config.set_dtype_policy("mixed_float16")
    new = layers.Dense(6)
    new.build((None, 5))
    assert both(old, (inputs,), exact=True).outputs.dtype == torch.float32
    assert both(new, (inputs,), exact=True).outputs.dtype == torch.float16
    keras.config.set_floatx("float16")
    assert both(old, (inputs,), exact=True).outputs.dtype == torch.float32


def test_09_a_policy_map_is_edited_in_place():
    policies = keras.dtype_policies.DTypePolicyMap()
    model = keras.Sequential(
        [keras.Input((5,)), layers.Dense(6, dtype=policies, name="mapped")], name="model"
    )
    inputs = x(3, 5)
    assert both(model, (inputs,), exact=True).outputs.dtype == torch.float32
    policies[model.layers[0].path] = keras.DTypePolicy("mixed_bfloat16")
    assert both(model, (inputs,), exact=True).outputs.dtype == torch.bfloat16
    del policies[model.layers[0].path]
    assert both(model, (inputs,), exact=True).outputs.dtype == torch.float32


def test_10_models_share_layers():
    shared = layers.Dense(5, activation="tanh", name="shared")
    entry = keras.Input((5,))
    once = keras.Model(entry, shared(entry))
    twice = keras.Model(entry, shared(shared(entry)))
    other = keras.Input((2, 5))
    wide = keras.Model(other, shared(other))
    inputs = x(3, 5)
    a, b = agree(once, inputs), agree(twice, inputs)
    assert not torch.equal(a, b)
    close(agree(once, a), b)
    agree(wide, x(3, 2, 5))
    shared.kernel.assign(x(5, 5))
    assert not torch.equal(agree(once, inputs), a)
    assert not torch.equal(agree(twice, inputs), b)


def test_10_a_submodel_is_cut_from_an_inner_output():
    model = dense_model()
    inputs = x(3, 5)
    whole = agree(model, inputs)
    features = keras.Model(model.inputs, model.layers[0].output)
    head = keras.Sequential(model.layers[1:])
    inner = agree(features, inputs)
    assert inner.shape == (3, 8)
    head(inner)
    close(agree(head, inner), whole)
    close(agree(model, inputs), whole)
    assert not observe(model, (inputs,)).error
