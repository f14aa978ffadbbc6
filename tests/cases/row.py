"""What a row of the case table is: how to build a layer, what to feed it, how equal it must be."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from tests.compare import TOLERANCE

FLOATS = ("float64", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16")


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
        floats: whether inputs are floating-point numbers.
        parts: how many layers it is made of; their rounding errors add up.
        float32_inside: whether stock Keras computes in float32 whatever the policy.
    """

    cls: type
    variants: tuple[Variant, ...]
    exact: bool = False
    masks: bool = True
    training: bool = False
    floats: bool = True
    parts: int = 1
    float32_inside: bool = False

    @property
    def tolerance(self) -> dict[torch.dtype, float]:
        """The tolerance of one layer, or of a model for a layer made of several."""
        factor = 5 if self.parts > 1 else 1
        return {dtype: factor * limit for dtype, limit in TOLERANCE.items()}


def build(row: Row, variant: Variant, **kwargs: Any) -> Any:
    """A built layer with random weights: no variable is left at zeros or ones."""
    import keras_turbo

    layer = row.cls(**{**variant.kwargs, **kwargs})
    with keras_turbo.stock(), torch.no_grad(), contextlib.suppress(NotImplementedError):
        # Torch has no kernel for some dtypes; the layer is built all the same.
        layer(*inputs(variant), **call_of(variant))
    randomize(layer)
    return layer


def randomize(layer: Any) -> None:
    """Move every float variable away from its initial value."""
    with torch.no_grad():
        for variable in layer.variables:
            value = variable.value
            if value.is_floating_point():
                noise = torch.rand(value.shape).to(value.dtype)
                # Variances and scales stay positive.
                value.copy_(value * 0.5 + 0.3 * noise + 0.1)


def make(structure: Any, batch: int | None = None, dtype: str | None = None) -> Any:
    """A structure with every `T` replaced by a fresh tensor."""

    def leaf(item: Any) -> Any:
        if not isinstance(item, T):
            return item
        return item.make(batch, dtype if item.dtype == "float32" else None)

    return keras.tree.map_structure(leaf, structure)


def inputs(variant: Variant, batch: int | None = None, dtype: str | None = None) -> Any:
    """Positional arguments for one call."""
    return make(variant.args, batch, dtype)


def call_of(variant: Variant, batch: int | None = None, dtype: str | None = None) -> Any:
    """Keyword arguments for one call."""
    return make(variant.call, batch, dtype)


def x(*shape: int, dtype: str = "float32", high: int = 10) -> T:
    return T(shape, dtype, high)


def v(name: str, *args: Any, call: Any = None, **kwargs: Any) -> Variant:
    return Variant(name, kwargs, args, call or {})


def einsum(name: str, equation: str, source: T, shape: Any, axes: str | None, **kwargs: Any):
    return v(name, source, equation=equation, output_shape=shape, bias_axes=axes, **kwargs)


def spatial(dimensions: int) -> tuple[int, ...]:
    return (2, *(5, 4, 3)[:dimensions], 3)


def name_of(row: Row, variant: Variant) -> str:
    return f"{row.cls.__name__}-{variant.name}"
