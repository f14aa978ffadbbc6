"""Rows of the attention layers."""

from __future__ import annotations

from keras import layers

from tests.cases.row import Row, v, x

_QV = (x(2, 4, 8), x(2, 5, 6))
_SELF = (x(2, 5, 8), x(2, 5, 8))

ROWS: tuple[Row, ...] = (
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
