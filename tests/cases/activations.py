"""Rows of the activation layers."""

from __future__ import annotations

from keras import layers

from tests.cases.row import Row, v, x

ROWS: tuple[Row, ...] = (
    Row(
        layers.ReLU,
        tuple(
            v(name, x(3, 4, 5), **kwargs)
            for name, kwargs in {
                "plain": {},
                "max": {"max_value": 0.7},
                "slope": {"negative_slope": 0.2},
                "threshold": {"threshold": 0.3},
                "all": {"max_value": 0.9, "negative_slope": 0.1, "threshold": 0.2},
                "six": {"max_value": 6.0},
            }.items()
        ),
        exact=True,
    ),
    Row(
        layers.LeakyReLU,
        (v("plain", x(3, 5)), v("slope", x(3, 4, 5), negative_slope=0.1)),
        exact=True,
    ),
    Row(layers.ELU, (v("plain", x(3, 5)), v("alpha", x(3, 4, 5), alpha=0.4)), exact=True),
    Row(layers.PReLU, (v("plain", x(3, 5)), v("shared", x(3, 4, 5), shared_axes=[1])), exact=True),
    Row(
        layers.Softmax,
        (
            v("plain", x(3, 5)),
            v("axis", x(3, 4, 5), axis=1),
            v("two_axes", x(3, 4, 5), axis=(1, 2)),
            v("mask", x(3, 5), call={"mask": x(3, 5, dtype="bool")}),
        ),
        masks=False,
    ),
)
