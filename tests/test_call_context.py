"""The training flag around layers that run stock Keras inside a program.

Stock Keras writes each layer's flag into the context of the whole call, where the layers after
it find it; a user's layer may do so too.
"""

from __future__ import annotations

import itertools

import keras
import pytest
import torch
from keras import layers

import keras_turbo
from tests.compare import programs

flags: list[object] = []


class Shows(layers.Layer):
    """Notes the flag that it is called with."""

    def call(self, x, training=None):
        flags.append(training)
        return x + 1

    def compute_output_shape(self, shape):
        return shape


class ShowsByDefault(Shows):
    def call(self, x, training=True):
        return super().call(x, training)


class TakesNoFlag(Shows):
    def call(self, x):
        return x * 2


class Sets(Shows):
    """Calls a layer of its own with another flag, as a dropout at inference does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dropout = layers.Dropout(0.5)

    def call(self, x):
        return self.dropout(x, training=True) * 0 + x


KINDS = [Shows, ShowsByDefault, TakesNoFlag, Sets, lambda: layers.Dense(4)]


def seen(model: keras.Model, stock=None, **call) -> list[object]:
    """The flags of two calls."""
    flags.clear()
    for _ in range(2):
        stock(model, torch.ones(1, 4), **call) if stock else model(torch.ones(1, 4), **call)
    return flags[:]


@pytest.mark.parametrize("call", [{}, {"training": True}, {"training": False}], ids=str)
@pytest.mark.parametrize("explicit", [{}, {"training": True}, {"training": False}], ids=str)
def test_the_flag_behind_a_stock_node(call, explicit, stock):
    keras_turbo.enable("on")
    for kinds in itertools.product(KINDS[:4], KINDS):
        first, second = (kind() for kind in kinds)
        inputs = keras.Input((4,))
        given = explicit if kinds[0] in KINDS[:2] else {}
        model = keras.Model(inputs, Shows()(second(layers.Dense(4)(first(inputs, **given)))))
        want = seen(model, stock, **call)
        got = seen(model, **call)
        # A flag that a user's layer sets shows at run time: stock Keras then runs once more.
        assert got[-len(want) // 2 :] == want[-len(want) // 2 :], kinds
        if Sets not in kinds or call.get("training") is not None:
            assert got == want, kinds
            assert programs(model)


@pytest.mark.allow_fallback("UNSUPPORTED", "NO_RULE")
def test_a_layer_that_sets_the_flag_keeps_its_model_on_stock_keras(recwarn):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Shows()(Sets(name="sets")(inputs)))
    for _ in range(3):
        flags.clear()
        model(torch.ones(1, 4))
        assert flags == [True]
    assert not programs(model)
    assert keras_turbo.fallbacks()[model.name, "UNSUPPORTED: stock_sets changed the training flag"]
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


@pytest.mark.allow_fallback("ERROR", "NO_RULE")
def test_a_failing_program_leaves_the_call_context_as_it_was(stock):
    class Fails(Shows):
        def call(self, x, training=None):
            x = super().call(x, training)
            if len(flags) == fail_at:
                raise ZeroDivisionError("once")
            return x

    class Outer(layers.Layer):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.built = True

        def call(self, x):
            return self.inner(x)

    inputs = keras.Input((4,))
    y = Fails(name="first")(inputs, training=True)
    inner = keras.Model(inputs, Fails(name="second")(y))
    outer = Outer(inner)
    fail_at = 0
    flags.clear()
    stock(outer, torch.ones(1, 4))
    want = flags[:]
    flags.clear()
    outer(torch.ones(1, 4))
    assert programs(inner) and flags == want
    flags.clear()
    fail_at = 2
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        outer(torch.ones(1, 4))
    assert flags[2:] == want
