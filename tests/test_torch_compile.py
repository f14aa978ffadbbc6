"""`torch.compile` around models: whole graphs, few of them, and the numbers of eager calls.

`fullgraph=True` makes a graph break an error. Dynamo's own backend `eager` runs what it has
captured as it is, which is what these tests are about; Inductor has its own tests.
"""

from __future__ import annotations

import keras
import pytest
import torch
from keras import layers

import keras_turbo
from tests import training_models as tm
from tests.cases.row import randomize
from tests.compare import TOLERANCE

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def mapped():
    one, two = keras.Input((6,), name="one"), keras.Input((6,), name="two")
    return keras.Model({"one": one, "two": two}, {"sum": layers.Dense(2)(one + two)})


def with_lora():
    model = tm.mlp()
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(torch.randn(model.layers[0].lora_kernel_b.shape))
    return model


def text():
    return keras.Sequential(
        [
            keras.Input((9,), dtype="int32"),
            layers.Embedding(11, 6, mask_zero=True),
            layers.LSTM(5),
            layers.Dense(2),
        ]
    )


def noisy():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.GaussianNoise(0.3, seed=2),
            layers.Dense(3),
            layers.Dropout(0.5, seed=3),
        ]
    )


def small_mobilenet():
    return keras.applications.MobileNetV3Small(weights=None, input_shape=(32, 32, 3))


CASES = {
    "mlp": (tm.mlp, (6,)),
    "seeded_dropout": (tm.cnn, (8, 8, 2)),
    "seeded_noise": (noisy, (6,)),
    "transformer": (tm.transformer, "tokens"),
    "lstm_with_mask": (text, "tokens"),
    "dictionary": (mapped, "dictionary"),
    "lora": (with_lora, (6,)),
    "mixed": (lambda: tm.mlp(dtype="mixed_bfloat16"), (6,)),
    "mobilenet_v3_small": (small_mobilenet, (32, 32, 3)),
}


def batch(shape, size):
    if shape == "tokens":
        return torch.randint(0, 11, (size, 9), dtype=torch.int32)
    if shape == "dictionary":
        return {"one": torch.randn(size, 6), "two": torch.randn(size, 6)}
    return torch.randn(size, *shape)


def outcome(model, function, x):
    """Outputs of a call and the variables behind it, from the same random numbers."""
    keras.utils.set_random_seed(7)
    outputs = function(x)
    flat = [t.detach().clone() for t in keras.tree.flatten(outputs)]
    return flat, [v.value.detach().clone() for v in model.variables]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_whole_graphs_with_stock_numbers(case, training, turbo):
    make, shape = CASES[case]
    model = make()
    randomize(model)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def call(x):
        return model(x, training=training)

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    for size in (3, 5, 7, 4):
        x = batch(shape, size)
        before = [v.value.detach().clone() for v in model.variables]
        got = outcome(model, compiled, x)
        with torch.no_grad():
            for variable, value in zip(model.variables, before, strict=True):
                variable.value.copy_(value)
        with keras_turbo.stock():
            want = outcome(model, call, x)
        for a, b in zip(got[0] + got[1], want[0] + want[1], strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            error = (a.double() - b.double()).abs().max() / max(1.0, float(b.double().abs().max()))
            assert error <= 5 * TOLERANCE.get(b.dtype, 0.0)
    # One graph of the first batch's sizes, one for all others.
    assert 1 <= len(graphs) <= 2


def test_both_training_flags_and_new_weights_are_two_graphs(turbo):
    model = tm.mlp()
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, t: model(x, training=t), backend=backend, fullgraph=True)
    x = torch.randn(4, 6)
    for training in (True, False, True, False):
        model.set_weights([w + 0.5 for w in model.get_weights()])
        with keras_turbo.stock():
            want = model(x, training=training)
        torch.testing.assert_close(compiled(x, training), want)
    assert len(graphs) == 2


def test_a_deep_model_is_one_graph_for_all_other_batch_sizes(turbo):
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3))
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for size in (3, 2, 4):
        x = torch.randn(size, 32, 32, 3)
        with torch.no_grad():
            got = compiled(x)
            with keras_turbo.stock():
                want = model(x)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(graphs) == 2


def test_around_a_stock_layer_the_rest_runs_as_programs(turbo):
    class Own(layers.Layer):
        def call(self, inputs):
            return torch.sin(inputs)

    keras_turbo.enable("on")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4), Own(name="own"), layers.Dense(2)])
    randomize(model)
    torch._dynamo.reset()
    rows = {row.path.rpartition("/")[2]: row for row in keras_turbo.explain(model).rows}
    assert [name for name, row in rows.items() if not row.lowered] == ["own"]
    assert "NO_RULE" in rows["own"].reason
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(3, 6)
    with keras_turbo.stock():
        want = model(x)
    torch.testing.assert_close(compiled(x), want)
    assert model.layers[0]._keras_turbo.compiled and model.layers[2]._keras_turbo.compiled
