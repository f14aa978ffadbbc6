"""Verification: stock Keras against the program, on inputs of the user's choice.

Both run from the same snapshot of the model's state and of every random number generator.
Outputs, masks, losses, gradients and the new values of all variables are compared as the
first-call check compares them, and the snapshot is put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from keras_turbo import barrier, check, compat, dispatch, rules, tables
from keras_turbo.fallback import Decline, layer_path
from keras_turbo.program import Program, build
from keras_turbo.specs import map_leaves
from keras_turbo.state import Snapshot

HEADER = ("compared", "count", "max|a-b|", "where")

GRADIENT_FACTOR = 10
"""How much wider than for outputs the tolerance is for gradients.

A gradient sums over the batch and all positions; where the exact sum is zero, as for a bias
in front of a batch normalization, what is left is the rounding of all its terms.
"""


@dataclass(frozen=True)
class VerificationRow:
    """One thing that was compared.

    Attributes:
        name: the output, weight, input or layer.
        kind: `"output"`, `"mask"`, `"loss"`, `"gradient"`, `"variable"`, `"input"` (whether
            the call left it unchanged), `"program"` (what it raised) or `"stock"` (a layer
            that runs stock Keras, with nothing to compare).
        error: max|a-b|; infinite where the two cannot be compared.
        ok: whether the two are equal within the tolerance of their dtype.
        detail: how they differ, or why the layer runs stock Keras.
    """

    name: str
    kind: str
    error: float
    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """What `verify` found.

    Attributes:
        rows: everything that was compared, as `VerificationRow` objects.
        training: the training flag of the call.
    """

    rows: tuple[VerificationRow, ...]
    training: bool

    @property
    def ok(self) -> bool:
        """Whether every row is; what runs stock Keras is right by definition."""
        return all(row.ok for row in self.rows)

    @property
    def max_abs_error(self) -> float:
        """The largest error of all rows."""
        return max((row.error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        lines = [tables.text_table(HEADER, self._summary())] if self._summary() else []
        lines += [
            f"{row.kind} {row.name}: {row.detail}"
            for row in self.rows
            if not row.ok or row.kind == "stock"
        ]
        verdict = "equal to stock Keras" if self.ok else "DIFFERS from stock Keras"
        return "\n".join([*lines, f"{verdict} (training={self.training})"])

    def _summary(self) -> list[tuple[str, int, str, str]]:
        groups: dict[str, list[VerificationRow]] = {}
        for row in self.rows:
            if row.kind not in ("stock", "program"):
                groups.setdefault(row.kind, []).append(row)
        summary = []
        for kind, rows in groups.items():
            worst = max(rows, key=lambda row: row.error)
            where = worst.name if worst.error else ""
            summary.append((kind, len(rows), f"{worst.error:.2g}", where))
        return summary


@dataclass
class _Run:
    """What one of the two runs produced."""

    outputs: Any
    masks: list[Any]
    inputs: list[torch.Tensor]
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    variables: list[torch.Tensor] = field(default_factory=list)


def verify(model: Any, *inputs: Any, training: bool = False) -> Verification:
    """Compare stock Keras with the program, for one call of a built model.

    Gradients are those of a random projection of the outputs, plus the recorded losses, with
    respect to every trainable weight and every floating-point input. The model, the inputs
    and the random number generators are left as they were, and the package need not be
    enabled. A layer that cannot be lowered has a row of the kind `"stock"` that says why; it
    does not make `ok` false, for its results are stock Keras's own.

    Args:
        model: a built `keras.layers.Layer` or model.
        *inputs: the positional arguments of the call: tensors or arrays of any dtype, or
            lists, tuples and dicts of them.
        training: the training flag of the call.

    Returns:
        A `Verification`.

    Raises:
        Exception: what stock Keras raises for this call.

    Example:

    >>> import keras, numpy, keras_turbo
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> keras_turbo.verify(model, numpy.random.normal(size=(3, 4))).ok
    True
    """
    rules.load()
    kwargs = {"training": training}
    args, _ = dispatch.from_numpy(model, inputs, {}) or (inputs, {})
    lowering = Snapshot(model, values=False)
    try:
        with barrier.lowering():
            program = build(model, dispatch.kind_of_call(model, args, kwargs))
    except Decline as declined:
        row = VerificationRow(layer_path(model), "stock", 0.0, True, str(declined))
        return Verification((row,), training)
    finally:
        lowering.restore()
    rows = [
        VerificationRow(row.path, "stock", 0.0, True, row.reason)
        for row in program.rows
        if not row.lowered
    ]
    snapshot = Snapshot(model)
    try:
        with dispatch.guard_stock():
            stock = _run(snapshot, model, args, lambda given: model(*given, **kwargs))
            snapshot.restore()
            try:
                ours = _run(snapshot, model, args, lambda given: _call(program, model, given))
            except Exception as error:  # noqa: BLE001, whatever it raises is the finding
                detail = f"raised {type(error).__name__}: {error}"
                row = VerificationRow(layer_path(model), "program", float("inf"), False, detail)
                return Verification((row, *rows), training)
    finally:
        snapshot.restore()
    names = [variable.path for variable in snapshot.variables]
    return Verification((*_compare(ours, stock, args, names, model), *rows), training)


def _run(snapshot: Snapshot, model: Any, args: Any, call: Callable[[Any], Any]) -> _Run:
    given = map_leaves(_leaf, args)
    tensors = list(_tensors(given))
    weights = [v._value for v in model.trainable_variables]
    with torch.enable_grad():
        outputs = call(given)
        leaves = compat.tree.flatten(outputs)
        run = _Run(outputs, [getattr(leaf, "_keras_mask", None) for leaf in leaves], tensors)
        run.losses = list(model.losses)
        wanted = [tensor for tensor in (*weights, *tensors) if tensor.requires_grad]
        run.gradients = _gradients([*_projections(leaves), *run.losses], wanted)
    run.variables = snapshot.current()
    return run


def _leaf(item: Any) -> Any:
    """A copy of an input that can collect a gradient, with the mask that it carries."""
    if not isinstance(item, torch.Tensor):
        return item
    copy = item.detach().clone()
    mask = getattr(item, "_keras_mask", None)
    if mask is not None:
        copy._keras_mask = mask  # type: ignore[attr-defined]
    return copy.requires_grad_(copy.is_floating_point())


def _tensors(structure: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            found.append(item)
        return item

    map_leaves(note, structure)
    return iter(found)


def _projections(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Each floating-point output reduced to a number, by the same weights on every run."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            dtype = torch.promote_types(leaf.dtype, torch.float32)
            generator = torch.Generator().manual_seed(i)
            weights = torch.randn(leaf.shape, generator=generator).to(leaf.device, dtype)
            yield (leaf.to(dtype) * weights).sum()


def _gradients(parts: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[torch.Tensor | None]:
    parts = [part for part in parts if part.requires_grad]
    if not parts or not wanted:
        return [None] * len(wanted)
    return list(torch.autograd.grad(parts, wanted, allow_unused=True))


def _call(program: Program, model: Any, args: Any) -> Any:
    """Run a program as its inline-cache entry would; layers inside stock nodes run stock."""
    flat: list[torch.Tensor] = []
    for tensor, kind in zip(_tensors(args), program.kind.tensors, strict=True):
        flat.append(tensor)
        if kind.mask is not None:
            flat.append(tensor._keras_mask)  # type: ignore[attr-defined]
    program.begin()
    ambient = compat.ambient()
    ambient["current_call_ctx"] = compat.CallContext(model) if program.stock_calls else None
    try:
        return program.run(*flat)
    finally:
        ambient["current_call_ctx"] = None


def _compare(
    ours: _Run, stock: _Run, args: Any, names: list[str], model: Any
) -> Iterator[VerificationRow]:
    try:
        compat.tree.assert_same_structure(ours.outputs, stock.outputs)
    except (ValueError, TypeError):
        yield VerificationRow("output", "output", float("inf"), False, "another structure")
        return
    outputs = compat.tree.flatten(ours.outputs), compat.tree.flatten(stock.outputs)
    yield from _pairs("output", _numbered("output", len(outputs[1])), *outputs)
    if any(mask is not None for mask in (*ours.masks, *stock.masks)):
        yield from _pairs("mask", _numbered("mask", len(stock.masks)), ours.masks, stock.masks)
    if len(ours.losses) != len(stock.losses):
        detail = f"{len(ours.losses)} instead of {len(stock.losses)}"
        yield VerificationRow("losses", "loss", float("inf"), False, detail)
    else:
        yield from _pairs("loss", _numbered("loss", len(stock.losses)), ours.losses, stock.losses)
    inputs = _numbered("input", len(stock.inputs))
    trainable = [v.path for v in model.trainable_variables if v._value.requires_grad]
    floating = [n for n, t in zip(inputs, stock.inputs, strict=True) if t.requires_grad]
    yield from _pairs("gradient", [*trainable, *floating], ours.gradients, stock.gradients)
    yield from _pairs("variable", names, ours.variables, stock.variables)
    before = [tensor.detach() for tensor in _tensors(args)]
    yield from _pairs("input", inputs, [tensor.detach() for tensor in ours.inputs], before)


def _numbered(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]


def _pairs(
    kind: str, names: list[str], ours: Iterable[Any], stock: Iterable[Any]
) -> Iterator[VerificationRow]:
    for name, got, want in zip(names, ours, stock, strict=True):
        if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor):
            problem = _difference(kind, got, want)
            yield VerificationRow(name, kind, _error(got, want), problem is None, problem or "")
        elif (got is None and want is None) or got == want:
            yield VerificationRow(name, kind, 0.0, True)
        else:
            detail = "there on one side only" if None in (got, want) else f"{got!r} not {want!r}"
            yield VerificationRow(name, kind, float("inf"), False, detail)


def _difference(kind: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    problem = check.tensor_difference(got, want)
    if problem is None or kind != "gradient" or got.shape != want.shape or got.dtype != want.dtype:
        return problem
    tolerance = GRADIENT_FACTOR * check.TOLERANCE.get(want.dtype, 0.0)
    return None if check.max_error(got, want) <= tolerance else problem


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|a-b|, infinite where the shapes differ or only one of the two is finite."""
    if got.shape != want.shape:
        return float("inf")
    relative = check.max_error(got, want)
    if not relative:
        return 0.0
    finite = want.detach()[torch.isfinite(want)].abs().double()
    return relative * max(1.0, float(finite.max()) if finite.numel() else 1.0)
