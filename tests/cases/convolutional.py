"""Rows of the convolutions."""

from __future__ import annotations

from typing import Any

from keras import layers

from tests.cases.row import Row, Variant, v, x


def _conv(dimensions: int) -> tuple[Variant, ...]:
    shape, first = (2, *(9, 8, 7)[:dimensions], 4), (2, 4, *(9, 8, 7)[:dimensions])
    variants = [
        v("plain", x(*shape), filters=6, kernel_size=3, activation="relu"),
        v("same", x(*shape), filters=6, kernel_size=3, padding="same"),
        v("strides", x(*shape), filters=6, kernel_size=3, strides=2, padding="same"),
        v("even", x(*shape), filters=6, kernel_size=2, padding="same", use_bias=False),
        v("dilated", x(*shape), filters=6, kernel_size=3, dilation_rate=2),
        v("groups", x(*shape), filters=6, kernel_size=3, groups=2),
        v("one_by_one", x(*shape), filters=5, kernel_size=1),
        v("one_by_one_strides", x(*shape), filters=5, kernel_size=1, strides=2),
        v("first", x(*first), filters=6, kernel_size=3, data_format="channels_first"),
        v(
            "first_same",
            x(*first),
            filters=6,
            kernel_size=3,
            padding="same",
            data_format="channels_first",
            strides=2,
        ),
    ]
    if dimensions == 1:
        variants.append(v("causal", x(*shape), filters=6, kernel_size=3, padding="causal"))
    return tuple(variants)


def _depthwise(dimensions: int, **extra: Any) -> tuple[Variant, ...]:
    shape, first = (2, *(9, 8)[:dimensions], 4), (2, 4, *(9, 8)[:dimensions])
    return (
        v("plain", x(*shape), kernel_size=3, **extra),
        v("same", x(*shape), kernel_size=3, padding="same", activation="relu", **extra),
        v("strides", x(*shape), kernel_size=3, strides=2, padding="same", **extra),
        v("multiplier", x(*shape), kernel_size=2, depth_multiplier=2, use_bias=False, **extra),
        v("dilated", x(*shape), kernel_size=3, dilation_rate=2, **extra),
        v("first", x(*first), kernel_size=3, data_format="channels_first", **extra),
    )


ROWS: tuple[Row, ...] = (
    *(Row(getattr(layers, f"Conv{n}D"), _conv(n), masks=n == 1) for n in (1, 2, 3)),
    *(Row(getattr(layers, f"DepthwiseConv{n}D"), _depthwise(n), masks=n == 1) for n in (1, 2)),
    *(
        Row(getattr(layers, f"SeparableConv{n}D"), _depthwise(n, filters=5), masks=n == 1)
        for n in (1, 2)
    ),
)
