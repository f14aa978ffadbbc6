"""Stock against turbo: run a layer both ways from one state and compare all that is visible.

What is visible: outputs with dtype, shape, mask and `requires_grad`; recorded losses; every
variable's new value; first and second gradients for weights and inputs; or the exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import torch
from keras import tree

import keras_turbo

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
MODEL_TOLERANCE = {**TOLERANCE, torch.float32: 1e-5}


@dataclass
class Seen:
    """What one call let the caller see."""

    outputs: Any = None
    error: Exception | None = None
    masks: list[Any] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    state: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    second: list[torch.Tensor | None] = field(default_factory=list)
    second_error: Exception | None = None


def snapshot(layer: Any) -> list[torch.Tensor]:
    """Copies of all variables of a layer, seed states included."""
    return [v.value.detach().clone() for v in layer.variables]


def restore(layer: Any, state: list[torch.Tensor]) -> None:
    """Write a snapshot back into the variables' own storage."""
    with torch.no_grad():
        for variable, value in zip(layer.variables, state, strict=True):
            variable.value.copy_(value)


def fresh(args: Any, grad: bool) -> Any:
    """The arguments again, as leaves of a new autograd graph, with their masks."""

    def copy(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        leaf = item.detach()
        if item.is_contiguous():
            leaf = leaf.clone()
        if grad and leaf.is_floating_point():
            leaf.requires_grad_()
        mask = getattr(item, "_keras_mask", None)
        if mask is not None:
            leaf._keras_mask = mask
        return leaf

    return tree.map_structure(copy, args)


def floats(structure: Any) -> list[torch.Tensor]:
    return [
        t
        for t in tree.flatten(structure)
        if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
    ]


def observe(
    layer: Any,
    args: tuple[Any, ...],
    call: dict[str, Any] | None = None,
    *,
    grad: bool = True,
    second: bool = False,
    seed: int = 7,
    function: Callable[..., Any] | None = None,
) -> Seen:
    """Call a layer once and note everything a caller can see."""
    args, call = fresh((args, call or {}), grad)
    # As torch.manual_seed, without the stack trace that it formats for other devices.
    torch.default_generator.manual_seed(seed)
    before = [t.detach().clone() for t in tree.flatten((args, call)) if torch.is_tensor(t)]
    with torch.set_grad_enabled(grad):
        try:
            outputs = (function or layer)(*args, **call)
        except keras_turbo.FallbackError:
            raise
        except Exception as error:  # noqa: BLE001 - which one it is gets compared
            return Seen(error=error, state=snapshot(layer))
    inputs = [t for t in tree.flatten((args, call)) if torch.is_tensor(t)]
    for old, new in zip(before, inputs, strict=True):
        assert torch.equal(old, new.detach()) or old.isnan().any(), "an input was changed"
    seen = Seen(outputs)
    seen.masks = [getattr(t, "_keras_mask", None) for t in tree.flatten(outputs)]
    seen.losses = list(layer.losses) if isinstance(layer, keras.layers.Layer) else []
    seen.state = snapshot(layer)
    if grad:
        _gradients(seen, layer, args, second)
    return seen


def _gradients(seen: Seen, layer: Any, args: Any, second: bool) -> None:
    wanted = [t for t in floats(args) if t.requires_grad]
    wanted += [v.value for v in layer.trainable_variables]
    total = _dot([t for t in floats(seen.outputs) if t.requires_grad], 11)
    if total is None or not wanted:
        return
    grads = torch.autograd.grad(
        total, wanted, allow_unused=True, create_graph=second, retain_graph=True
    )
    seen.gradients = [None if g is None else g.detach() for g in grads]
    if not second:
        return
    total = _dot([g for g in grads if g is not None and g.requires_grad], 13)
    if total is None:
        seen.second = [None] * len(wanted)
        return
    try:
        seen.second = list(torch.autograd.grad(total, wanted, allow_unused=True))
    except RuntimeError as error:
        seen.second_error = error


def _dot(tensors: list[torch.Tensor], seed: int) -> torch.Tensor | None:
    """A random linear function of some tensors, the same each time."""
    generator = torch.Generator().manual_seed(seed)
    total = None
    for tensor in tensors:
        weights = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        term = (tensor * weights).sum()
        total = term if total is None else total.double() + term.double()
    return total


def limits(tolerance: dict[torch.dtype, float], compute: torch.dtype) -> dict[Any, float]:
    """Tolerances where part of the computation ran in this dtype, as in mixed precision."""
    return {dtype: max(limit, tolerance[compute]) for dtype, limit in tolerance.items()}


def assert_same(
    got: Seen, want: Seen, *, exact: bool = False, tolerance: dict[Any, float] | None = None
) -> None:
    """Assert that two calls looked the same to the caller.

    Args:
        got: the call under turbo.
        want: the call under stock Keras.
        exact: whether the outputs must agree to the bit.
        tolerance: largest max|a-b| / max(1, max|b|) by dtype.
    """
    if want.error is not None or got.error is not None:
        assert_same_error(got.error, want.error)
        _all_close(got.state, want.state, "state after the error", exact=True)
        return
    tree.assert_same_structure(got.outputs, want.outputs)
    leaves = list(zip(tree.flatten(got.outputs), tree.flatten(want.outputs), strict=True))
    for a, b in leaves:
        close(a, b, "output", exact=exact, tolerance=tolerance)
        if torch.is_tensor(b):
            assert a.requires_grad == b.requires_grad, "requires_grad"
    for a, b in zip(got.masks, want.masks, strict=True):
        assert (a is None) == (b is None), f"mask {a} instead of {b}"
        if b is not None:
            close(a, b, "mask", exact=True)
    _all_close(got.losses, want.losses, "loss", tolerance=tolerance)
    _all_close(got.state, want.state, "variable", tolerance=tolerance)
    _all_close(got.gradients, want.gradients, "gradient", tolerance=tolerance)
    assert type(got.second_error) is type(want.second_error)
    # A second gradient that is zero may also be no gradient at all: which of the two it is
    # depends on how the first gradient was written, not on its value.
    second = _or_none(got.second), _or_none(want.second)
    _all_close(*second, "second gradient", tolerance=tolerance)


def assert_same_error(got: Exception | None, want: Exception | None) -> None:
    """Assert that two exceptions have the same type and message."""
    assert type(got) is type(want), f"{got!r} instead of {want!r}"
    assert str(got) == str(want)


def _or_none(gradients: list[Any]) -> list[Any]:
    return [None if g is None or not g.any() else g for g in gradients]


def _all_close(got: list[Any], want: list[Any], what: str, **how: Any) -> None:
    assert len(got) == len(want), f"{len(got)} times a {what} instead of {len(want)}"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a is None) == (b is None), f"{what} {i}: {a} instead of {b}"
        if b is not None:
            close(a, b, f"{what} {i}", **how)


def close(
    a: Any, b: Any, what: str = "value", *, exact: bool = False, tolerance: Any = None
) -> None:
    """Assert that two leaves are equal as the design defines equality."""
    if not torch.is_tensor(b):
        assert type(a) is type(b) and a == b, f"{what}: {a!r} instead of {b!r}"
        return
    for name in ("dtype", "shape", "device"):
        assert getattr(a, name) == getattr(b, name), (
            f"{what}: {name} {getattr(a, name)} instead of {getattr(b, name)}"
        )
    a, b = a.detach(), b.detach()
    if b.dtype.is_floating_point:
        limit = 0.0 if exact else (tolerance or TOLERANCE)[b.dtype]
        finite = torch.isfinite(b)
        assert torch.equal(finite, torch.isfinite(a)), f"{what}: other non-finite places"
        assert torch.equal(
            torch.nan_to_num(a[~finite], nan=1.5), torch.nan_to_num(b[~finite], nan=1.5)
        ), f"{what}: other infinities"
        a, b = a[finite].double(), b[finite].double()
        if b.numel():
            error = float((a - b).abs().max() / max(1.0, float(b.abs().max())))
            assert error <= limit, f"{what}: max|a-b| {error:.3g} beyond {limit:g}"
    else:
        assert torch.equal(a, b), f"{what}: {a} instead of {b}"


def both(
    layer: Any,
    args: tuple[Any, ...],
    call: dict[str, Any] | None = None,
    *,
    exact: bool = False,
    tolerance: dict[Any, float] | None = None,
    **how: Any,
) -> Seen:
    """Run a layer under turbo, under stock and again under turbo, each from the same state.

    Turbo goes first because lowering may lay parameters out anew: stock then reads the same
    storage, and results can agree to the bit.

    Returns:
        What stock Keras showed.
    """
    state = snapshot(layer)
    first = observe(layer, args, call, **how)
    restore(layer, state)
    with keras_turbo.stock():
        want = observe(layer, args, call, **how)
    restore(layer, state)
    again = observe(layer, args, call, **how)
    assert_same(first, want, exact=exact, tolerance=tolerance)
    assert_same(again, want, exact=exact, tolerance=tolerance)
    return want


def agree(layer: Any, *args: Any, tolerance: Any = None, **call: Any) -> Any:
    """Run both ways with a model's tolerance, and return the outputs, detached.

    The call must succeed; where an error is the right answer, use `both`.
    """
    want = both(layer, args, call, tolerance=tolerance or MODEL_TOLERANCE)
    assert want.error is None, want.error
    return tree.map_structure(
        lambda t: t.detach() if isinstance(t, torch.Tensor) else t, want.outputs
    )


def programs(layer: Any) -> tuple[Any, ...]:
    """The programs in a layer's inline cache."""
    cache = layer.__dict__.get("_keras_turbo")
    return () if cache is None else cache.programs


def assert_lowered(layer: Any) -> None:
    """Assert that a layer has programs, and that these hold no stock node."""
    assert programs(layer), f"{layer.name} has no program"
    for program in programs(layer):
        rows = [row for row in program.rows if not row.lowered]
        assert not rows and not program.stock_calls, rows
