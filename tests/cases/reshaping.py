"""Rows of the reshaping layers."""

from __future__ import annotations

from keras import layers

from tests.cases.row import Row, spatial, v, x

ROWS: tuple[Row, ...] = (
    Row(
        layers.Flatten,
        (
            v("rank3", x(3, 4, 5)),
            v("rank4", x(2, 3, 4, 5)),
            v("rank2", x(3, 5)),
            v("rank1", x(3)),
            v("channels_first", x(2, 3, 4, 5), data_format="channels_first"),
        ),
        exact=True,
        masks=False,
    ),
    Row(
        layers.Reshape,
        (
            v("fixed", x(3, 4, 6), target_shape=(2, 12)),
            v("inferred", x(3, 4, 6), target_shape=(-1, 3)),
            v("flat", x(3, 4, 6), target_shape=(24,)),
            v("same", x(3, 4, 6), target_shape=(4, 6)),
        ),
        exact=True,
        masks=False,
    ),
    Row(
        layers.Permute,
        (
            v("swap", x(3, 4, 5), dims=(2, 1)),
            v("rank4", x(2, 3, 4, 5), dims=(3, 1, 2)),
        ),
        exact=True,
        masks=False,
    ),
    Row(layers.RepeatVector, (v("plain", x(3, 5), n=4),), exact=True, masks=False),
    *(
        Row(getattr(layers, f"{kind}{n}D"), variants, exact=True, masks=False)
        for n in (1, 2, 3)
        for kind, variants in {
            "Cropping": (
                v("plain", x(*spatial(n)), cropping=1),
                v("sides", x(*spatial(n)), cropping=(1, 0) if n == 1 else ((1, 0),) * n),
            ),
            "ZeroPadding": (
                v("plain", x(*spatial(n)), padding=1),
                v("sides", x(*spatial(n)), padding=(0, 2) if n == 1 else ((0, 2),) * n),
            ),
            "UpSampling": (
                v("plain", x(*spatial(n)), size=2),
                *(
                    [v("bilinear", x(*spatial(n)), size=2, interpolation="bilinear")]
                    if n == 2
                    else []
                ),
            ),
        }.items()
    ),
)
