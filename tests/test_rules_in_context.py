"""Every rule inside models, files and copies: the rows of `cases/` again.

A layer's program must not travel with the layer: a copy, a clone, a pickled layer and a
saved model hold nothing of this package and run on their own weights.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import torch

import keras_turbo
from tests import cases
from tests.compare import assert_lowered, both, observe, programs

ALL = list(cases.cases())
TYPICAL = list(cases.cases(first_only=True))


def over(pairs):
    return pytest.mark.parametrize(
        ("row", "variant"), pairs, ids=[cases.name_of(*pair) for pair in pairs]
    )


def model_around(layer, variant):
    """A Functional model that consists of one use of a layer, with a free batch size."""

    def symbol(item):
        return keras.Input(item.shape[1:], dtype=item.dtype) if isinstance(item, cases.T) else item

    args, call = keras.tree.map_structure(symbol, (variant.args, variant.call))
    entries = [t for t in keras.tree.flatten((args, call)) if isinstance(t, keras.KerasTensor)]
    return keras.Model(entries, layer(*args, **call))


def model_inputs(variant, batch=None):
    """The model's inputs for the variant's arguments, as one flat list."""
    made = cases.inputs(variant, batch), cases.call_of(variant, batch)
    flat = [t for t in keras.tree.flatten(made) if isinstance(t, torch.Tensor)]
    return flat[0] if len(flat) == 1 else flat


def test_model_inputs_are_random(turbo):
    first, second = (model_inputs(cases.ROWS[0].variants[0]) for _ in range(2))
    assert not torch.equal(first, second) and first.unique().numel() > 2


@over(ALL)
def test_in_a_functional_model(row, variant):
    layer = cases.build(row, variant)
    model = model_around(layer, variant)
    for training in (False, True):
        args = (model_inputs(variant),)
        call = {"training": training}
        want = both(model, args, call, exact=row.exact, tolerance=row.tolerance)
        assert want.error is None
    want = both(model, (model_inputs(variant, 5),), exact=row.exact, tolerance=row.tolerance)
    assert want.error is None
    assert_lowered(model)


@over(TYPICAL)
def test_copies_have_their_own_weights(row, variant):
    layer = cases.build(row, variant)
    args, call = cases.inputs(variant), cases.call_of(variant)
    before = observe(layer, args, call)
    copies = {"deepcopy": copy.deepcopy(layer), "pickle": pickle.loads(pickle.dumps(layer))}
    for how, twin in copies.items():
        assert not programs(twin), how
        both(twin, args, call, exact=row.exact, tolerance=row.tolerance)
        cases.randomize(twin)
        both(twin, args, call, exact=row.exact, tolerance=row.tolerance)
        assert_lowered(twin)
    again = observe(layer, args, call)
    leaves = keras.tree.flatten(again.outputs), keras.tree.flatten(before.outputs)
    assert all(torch.equal(a, b) for a, b in zip(*leaves, strict=True))


@over(TYPICAL)
def test_a_clone_from_the_config(row, variant):
    layer = cases.build(row, variant)
    args, call = cases.inputs(variant), cases.call_of(variant)
    observe(layer, args, call)
    twin = type(layer).from_config(layer.get_config())
    assert "turbo" not in repr(layer.get_config())
    with keras_turbo.stock():
        twin(*args, **call)
    twin.set_weights(layer.get_weights())
    both(twin, args, call, exact=row.exact, tolerance=row.tolerance)
    assert_lowered(twin)


_LOAD = """
import json, os, sys
os.environ["KERAS_BACKEND"] = "torch"
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "keras_turbo":
            raise ImportError("this process has no keras_turbo")
sys.meta_path.insert(0, Refuse())
import keras, numpy, torch
torch.set_num_threads(2)
for stem in json.load(sys.stdin):
    data = numpy.load(stem + ".npz")
    inputs = [torch.tensor(data[f"arr_{i}"]) for i in range(len(data.files))]
    model = keras.saving.load_model(stem + ".keras", compile=False)
    with torch.no_grad():
        outputs = model(inputs[0] if len(inputs) == 1 else inputs)
    numpy.savez(stem + ".out.npz", *[t.numpy() for t in keras.tree.flatten(outputs)])
assert "keras_turbo" not in sys.modules
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every row's model, called under turbo and saved, then loaded where there is no turbo.

    Returns:
        From the row's class to the path of the saved model, the outputs here, and the
        outputs there.
    """
    folder = tmp_path_factory.mktemp("saved")
    here = {}
    keras_turbo.enable("strict")
    for row, variant in TYPICAL:
        stem = folder / row.cls.__name__
        model = model_around(cases.build(row, variant), variant)
        inputs = model_inputs(variant)
        with torch.no_grad():
            outputs = model(inputs)
        assert_lowered(model)
        model.save(f"{stem}.keras")
        np.savez(f"{stem}.npz", *[t.numpy() for t in keras.tree.flatten(inputs)])
        here[row.cls] = stem, keras.tree.flatten(outputs)
    names = str([str(stem) for stem, _ in here.values()]).replace("'", '"')
    subprocess.run([sys.executable, "-c", _LOAD], input=names, text=True, check=True, timeout=300)
    return {
        cls: (stem, outputs, np.load(f"{stem}.out.npz")) for cls, (stem, outputs) in here.items()
    }


@over(TYPICAL)
def test_a_saved_model_loads_without_the_package(row, variant, saved):
    stem, here, there = saved[row.cls]
    with zipfile.ZipFile(f"{stem}.keras") as archive:
        assert not [n for n in archive.namelist() if b"turbo" in n.encode() + archive.read(n)]
    assert len(here) == len(there.files)
    for i, tensor in enumerate(here):
        # Another process may lay weights out in another order: not to the bit, then.
        error = np.abs(tensor.numpy() - there[f"arr_{i}"]).max() / max(1, tensor.abs().max())
        assert error <= row.tolerance[tensor.dtype]
        assert tensor.shape == there[f"arr_{i}"].shape
