"""Every rule against stock Keras; the rows of `cases.py` say what is tried."""

from __future__ import annotations

import keras
import pytest
import torch

from tests import cases
from tests.compare import assert_lowered, both

ALL = list(cases.cases())
TYPICAL = list(cases.cases(first_only=True))


def over(pairs):
    return pytest.mark.parametrize(
        ("row", "variant"), pairs, ids=[cases.name_of(*pair) for pair in pairs]
    )


@over(ALL)
def test_call_and_gradients(row, variant):
    layer = cases.build(row, variant)
    want = both(
        layer, cases.inputs(variant), variant.call, exact=row.exact, second=True
    )
    assert want.error is None
    assert_lowered(layer)


@over(ALL)
def test_inference(row, variant):
    layer = cases.build(row, variant)
    want = both(layer, cases.inputs(variant), variant.call, exact=row.exact, grad=False)
    assert want.error is None
    assert_lowered(layer)


@pytest.mark.parametrize("policy", cases.FLOATS)
@over(ALL)
def test_dtype_policy(row, variant, policy):
    layer = cases.build(row, variant, dtype=policy)
    both(layer, cases.inputs(variant), variant.call, exact=row.exact)
    dtype = keras.DTypePolicy(policy).compute_dtype
    both(layer, cases.inputs(variant, dtype=dtype), variant.call, exact=row.exact)
    assert_lowered(layer)
