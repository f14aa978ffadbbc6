"""Explanations: every layer has a row, and the model stays as it was."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_turbo
from keras_turbo.lowering import Row
from keras_turbo.state import Snapshot
from keras_turbo.tables import html_table, text_table


class PlusOne(keras.layers.Layer):
    """A layer without a rule and without weights."""

    def call(self, x):
        return x + 1


class Block(keras.layers.Layer):
    """A layer without a rule, with layers inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.project = keras.layers.Dense(4, name="project")
        self.join = keras.layers.Concatenate(name="join")
        self.drop = keras.layers.Dropout(0.5, name="drop")

    def build(self, shape):
        self.project.build(shape)

    def call(self, x):
        return self.drop(self.join([self.project(x), x]))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="outer")
        self.first = keras.layers.Dense(4, name="first")
        self.block = Block(name="block")

    def call(self, x):
        return self.block(self.first(x))


def rows(explanation):
    return [(row.path.split("/")[-1], row.layer, row.lowered) for row in explanation.rows]


def nested():
    inner = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, name="deep"), PlusOne(name="odd")], name="inner"
    )
    inputs = keras.Input((4,))
    shared = keras.layers.Dense(4, name="shared")
    outputs = shared(shared(inner(inputs))) * 2.0
    return keras.Model(inputs, outputs, name="whole")


def test_rows_in_the_order_of_running():
    explanation = keras_turbo.explain(nested())
    assert rows(explanation) == [
        ("whole", "Functional", True),
        ("inner", "Sequential", True),
        ("deep", "Dense", True),
        ("odd", "PlusOne", False),
        ("shared", "Dense", True),
    ]
    assert (explanation.lowered, explanation.stock) == (4, 1)
    assert {row.reason for row in explanation.rows} == {"", "NO_RULE"}
    assert all(isinstance(row, Row) for row in explanation.rows)


@pytest.mark.parametrize("training", [False, True])
def test_a_subclassed_model_shows_its_children(training):
    model = Subclassed()
    with keras_turbo.stock():
        model(np.ones((2, 4), "float32"))
    explanation = keras_turbo.explain(model, training)
    assert rows(explanation) == [
        ("outer", "Subclassed", False),
        ("first", "Dense", True),
        ("block", "Block", False),
        ("project", "Dense", True),
        ("join", "Concatenate", True),
        ("drop", "Dropout", True),
    ]
    assert explanation.training is training


def test_children_of_a_stock_layer_inside_a_lowered_model():
    inputs = keras.Input((4,))
    explanation = keras_turbo.explain(keras.Model(inputs, Block(name="block")(inputs), name="m"))
    assert rows(explanation) == [
        ("m", "Functional", True),
        ("block", "Block", False),
        ("project", "Dense", True),
        ("join", "Concatenate", True),
        ("drop", "Dropout", True),
    ]


def test_what_is_not_built_says_so():
    explanation = keras_turbo.explain(keras.Sequential([keras.layers.Dense(2)]))
    assert [row.reason for row in explanation.rows] == ["NOT_BUILT", "NOT_BUILT"]
    assert (explanation.lowered, explanation.stock) == (0, 2)


def test_the_reason_carries_its_detail():
    layer = keras.layers.Dense(3)
    layer.build((None, 4))
    layer.quantize("int8")
    (row,) = keras_turbo.explain(layer).rows
    assert row.reason.startswith("QUANTIZED: int8")


def test_works_when_disabled_and_changes_nothing():
    keras_turbo.disable()
    model = nested()
    attributes = [dict(vars(layer)) for layer in model._flatten_layers()]
    snapshot = Snapshot(model)
    assert keras_turbo.explain(model, training=True).stock == 1
    assert not keras_turbo.is_enabled()
    assert [vars(layer) for layer in model._flatten_layers()] == attributes
    for before, after in zip(snapshot.values, snapshot.current(), strict=True):
        assert before is after


def test_text_and_html():
    explanation = keras_turbo.explain(nested())
    lines = str(explanation).splitlines()
    assert lines[0].split() == ["path", "layer", "runs", "reason"]
    assert lines[-1] == "4 lowered, 1 stock (training=False)"
    assert sum("stock    NO_RULE" in line for line in lines) == 1
    html = explanation._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<tr>") == 6


def test_tables_align_and_escape():
    assert text_table(("a", "bb"), [("xyz", 1), ("", 22)]) == "a    bb\n---  --\nxyz  1\n     22"
    assert text_table(("a",), []) == "a\n-"
    assert "&lt;lambda&gt;" in html_table("x", ("name",), [("<lambda>",)])


def test_the_module_does_not_hide_the_function():
    from keras_turbo.explain import explain
    from keras_turbo.verify import verify

    assert keras_turbo.explain is explain
    assert keras_turbo.verify is verify
