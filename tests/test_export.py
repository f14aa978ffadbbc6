"""Export of models: by torch from `keras_turbo.lower`, and by `model.export` of Keras.

What comes out computes what stock Keras computes, at other sizes than those of the example,
and holds nothing of this package. Formats whose packages are not installed are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import warnings

import keras
import pytest
import torch
from keras import layers

import keras_turbo
from keras_turbo.bench import models
from tests import training_models as tm
from tests.cases.row import randomize

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:No complete tensor found in the group:UserWarning"),
]
SIZES = ((3, 7), (5, 9), (2, 4), (1, 1))


def normalized():
    return keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.5, seed=1),
            layers.Dense(2),
        ]
    )


def numbers(*shape):
    return lambda batch, length: torch.randn(batch, *(length if s is None else s for s in shape))


def ids(batch, length):
    return torch.randint(32, (batch, length))


CASES = {
    "mlp": (lambda: models.mlp(8, 3), numbers(8)),
    "cnn": (normalized, numbers(16, 16, 3)),
    "attention": (lambda: models.attention(16, 2), numbers(None, 16)),
    "einsum": (lambda: models.einsum_dense(8, 2, 4), numbers(None, 8)),
    "transformer": (lambda: models.transformer(32, 16, 2, 2), ids),
}
SEQUENCES = {"attention", "einsum", "transformer"}


def ready(case):
    make, inputs = CASES[case]
    model = make()
    randomize(model)
    dynamic = {0: torch.export.Dim("batch")}
    if case in SEQUENCES:
        dynamic[1] = torch.export.Dim("length", max=512)
    return model, inputs, dynamic


def assert_exported(model, exported, inputs):
    for size in SIZES:
        x = inputs(*size)
        with torch.no_grad(), keras_turbo.stock():
            want = model(x)
        with torch.no_grad():
            got = torch.as_tensor(exported(x))
        assert got.dtype == want.dtype and got.shape == want.shape
        error = float((got - want).abs().max()) / max(1.0, float(want.abs().max()))
        assert error <= 1e-5, size


def installed(*names):
    return all(importlib.util.find_spec(name) for name in names)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_lowered_models_are_exported_with_dynamic_dimensions(case, strict):
    model, inputs, dynamic = ready(case)
    exported = torch.export.export(
        keras_turbo.lower(model), (inputs(3, 7),), dynamic_shapes=(dynamic,), strict=strict
    )
    assert not [n for n in exported.graph.nodes if "keras_turbo" in str(n.target)]
    assert len(exported.state_dict) == len(model.weights)
    assert_exported(model, exported.module(), inputs)


@pytest.mark.parametrize("case", ["mlp", "transformer"])
def test_an_exported_file_needs_neither_package(case, tmp_path):
    model, inputs, dynamic = ready(case)
    lowered = keras_turbo.lower(model)
    exported = torch.export.export(lowered, (inputs(3, 7),), dynamic_shapes=(dynamic,))
    torch.export.save(exported, tmp_path / "model.pt2")
    assert b"keras_turbo" not in (tmp_path / "model.pt2").read_bytes()
    assert_exported(model, torch.export.load(tmp_path / "model.pt2").module(), inputs)


@pytest.mark.parametrize("case", ["cnn", "transformer"])
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_packages_of_compiled_models(case, tmp_path):
    model, inputs, dynamic = ready(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(
            keras_turbo.lower(model), (inputs(3, 7),), dynamic_shapes=(dynamic,)
        )
        package = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
        compiled = torch._inductor.aoti_load_package(package)
    assert_exported(model, compiled, inputs)


@pytest.mark.skipif(not installed("onnxscript", "onnxruntime"), reason="needs ONNX")
@pytest.mark.parametrize("case", ["mlp", "cnn", "transformer"])
def test_lowered_models_as_onnx(case, tmp_path):
    import onnxruntime

    model, inputs, dynamic = ready(case)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            keras_turbo.lower(model),
            (inputs(3, 7),),
            path,
            dynamic_shapes=(dynamic,),
            dynamo=True,
            verbose=False,
        )
    session = onnxruntime.InferenceSession(path)
    (given,) = session.get_inputs()

    def run(x):
        return session.run(None, {given.name: x.numpy()})[0]

    assert_exported(model, run, inputs)


def nested():
    one, two = keras.Input((6,), name="one"), keras.Input((6,), name="two")
    return keras.Model({"one": one, "two": two}, layers.Dense(2)(one + two))


KERAS_CASES = {
    "mlp": (tm.mlp, lambda: torch.randn(1, 6)),
    "cnn": (normalized, lambda: torch.randn(1, 16, 16, 3)),
    "nested": (nested, lambda: {"one": torch.randn(1, 6), "two": torch.randn(1, 6)}),
    "transformer": (tm.transformer, lambda: torch.randint(0, 11, (1, 9), dtype=torch.int32)),
}


def saved(model, x, path, form):
    """What `model.export` gives: the outputs of its file, or the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model.export(path, format=form, verbose=False)
        except Exception as error:  # noqa: BLE001, stock Keras decides which
            return type(error)
        flat = keras.tree.flatten(x)
        if form == "torch":
            outputs = torch.export.load(path).module()(x)
            return [t.detach() for t in keras.tree.flatten(outputs)]
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        names = [item.name for item in session.get_inputs()]
        feed = {name: t.numpy() for name, t in zip(names, flat, strict=True)}
        return [names, *map(torch.from_numpy, session.run(None, feed))]


@pytest.mark.parametrize("form", ["torch", "onnx"])
@pytest.mark.parametrize("case", KERAS_CASES)
def test_export_by_keras_is_that_of_stock_keras(case, form, tmp_path):
    if form == "onnx" and not installed("onnxscript", "onnxruntime"):
        pytest.skip("needs ONNX")
    make, inputs = KERAS_CASES[case]
    model, x = make(), inputs()
    randomize(model)
    results = []
    for stock in (True, False):
        with keras_turbo.stock() if stock else contextlib.nullcontext():
            model(x)
            suffix = "pt2" if form == "torch" else "onnx"
            results.append(saved(model, x, str(tmp_path / f"{stock}.{suffix}"), form))
    want, got = results
    if isinstance(want, type):
        assert got is want
        return
    for a, b in zip(got, want, strict=True):
        if isinstance(b, list):
            assert a == b
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
