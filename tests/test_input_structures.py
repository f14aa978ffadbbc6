"""Inputs in other structures than a model declares: results, errors and warnings as stock Keras."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import torch

import keras_turbo

DECLARED = {
    "one": lambda i: i,
    "list": lambda i: [i],
    "tuple": lambda i: (i,),
    "dict": lambda i: {"x": i},
    "nested": lambda i: {"a": [i]},
}
GIVEN = {
    **DECLARED,
    "other key": lambda i: {"z": i},
    "list of lists": lambda i: [[i]],
    "keyword": None,
}


@pytest.mark.parametrize("array", [False, True], ids=["tensor", "array"])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("declared", DECLARED)
def test_an_input_in_some_structure(declared, given, array, stock):
    keras_turbo.enable("on")
    model_input = keras.Input((4,), name="x")
    dense = keras.layers.Dense(2)
    model = keras.Model(DECLARED[declared](model_input), dense(model_input))
    batches = [np.random.normal(size=(n, 4)).astype("float32") for n in (3, 3, 5)]

    def run():
        seen = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in batches:
                x = batch if array else torch.from_numpy(batch)
                try:
                    outputs = model(inputs=x) if given == "keyword" else model(GIVEN[given](x))
                except (ValueError, TypeError) as error:
                    seen.append((type(error), str(error)))
                else:
                    seen.append(outputs.detach())
        said = [(str(w.message), w.category, w.filename, w.lineno) for w in caught]
        return seen, said

    got, said = run()
    want, wanted = stock(run)
    assert said == wanted
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-6) if isinstance(b, torch.Tensor) else a == b


def test_a_mask_that_ends_is_warned_of_in_the_same_words_and_place(stock):
    keras_turbo.enable("strict")
    model = keras.Sequential(
        [
            keras.layers.Embedding(5, 4, mask_zero=True),
            keras.layers.Conv1D(2, 2),
            keras.layers.Flatten(),
        ]
    )
    x = torch.tensor([[1, 2, 0], [3, 0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock(model, x)

    def run(action):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for training in (False, True, False):
                model(x, training=training)
        return [(str(w.message), w.category, w.filename, w.lineno) for w in caught]

    for action in ("always", "default"):
        assert run(action) == stock(run, action) != []
