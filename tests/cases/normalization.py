"""Rows of the normalization layers."""

from __future__ import annotations

from keras import layers

from tests.cases.row import Row, v, x

ROWS: tuple[Row, ...] = (
    Row(
        layers.BatchNormalization,
        (
            v("rank2", x(6, 5)),
            v("rank3", x(6, 4, 5), momentum=0.7),
            v("rank4", x(2, 4, 4, 5), epsilon=1e-2),
            v("axis1", x(3, 4, 5, 5), axis=1),
            v("plain", x(3, 4, 5), center=False, scale=False),
            v("frozen", x(3, 4, 5), trainable=False),
        ),
        training=True,
        float32_inside=True,
    ),
    Row(
        layers.LayerNormalization,
        (
            v("rank3", x(3, 4, 5)),
            v("rank2", x(3, 5), epsilon=1e-5),
            v("two_axes", x(3, 4, 5), axis=(1, 2)),
            v("no_center", x(3, 4, 5), center=False),
            v("no_scale", x(3, 4, 5), scale=False),
            v("neither", x(3, 4, 5), center=False, scale=False),
        ),
    ),
    Row(
        layers.RMSNormalization,
        (
            v("rank3", x(3, 4, 5)),
            v("rank2", x(3, 5)),
            v("two_axes", x(3, 4, 5), axis=(1, 2)),
        ),
    ),
    Row(
        layers.GroupNormalization,
        (
            v("two", x(2, 4, 4, 6), groups=2),
            v("all", x(2, 4, 6), groups=-1),
            v("axis1", x(2, 6, 4, 4), groups=3, axis=1),
            v("plain", x(2, 4, 6), groups=3, center=False, scale=False),
        ),
    ),
    Row(layers.UnitNormalization, (v("last", x(3, 5)), v("axis", x(3, 4, 5), axis=1))),
)
