"""Rows of the preprocessing layers."""

from __future__ import annotations

from keras import layers

from tests.cases.row import Row, v, x

ROWS: tuple[Row, ...] = (
    Row(
        layers.Rescaling,
        (
            v("scale", x(3, 4, 4, 3), scale=1 / 255.0),
            v("offset", x(3, 4, 4, 3), scale=1 / 127.5, offset=-1.0),
            v("per_channel", x(3, 4, 4, 3), scale=[0.1, 0.2, 0.3], offset=[1.5, 2.5, 3.5]),
            v("bytes", x(3, 4, 4, 3, dtype="uint8", high=255), scale=1 / 255.0),
        ),
        exact=True,
    ),
)
