"""Rows of the regularization layers."""

from __future__ import annotations

from keras import layers

from tests.cases.row import Row, v, x

SEEDED = {"seed": 3}

ROWS: tuple[Row, ...] = (
    Row(
        layers.Dropout,
        (
            v("seeded", x(3, 4, 5), rate=0.4, **SEEDED),
            v("unseeded", x(3, 4, 5), rate=0.4),
            v("noise_shape", x(3, 4, 5), rate=0.4, noise_shape=(None, 1, 5), **SEEDED),
            v("zero", x(3, 4, 5), rate=0.0),
            v("one", x(3, 4, 5), rate=1.0),
        ),
        exact=True,
        training=True,
    ),
    Row(
        layers.SpatialDropout1D,
        (v("seeded", x(3, 4, 5), rate=0.4, **SEEDED), v("unseeded", x(3, 4, 5), rate=0.4)),
        exact=True,
        training=True,
    ),
    Row(
        layers.SpatialDropout2D,
        (
            v("seeded", x(3, 4, 5, 6), rate=0.4, **SEEDED),
            v("channels_first", x(3, 4, 5, 6), rate=0.4, data_format="channels_first"),
        ),
        exact=True,
        training=True,
    ),
    Row(
        layers.SpatialDropout3D,
        (v("seeded", x(3, 4, 2, 5, 6), rate=0.4, **SEEDED),),
        exact=True,
        training=True,
    ),
    Row(
        layers.GaussianDropout,
        (v("seeded", x(3, 4, 5), rate=0.4, **SEEDED), v("unseeded", x(3, 4, 5), rate=0.4)),
        exact=True,
        training=True,
    ),
    Row(
        layers.GaussianNoise,
        (v("seeded", x(3, 4, 5), stddev=0.4, **SEEDED), v("unseeded", x(3, 4, 5), stddev=0.4)),
        exact=True,
        training=True,
    ),
    Row(
        layers.ActivityRegularization,
        (v("both", x(3, 5), l1=0.1, l2=0.2), v("l2", x(3, 4, 5), l2=0.3)),
        exact=True,
    ),
)
