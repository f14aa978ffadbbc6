"""The first-call check: a program's outputs against stock Keras, before it is trusted.

Programs that write no state and draw no random numbers are compared at their first no-grad
call. A program that differs is never used again for that layer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import barrier, compat, dispatch, fallback
from keras_turbo.fallback import Decline, Reason
from keras_turbo.guard import MISS

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
"""The largest allowed max|a-b| / max(1, max|b|) of a model, by dtype."""


def comparable(program: Any) -> bool:
    """Whether running both a program and stock Keras on one input is safe and tells something."""
    return not (program.has_effects or program.stock_calls or program.random)


def checking(program: Any, entry: Callable[..., Any], always: bool) -> Callable[..., Any]:
    """An inline-cache entry that compares before it trusts.

    Args:
        program: the program behind the entry.
        entry: the plain entry, which takes this one's place after a check that passed.
        always: whether to go on comparing instead.
    """

    def checked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled() or compat.function_transform_active():
            # A trace or a mode would see the comparison as part of the call.
            return entry(args, kwargs)
        outputs = entry(args, kwargs)
        layer = program.owner()
        if outputs is MISS or layer is None:
            return outputs
        masks = [getattr(leaf, "_keras_mask", None) for leaf in compat.tree.flatten(outputs)]
        with dispatch.guard_stock():
            expected = dispatch.stock_call(layer, *args, **kwargs)
        problem = difference(outputs, expected, masks)
        if problem is not None:
            _distrust(layer, program, problem)
            return expected
        cache = layer.__dict__.get("_keras_turbo")
        if not always and cache is not None:
            cache.replace(checked, entry)
        return outputs

    return checked


def _distrust(layer: Any, program: Any, problem: str) -> None:
    """Keep a layer on stock Keras for good and say why."""
    barrier.deopt(program)
    cache = layer.__dict__.get("_keras_turbo")
    if cache is not None:
        cache.declined, cache.permanent = Decline(Reason.MISMATCH, problem), True
    if dispatch.options.strict:
        raise fallback.strict_error(layer, Reason.MISMATCH, problem)
    fallback.record(layer, Reason.MISMATCH, problem)
    warnings.warn(
        f"keras_turbo: the program of layer '{fallback.layer_path(layer)}' "
        f"({type(layer).__name__}) gave another result than stock Keras: {problem}. The layer "
        "stays on stock Keras. Please report this, with the layer's get_config().",
        RuntimeWarning,
        stacklevel=4,
    )


def difference(
    outputs: Any,
    expected: Any,
    masks: list[Any] | None = None,
    scale: float = 1.0,
    least: float = 0.0,
) -> str | None:
    """How two results differ, or None if they are equal as the design defines equality.

    Args:
        outputs: nested tensors.
        expected: what they should be.
        masks: the outputs' masks, if they may have been taken off since.
        scale: a factor on the tolerances.
        least: the smallest tolerance of numbers of any kind.
    """
    try:
        compat.tree.assert_same_structure(outputs, expected)
    except (ValueError, TypeError):
        return "another structure"
    leaves = compat.tree.flatten(outputs)
    if masks is None:
        masks = [getattr(leaf, "_keras_mask", None) for leaf in leaves]
    for got, want, mask in zip(leaves, compat.tree.flatten(expected), masks, strict=True):
        if not isinstance(want, torch.Tensor):
            if got is not want and got != want:
                return f"{got!r} instead of {want!r}"
            continue
        problem = tensor_difference(got, want, scale, least)
        if problem is None:
            want_mask = getattr(want, "_keras_mask", None)
            if mask is None or want_mask is None:
                problem = None if mask is want_mask else "a mask that is there on one side only"
            elif not torch.equal(mask, want_mask):
                problem = "another mask"
        if problem is not None:
            return problem
    return None


def tensor_difference(
    got: torch.Tensor, want: torch.Tensor, scale: float = 1.0, least: float = 0.0
) -> str | None:
    """How two tensors differ beyond the tolerance of their dtype, or None."""
    for name in ("dtype", "shape", "device", "requires_grad"):
        if getattr(got, name) != getattr(want, name):
            return f"{name} {getattr(got, name)} instead of {getattr(want, name)}"
    error = max_error(got, want)
    tolerance = scale * TOLERANCE.get(want.dtype, 0.0)
    if want.dtype in TOLERANCE:
        tolerance = max(tolerance, least)
    if not error <= tolerance:
        return f"max|a-b| {error:.3g} beyond {tolerance:g}"
    return None


def max_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max|a-b| / max(1, max|b|); infinities and NaN must stand in the same places."""
    if want.numel() == 0:
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(got, want) else float("inf")
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = got.detach().to(wide), want.detach().to(wide)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return float("inf")
    special = ~finite
    if special.any() and not torch.equal(
        torch.nan_to_num(a[special]) if not want.is_complex() else a[special],
        torch.nan_to_num(b[special]) if not want.is_complex() else b[special],
    ):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / max(1.0, float(b.abs().max())))
