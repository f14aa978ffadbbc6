"""Lowering rules, one file per family, named as Keras names its folders.

A rule is plain torch code over traced values. Importing a family registers its rules.
"""

from __future__ import annotations

import functools
import importlib

FAMILIES = (
    "models",
    "core",
    "activations",
    "attention",
    "convolutional",
    "merging",
    "normalization",
    "pooling",
    "preprocessing",
    "regularization",
    "reshaping",
    "rnn",
)


@functools.cache
def load() -> None:
    """Register the rules of all families."""
    for family in FAMILIES:
        importlib.import_module(f"keras_turbo.rules.{family}")
