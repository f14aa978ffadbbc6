"""Rows of the pooling layers."""

from __future__ import annotations

from collections.abc import Iterator

from keras import layers

from tests.cases.row import Row, v, x


def _pooling(dimensions: int) -> Iterator[Row]:
    shape = (3, *(7, 6, 5)[:dimensions], 4)
    first = (3, 4, *(7, 6, 5)[:dimensions])
    for kind in ("Max", "Average"):
        cls = getattr(layers, f"{kind}Pooling{dimensions}D")
        yield Row(
            cls,
            (
                v("plain", x(*shape), pool_size=2),
                v("same", x(*shape), pool_size=3, strides=2, padding="same"),
                v("overlap", x(*shape), pool_size=3, strides=1),
                v("same_overlap", x(*shape), pool_size=2, strides=1, padding="same"),
                v("channels_first", x(*first), pool_size=2, data_format="channels_first"),
            ),
            exact=True,
            masks=False,
        )
        cls = getattr(layers, f"Global{kind}Pooling{dimensions}D")
        yield Row(
            cls,
            (
                v("plain", x(*shape)),
                v("keepdims", x(*shape), keepdims=True),
                v("channels_first", x(*first), data_format="channels_first"),
            ),
            exact=True,
            masks=cls is layers.GlobalAveragePooling1D,
        )


ROWS: tuple[Row, ...] = tuple(row for dimensions in (1, 2, 3) for row in _pooling(dimensions))
