"""Explanations: which layers of a model would run as a program, which run stock, and why.

The model is lowered for the call that it declares for itself (`declared_kind`) and the rows
that lowering noted are collected. What cannot be lowered runs stock Keras, and the layers
inside it enter the door on their own, so that each of them is explained by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from keras_turbo import barrier, rules, tables
from keras_turbo.declared import declared_kind
from keras_turbo.fallback import Decline, Reason, layer_path
from keras_turbo.lowering import Row
from keras_turbo.program import build
from keras_turbo.specs import CallKind, TensorKind
from keras_turbo.state import Snapshot

HEADER = ("path", "layer", "runs", "reason")


@dataclass(frozen=True)
class Explanation:
    """What `explain` found, one row per layer.

    Attributes:
        rows: the layers in the order in which they run; each row has the attributes `path`,
            `layer` (the name of the class), `lowered` (a bool) and `reason` (a string, empty
            for a lowered layer).
        training: the training flag that was asked about.
    """

    rows: tuple[Row, ...]
    training: bool

    @property
    def lowered(self) -> int:
        """How many rows are lowered."""
        return sum(row.lowered for row in self.rows)

    @property
    def stock(self) -> int:
        """How many rows run stock Keras."""
        return len(self.rows) - self.lowered

    def __str__(self) -> str:
        return f"{tables.text_table(HEADER, cells(self.rows))}\n{self._summary()}"

    def _repr_html_(self) -> str:
        return tables.html_table(self._summary(), HEADER, cells(self.rows))

    def _summary(self) -> str:
        return f"{self.lowered} lowered, {self.stock} stock (training={self.training})"


def cells(rows: Any) -> list[tuple[str, str, str, str]]:
    """Rows as they are printed."""
    return [
        (row.path, row.layer, "lowered" if row.lowered else "stock", row.reason) for row in rows
    ]


def explain(model: Any, training: bool = False) -> Explanation:
    """Say for each layer of a built model whether it is lowered, and why not where it is not.

    It needs no input, changes nothing about the model, and works whether or not the package
    is enabled.

    Args:
        model: a built `keras.layers.Layer` or model.
        training: explain a call with `training=True`.

    Returns:
        An `Explanation`. A layer that is used several times has one row.

    Example:

    >>> import keras, keras_turbo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")], name="m")
    >>> print(keras_turbo.explain(model))
    path    layer       runs     reason
    ------  ----------  -------  ------
    m       Sequential  lowered
    m/head  Dense       lowered
    2 lowered, 0 stock (training=False)
    """
    rules.load()
    snapshot = Snapshot(model, values=False)
    try:
        with barrier.lowering():
            rows = dict.fromkeys(_explain(model, training))
    finally:
        snapshot.restore()
    return Explanation(tuple(rows), training)


def _explain(layer: Any, training: bool) -> Iterator[Row]:
    try:
        rows = _lowered_rows(layer, training)
    except Decline as declined:
        detail = f": {declined.detail}" if declined.detail else ""
        reason = f"{declined.reason.name}{detail}"
        yield Row(layer_path(layer), type(layer).__name__, False, reason)
        yield from _explain_children(layer, training)
        return
    inner = {(layer_path(item), type(item).__name__): item for item in layer._flatten_layers()}
    for row in rows:
        yield row
        stock = None if row.lowered else inner.get((row.path, row.layer))
        if stock is not None:
            yield from _explain_children(stock, training)


def _explain_children(layer: Any, training: bool) -> Iterator[Row]:
    for child in layer._flatten_layers(include_self=False, recursive=False):
        yield from _explain(child, training)


def _lowered_rows(layer: Any, training: bool) -> list[Row]:
    problem: Decline | None = None
    for kind in _kinds(layer, training):
        try:
            return build(layer, kind).rows
        except Decline as declined:
            problem = problem or declined
    assert problem is not None
    raise problem


def _kinds(layer: Any, training: bool) -> Iterator[CallKind]:
    """The declared kind; for a layer that needs no build, kinds of a few made-up inputs."""
    try:
        yield declared_kind(layer, training)
    except Decline as declined:
        if declined.reason is not Reason.NOT_BUILT or not getattr(layer, "built", False):
            raise
    else:
        return
    for rank in (2, 3, 4, 5):
        tensor = TensorKind("inputs", torch.float32, (None,) * rank)
        yield CallKind((tensor,), {}, True, training, tensors=(tensor,))
    pair = tuple(TensorKind(f"inputs_{i}", torch.float32, (None, None)) for i in range(2))
    yield CallKind((list(pair),), {}, True, training, tensors=pair)
