"""Rows of the merging layers."""

from __future__ import annotations

from keras import layers

from tests.cases.row import Row, v, x

_PAIR = [x(3, 4, 5), x(3, 4, 5)]
_TRIPLE = [x(3, 4, 5), x(3, 4, 5), x(3, 4, 5)]
_BROADCAST = [x(3, 4, 5), x(3, 1, 5)]
_RANKS = [x(3, 4, 5), x(3, 5)]

ROWS: tuple[Row, ...] = (
    *(
        Row(
            cls,
            (
                v("pair", _PAIR),
                v("triple", _TRIPLE),
                v("broadcast", _BROADCAST),
                v("ranks", _RANKS),
            ),
            exact=True,
        )
        for cls in (layers.Add, layers.Average, layers.Maximum, layers.Minimum, layers.Multiply)
    ),
    Row(layers.Subtract, (v("pair", _PAIR), v("broadcast", _BROADCAST)), exact=True),
    Row(
        layers.Concatenate,
        (
            v("last", [x(3, 4, 5), x(3, 4, 2)]),
            v("middle", [x(3, 4, 5), x(3, 2, 5), x(3, 1, 5)], axis=1),
            v("rank2", [x(3, 4), x(3, 2)], axis=1),
        ),
        exact=True,
    ),
    Row(
        layers.Dot,
        (
            v("vectors", [x(3, 5), x(3, 5)], axes=1),
            v("matrices", [x(3, 4, 5), x(3, 5, 6)], axes=(2, 1)),
            v("same_axis", [x(3, 4, 5), x(3, 6, 5)], axes=2),
            v("cosine", [x(3, 5), x(3, 5)], axes=1, normalize=True),
        ),
        masks=False,
    ),
)
