"""Every rule against stock Keras; the rows of `cases/` say what is tried.

Here is what concerns a layer on its own: numbers, gradients, dtypes, masks, shapes, errors.
What concerns copies, files and models around it is in `test_rules_in_context.py`.
"""

from __future__ import annotations

import inspect
import warnings

import keras
import pytest
import torch

import keras_turbo
from keras_turbo import registry
from keras_turbo.rules.declined import DECLINED
from tests import cases
from tests.compare import assert_lowered, assert_same, both, limits, observe, programs
from tests.conftest import reasons

ALL = list(cases.cases())
TYPICAL = list(cases.cases(first_only=True))
TRAINED = [pair for pair in ALL if pair[0].training]
FLOAT_INPUTS = [pair for pair in TYPICAL if pair[0].floats]


def over(pairs):
    return pytest.mark.parametrize(
        ("row", "variant"), pairs, ids=[cases.name_of(*pair) for pair in pairs]
    )


def compare(row, layer, args, call, **how):
    return both(layer, args, call, **{"exact": row.exact, "tolerance": row.tolerance, **how})


def test_every_public_layer_has_a_rule_or_a_reason():
    known = registry.rules()
    public = {n: c for n, c in vars(keras.layers).items() if inspect.isclass(c)}
    without = {name for name, cls in public.items() if cls not in known}
    assert without == set(DECLINED) & set(public)
    assert not {name for name in DECLINED if public.get(name) in known}


def test_every_rule_has_a_row():
    public = {c for c in vars(keras.layers).values() if inspect.isclass(c)}
    rows = {row.cls for row in cases.ROWS}
    assert set(registry.rules()) & public - rows == {keras.layers.InputLayer}
    assert len(rows) == len(cases.ROWS)


@over(ALL)
def test_call_and_gradients(row, variant):
    layer = cases.build(row, variant)
    want = compare(row, layer, cases.inputs(variant), cases.call_of(variant), second=True)
    assert want.error is None
    assert_lowered(layer)


@over(ALL)
def test_inference(row, variant):
    layer = cases.build(row, variant)
    want = compare(row, layer, cases.inputs(variant), cases.call_of(variant), grad=False)
    assert want.error is None
    assert_lowered(layer)


@over(TRAINED)
def test_training(row, variant):
    layer = cases.build(row, variant)
    call = {**cases.call_of(variant), "training": True}
    args = cases.inputs(variant)
    want = compare(row, layer, args, call, second=True)
    assert want.error is None
    compare(row, layer, args, {**call, "training": False})
    assert_lowered(layer)


@pytest.mark.parametrize("policy", cases.FLOATS)
@over(ALL)
def test_dtype_policy(row, variant, policy):
    layer = cases.build(row, variant, dtype=policy)
    dtype = keras.DTypePolicy(policy).compute_dtype
    inside = "float32" if row.float32_inside and dtype == "float64" else dtype
    # Where rounding decides on which side of its kink relu stands, gradients jump by more
    # than any rounding error.
    grad = row.exact or dtype == "float64" or variant.kwargs.get("activation") != "relu"
    how = {"tolerance": limits(row.tolerance, getattr(torch, inside)), "grad": grad}
    compare(row, layer, cases.inputs(variant), cases.call_of(variant), **how)
    compare(row, layer, cases.inputs(variant, dtype=dtype), cases.call_of(variant), **how)
    assert_lowered(layer)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "int8", "bool", "float64", "float16"])
@over(FLOAT_INPUTS)
def test_input_of_another_dtype(row, variant, dtype):
    """Stock's promotion, whatever it is; never the weights cast to the input's dtype."""
    layer = cases.build(row, variant)
    # What is float64 outside is float32 inside.
    limit = limits(row.tolerance, torch.float16 if dtype == "float16" else torch.float32)
    args, call = cases.inputs(variant, dtype=dtype), cases.call_of(variant)
    want = compare(row, layer, args, call, tolerance=limit)
    assert programs(layer) or want.error


@over(ALL)
def test_batch_sizes(row, variant):
    """One program serves every batch size, a batch of one and an empty one included."""
    layer = cases.build(row, variant)
    for batch in (3, 1, 0, 5):
        compare(row, layer, cases.inputs(variant, batch), cases.call_of(variant, batch))
    # Keras's own code may branch on a size of one; nothing else needs a second program.
    assert len(programs(layer)) <= 1 + any(p.relations for p in programs(layer))
    assert_lowered(layer)


@over(TYPICAL)
def test_non_contiguous_inputs(row, variant):
    layer = cases.build(row, variant)

    def stretched(tensor):
        wide = torch.stack([tensor, tensor + 1 if tensor.dtype != torch.bool else ~tensor], -1)
        view = wide[..., 0]
        assert not view.is_contiguous()
        return view

    args = keras.tree.map_structure(stretched, cases.inputs(variant))
    compare(row, layer, args, cases.call_of(variant))
    assert_lowered(layer)


@over([pair for pair in ALL if pair[0].masks])
def test_mask(row, variant):
    """A mask on the inputs: used, passed on, or dropped with Keras's own warning."""
    layer = cases.build(row, variant)
    args = cases.inputs(variant)
    for tensor in keras.tree.flatten(args):
        if tensor.ndim >= 3:
            tensor._keras_mask = torch.rand(tensor.shape[:2]) < 0.6
    call = {"training": True} if row.training else {}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        want = compare(row, layer, args, {**cases.call_of(variant), **call})
    # Once under stock, twice under turbo; each time or never.
    dropped = [str(w.message) for w in seen if "does not support masking" in str(w.message)]
    assert len(dropped) in (0, 3)
    assert len(seen) == len(dropped) and len(set(dropped)) < 2
    assert programs(layer) or want.error


@over(TYPICAL)
def test_wrong_inputs(row, variant):
    """The same exception type and message as stock, or the same result; then all is well."""
    keras_turbo.enable("on")
    layer = cases.build(row, variant)
    good = cases.inputs(variant)
    layer(*good, **cases.call_of(variant))

    def change(function):
        return keras.tree.map_structure(function, good)

    wrong = {
        "one axis more": change(lambda t: t.unsqueeze(1)),
        "one axis less": change(lambda t: t[:, 0] if t.ndim > 1 else t[0]),
        "another last size": change(lambda t: torch.cat([t, t], -1)),
        "another middle size": change(lambda t: torch.cat([t, t], 1) if t.ndim > 2 else t),
        "a size of one": change(lambda t: t[..., :1]),
        "no argument": (),
        "an argument too many": (*good, good[0], 1, 2, 3, 4, 5, 6, 7),
        "None": tuple(None for _ in good),
    }
    for what, args in wrong.items():
        with keras_turbo.stock():
            want = observe(layer, args)
        got = observe(layer, args)
        try:
            assert_same(got, want, exact=row.exact, tolerance=row.tolerance)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
    count = sum(keras_turbo.fallbacks().values())
    compare(row, layer, good, cases.call_of(variant))
    assert sum(keras_turbo.fallbacks().values()) == count
    assert not {"ERROR", "MISMATCH"} & set(reasons())
