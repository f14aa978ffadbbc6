"""Every rule against stock Keras; the rows of `cases.py` say what is tried."""

from __future__ import annotations

import keras
import pytest
import torch

from tests import cases
from tests.compare import assert_lowered, both, limits

ALL = list(cases.cases())
TYPICAL = list(cases.cases(first_only=True))


def over(pairs):
    return pytest.mark.parametrize(
        ("row", "variant"), pairs, ids=[cases.name_of(*pair) for pair in pairs]
    )


@over(ALL)
def test_call_and_gradients(row, variant):
    layer = cases.build(row, variant)
    how = {"exact": row.exact, "tolerance": row.tolerance}
    want = both(layer, cases.inputs(variant), cases.call_of(variant), second=True, **how)
    assert want.error is None
    assert_lowered(layer)


@over(ALL)
def test_inference(row, variant):
    layer = cases.build(row, variant)
    how = {"exact": row.exact, "tolerance": row.tolerance}
    want = both(layer, cases.inputs(variant), cases.call_of(variant), grad=False, **how)
    assert want.error is None
    assert_lowered(layer)


@pytest.mark.parametrize("policy", cases.FLOATS)
@over(ALL)
def test_dtype_policy(row, variant, policy):
    layer = cases.build(row, variant, dtype=policy)
    dtype = keras.DTypePolicy(policy).compute_dtype
    inside = "float32" if row.float32_inside and dtype == "float64" else dtype
    limit = limits(row.tolerance, getattr(torch, inside))
    # Where rounding decides on which side of its kink relu stands, gradients jump by more
    # than any rounding error.
    grad = row.exact or dtype == "float64" or variant.kwargs.get("activation") != "relu"
    how = {"exact": row.exact, "tolerance": limit, "grad": grad}
    both(layer, cases.inputs(variant), cases.call_of(variant), **how)
    both(layer, cases.inputs(variant, dtype=dtype), cases.call_of(variant), **how)
    assert_lowered(layer)
