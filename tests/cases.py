"""One row per lowering rule: how to build the layer, what to feed it, how equal it must be.

A row drives every check of `test_rules.py`. Adding a rule means adding a row here and
nothing else: its variants are the constructor arguments and inputs that matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import torch
from keras import layers

FLOATS = ("float64", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16")
HALF = frozenset({"float16", "bfloat16", "mixed_float16", "mixed_bfloat16"})


@dataclass(frozen=True)
class T:
    """One tensor argument: shape with the batch first, and what it holds."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    high: int = 10

    def make(self, batch: int | None = None, dtype: str | None = None) -> torch.Tensor:
        """Fresh random data, never zeros or ones; `batch` replaces the first size."""
        shape = self.shape if batch is None else (batch, *self.shape[1:])
        dtype = dtype or self.dtype
        if dtype == "bool":
            return torch.rand(shape) < 0.6
        if "int" in dtype:
            return torch.randint(0, self.high, shape, dtype=getattr(torch, dtype))
        return torch.randn(shape, dtype=torch.float32).to(getattr(torch, dtype))


@dataclass(frozen=True)
class Variant:
    """One way to construct the layer, with the inputs to call it on."""

    name: str
    kwargs: dict[str, Any]
    args: tuple[Any, ...]
    call: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A rule's row.

    Attributes:
        cls: the Keras class.
        variants: the constructions to try; the first one is the typical one.
        exact: whether outputs are bit-identical to stock.
        masks: whether inputs of rank 3 and more are also tried with a mask.
        training: whether `training=True` differs from `training=False`.
        policies: the dtype policies to try beside float32.
        integers: whether integer inputs make sense.
    """

    cls: type
    variants: tuple[Variant, ...]
    exact: bool = False
    masks: bool = True
    training: bool = False
    policies: tuple[str, ...] = FLOATS
    integers: bool = True


def build(row: Row, variant: Variant, **kwargs: Any) -> Any:
    """A built layer with random weights: no variable is left at zeros or ones."""
    layer = row.cls(**{**variant.kwargs, **kwargs})
    with_stock(layer, inputs(variant), variant.call)
    randomize(layer)
    return layer


def with_stock(layer: Any, args: tuple[Any, ...], call: dict[str, Any]) -> None:
    """Build a layer by one stock call."""
    import keras_turbo

    with keras_turbo.stock(), torch.no_grad():
        layer(*args, **call)


def randomize(layer: Any) -> None:
    """Move every float variable away from its initial value."""
    with torch.no_grad():
        for variable in layer.variables:
            value = variable.value
            if value.is_floating_point():
                noise = torch.rand(value.shape).to(value.dtype)
                # Variances and scales stay positive.
                value.copy_(value * 0.5 + 0.3 * noise + 0.1)


def inputs(variant: Variant, batch: int | None = None, dtype: str | None = None) -> Any:
    """Arguments for one call."""
    return keras.tree.map_structure(
        lambda t: t.make(batch, dtype if dtype and t.dtype == "float32" else None), variant.args
    )


def x(*shape: int, dtype: str = "float32", high: int = 10) -> T:
    return T(shape, dtype, high)


def v(name: str, *args: Any, call: dict[str, Any] | None = None, **kwargs: Any) -> Variant:
    return Variant(name, kwargs, args, call or {})


ROWS: tuple[Row, ...] = (
    Row(
        layers.Dense,
        (
            v("plain", x(3, 5), units=7),
            v("relu", x(3, 5), units=7, activation="relu"),
            v("no_bias", x(3, 5), units=7, use_bias=False),
            v("rank3", x(3, 4, 5), units=7, activation="gelu"),
            v("rank4", x(2, 3, 4, 5), units=6, activation="tanh"),
            v("long_rows", x(4, 700), units=33, activation="sigmoid"),
            v("one_unit", x(4, 6), units=1),
            v(
                "regularized",
                x(3, 5),
                units=4,
                kernel_regularizer="l2",
                bias_regularizer="l1",
                activity_regularizer=keras.regularizers.L1L2(0.1, 0.2),
            ),
            v("softmax", x(3, 5), units=6, activation="softmax"),
        ),
        exact=True,
    ),
)


def cases(first_only: bool = False) -> Iterator[tuple[Row, Variant]]:
    """All rows with their variants, or with the typical one only."""
    for row in ROWS:
        for variant in row.variants[:1] if first_only else row.variants:
            yield row, variant


def name_of(row: Row, variant: Variant) -> str:
    return f"{row.cls.__name__}-{variant.name}"
