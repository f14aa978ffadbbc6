"""The case table: one row per lowering rule, one file per family.

A row drives every check of `test_rules.py`. Adding a rule means adding a row to the file
named as the rule's own and nothing else: its variants are the constructor arguments and
inputs that matter. Each family's file has a tuple `ROWS`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from keras_turbo.rules import FAMILIES
from tests.cases.row import (
    FLOATS,
    Row,
    T,
    Variant,
    build,
    call_of,
    inputs,
    make,
    name_of,
    randomize,
    v,
    x,
)

__all__ = [
    "FLOATS",
    "ROWS",
    "Row",
    "T",
    "Variant",
    "build",
    "call_of",
    "cases",
    "inputs",
    "make",
    "name_of",
    "randomize",
    "v",
    "x",
]

WITHOUT_ROWS = frozenset({"models"})
"""Families that have tests of their own."""

ROWS: tuple[Row, ...] = tuple(
    row
    for family in FAMILIES
    if family not in WITHOUT_ROWS
    for row in importlib.import_module(f"tests.cases.{family}").ROWS
)


def cases(first_only: bool = False) -> Iterator[tuple[Row, Variant]]:
    """All rows with their variants, or with the typical one only."""
    for row in ROWS:
        for variant in row.variants[:1] if first_only else row.variants:
            yield row, variant
