"""Rows of the core layers."""

from __future__ import annotations

import keras
from keras import layers

from tests.cases.row import Row, einsum, v, x

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

ROWS: tuple[Row, ...] = (
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
)
