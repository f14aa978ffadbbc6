"""One row per lowering rule: how to build the layer, what to feed it, how equal it must be.

A row drives every check of `test_rules.py`. Adding a rule means adding a row here and
nothing else: its variants are the constructor arguments and inputs that matter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import torch
from keras import layers

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


def v(name: str, *args: Any, call: dict[str, Any] | None = None, **kwargs: Any) -> Variant:
    return Variant(name, kwargs, args, call or {})


def einsum(name: str, equation: str, source: T, shape: Any, axes: str | None, **kwargs: Any):
    return v(name, source, equation=equation, output_shape=shape, bias_axes=axes, **kwargs)


DENSE = Row(
    layers.Dense,
    (
        v("plain", x(3, 5), units=7),
        v("relu", x(3, 5), units=7, activation="relu"),
        v("no_bias", x(3, 5), units=7, use_bias=False),
        v("rank3", x(3, 4, 5), units=7, activation="gelu"),
        v("rank4", x(2, 3, 4, 5), units=6, activation="tanh"),
        v("rank5", x(2, 3, 2, 2, 5), units=6, activation="silu"),
        v("long_rows", x(4, 700), units=33, activation="sigmoid"),
        v("one_unit", x(4, 6), units=1),
        v("one_feature", x(4, 1), units=3),
        v(
            "regularized",
            x(3, 5),
            units=4,
            kernel_regularizer="l2",
            bias_regularizer="l1",
            activity_regularizer=keras.regularizers.L1L2(0.1, 0.2),
        ),
        v("softmax", x(3, 5), units=6, activation="softmax"),
        v("layer_activation", x(3, 5), units=6, activation=layers.LeakyReLU(0.3)),
    ),
    exact=True,
)

EINSUM_DENSE = Row(
    layers.EinsumDense,
    (
        einsum("linear", "abc,cd->abd", x(3, 4, 5), (None, 6), "d"),
        einsum("rank2", "ab,bc->ac", x(3, 5), 7, "c", activation="relu"),
        einsum("heads", "abc,cde->abde", x(3, 4, 6), (None, 2, 3), "de"),
        einsum("merge_heads", "abde,dec->abc", x(3, 4, 2, 3), (None, 6), "c"),
        einsum("ellipsis", "...x,xy->...y", x(3, 4, 5), 7, "y"),
        einsum("ellipsis_rank4", "...x,xy->...y", x(2, 3, 4, 5), 7, "y", activation="gelu"),
        einsum("ellipsis_heads", "...x,xyz->...yz", x(2, 3, 5), (2, 4), "yz"),
        einsum("no_bias", "abc,cd->abd", x(3, 4, 5), (None, 6), None),
        einsum("bias_on_one", "abc,cde->abde", x(3, 4, 6), (None, 2, 3), "e"),
        einsum("bias_on_first", "abc,cde->abde", x(3, 4, 6), (None, 2, 3), "d"),
        einsum("bias_on_kept", "abc,cd->abd", x(3, 4, 5), (4, 6), "bd"),
        einsum("bias_on_input_axis", "abc,cd->abd", x(3, 4, 5), (4, 6), "b"),
        einsum("kernel_turned", "abc,dc->abd", x(3, 4, 5), (None, 6), "d"),
        einsum("output_turned", "abc,cd->adb", x(3, 4, 5), (6, 4), "d"),
        einsum("middle_axis", "abc,bd->adc", x(3, 4, 5), (6, 5), "d"),
        einsum("per_position", "abc,bcd->abd", x(3, 4, 5), (4, 6), "d"),
        einsum("elementwise", "abc,c->abc", x(3, 4, 5), (4, 5), "c"),
        einsum("summed_out", "abc,c->ab", x(3, 4, 5), (4,), None),
        einsum("two_summed", "abcd,cde->abe", x(2, 3, 4, 5), (None, 6), "e"),
        einsum("two_summed_turned", "abcd,dce->abe", x(2, 3, 4, 5), (None, 6), "e"),
        einsum("summed_in_input_only", "abc,cd->ad", x(3, 4, 5), (6,), "d"),
        einsum("ellipsis_last", "bx...,xy->by...", x(3, 4, 5), (6, 5), "y"),
        einsum("capital", "aBC,CD->aBD", x(3, 4, 5), (None, 6), "D"),
    ),
)

CORE = (
    DENSE,
    EINSUM_DENSE,
    Row(
        layers.Embedding,
        (
            v("plain", x(3, 6, dtype="int32"), input_dim=10, output_dim=4),
            v("mask_zero", x(3, 6, dtype="int64"), input_dim=10, output_dim=4, mask_zero=True),
            v("float_indices", x(3, 6), input_dim=10, output_dim=4),
            v("rank1", x(5, dtype="int32"), input_dim=10, output_dim=4),
            v("rank3", x(2, 3, 4, dtype="uint8"), input_dim=10, output_dim=4),
            v("int8", x(2, 3, dtype="int8"), input_dim=10, output_dim=4),
            v("int16", x(2, 3, dtype="int16"), input_dim=10, output_dim=4, mask_zero=True),
        ),
        exact=True,
        floats=False,
    ),
    Row(
        layers.Activation,
        (
            v("relu", x(3, 5), activation="relu"),
            v("softmax", x(3, 4, 5), activation="softmax"),
            v("gelu", x(3, 4, 5), activation="gelu"),
        ),
        exact=True,
    ),
    Row(layers.Identity, (v("rank2", x(3, 5)), v("rank3", x(3, 4, 5))), exact=True),
    Row(
        layers.Masking,
        (v("zero", x(3, 4, 5)), v("value", x(3, 4, 5), mask_value=1.5)),
        exact=True,
    ),
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
    Row(
        layers.ActivityRegularization,
        (v("both", x(3, 5), l1=0.1, l2=0.2), v("l2", x(3, 4, 5), l2=0.3)),
        exact=True,
    ),
)

ACTIVATIONS = (
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

_PAIR = [x(3, 4, 5), x(3, 4, 5)]
_TRIPLE = [x(3, 4, 5), x(3, 4, 5), x(3, 4, 5)]
_BROADCAST = [x(3, 4, 5), x(3, 1, 5)]
_RANKS = [x(3, 4, 5), x(3, 5)]

MERGING = (
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


POOLING = tuple(row for dimensions in (1, 2, 3) for row in _pooling(dimensions))


def _spatial(dimensions: int) -> tuple[int, ...]:
    return (2, *(5, 4, 3)[:dimensions], 3)


RESHAPING = (
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
                v("plain", x(*_spatial(n)), cropping=1),
                v("sides", x(*_spatial(n)), cropping=(1, 0) if n == 1 else ((1, 0),) * n),
            ),
            "ZeroPadding": (
                v("plain", x(*_spatial(n)), padding=1),
                v("sides", x(*_spatial(n)), padding=(0, 2) if n == 1 else ((0, 2),) * n),
            ),
            "UpSampling": (
                v("plain", x(*_spatial(n)), size=2),
                *(
                    [v("bilinear", x(*_spatial(n)), size=2, interpolation="bilinear")]
                    if n == 2
                    else []
                ),
            ),
        }.items()
    ),
)

SEEDED = {"seed": 3}

REGULARIZATION = (
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
)

NORMALIZATION = (
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


CONVOLUTION = (
    *(Row(getattr(layers, f"Conv{n}D"), _conv(n), masks=n == 1) for n in (1, 2, 3)),
    *(Row(getattr(layers, f"DepthwiseConv{n}D"), _depthwise(n), masks=n == 1) for n in (1, 2)),
    *(
        Row(getattr(layers, f"SeparableConv{n}D"), _depthwise(n, filters=5), masks=n == 1)
        for n in (1, 2)
    ),
)

_QV = (x(2, 4, 8), x(2, 5, 6))
_SELF = (x(2, 5, 8), x(2, 5, 8))

ATTENTION = (
    Row(
        layers.MultiHeadAttention,
        (
            v("self", *_SELF, num_heads=2, key_dim=4),
            v("cross", *_QV, num_heads=2, key_dim=4),
            v("key", x(2, 4, 8), x(2, 5, 6), x(2, 5, 7), num_heads=2, key_dim=4, value_dim=3),
            v("causal", *_SELF, num_heads=2, key_dim=4, call={"use_causal_mask": True}),
            v("scores", *_QV, num_heads=2, key_dim=4, call={"return_attention_scores": True}),
            v("dropout", *_QV, num_heads=2, key_dim=4, dropout=0.3, seed=5),
            v("no_bias", *_QV, num_heads=2, key_dim=4, use_bias=False, output_shape=5),
            v(
                "mask",
                *_QV,
                num_heads=2,
                key_dim=4,
                call={"attention_mask": x(2, 4, 5, dtype="bool")},
            ),
            v(
                "mask_causal",
                *_SELF,
                num_heads=2,
                key_dim=4,
                call={"attention_mask": x(2, 5, 5, dtype="bool"), "use_causal_mask": True},
            ),
            v("axes", x(2, 3, 4, 8), x(2, 3, 4, 8), num_heads=2, key_dim=4, attention_axes=(2,)),
        ),
        training=True,
        parts=5,
    ),
)

ROWS: tuple[Row, ...] = (
    *CORE,
    *ACTIVATIONS,
    *MERGING,
    *POOLING,
    *RESHAPING,
    *REGULARIZATION,
    *NORMALIZATION,
    *CONVOLUTION,
    *ATTENTION,
)


def cases(first_only: bool = False) -> Iterator[tuple[Row, Variant]]:
    """All rows with their variants, or with the typical one only."""
    for row in ROWS:
        for variant in row.variants[:1] if first_only else row.variants:
            yield row, variant


def name_of(row: Row, variant: Variant) -> str:
    return f"{row.cls.__name__}-{variant.name}"
