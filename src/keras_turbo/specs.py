"""The kind of a call: what a program assumes about its arguments.

A `CallKind` holds the structure of the arguments with every tensor replaced by its dtype,
sizes and mask. Dispatch derives it from a real call, `explain` and `lower` from a model's
declared inputs; the guard is generated from it, and lowering turns it into traced values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from keras_turbo.fallback import Decline, Reason

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TensorKind:
    """What a program assumes about one tensor argument.

    Attributes:
        name: the argument's name in the program.
        dtype: its dtype.
        sizes: the size of each axis in the call that is lowered, None where unknown.
        static: the axes whose size the guard checks.
        mask: the kind of the Keras mask it carries, if any.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    static: frozenset[int] = frozenset()
    mask: TensorKind | None = None


@dataclass(frozen=True)
class CallKind:
    """What a program assumes about a whole call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_training: bool = False
    training: bool | None = None
    context_training: bool | None = None
    autocast: str | None = None
    autocast_dtype: torch.dtype | None = None
    tensors: tuple[TensorKind, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Site:
    """One axis of one tensor argument, or of the mask that it carries."""

    position: int
    axis: int
    mask: bool = False


@dataclass(frozen=True)
class Relation:
    """A true comparison between two sizes of the inputs, or a size and a number."""

    symbol: str
    left: Site | float
    right: Site | float


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to the leaves of nested tuples, lists and dicts."""
    kind = type(structure)
    if kind is tuple:
        return tuple([map_leaves(function, item) for item in structure])
    if kind is list:
        return [map_leaves(function, item) for item in structure]
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return kind(*[map_leaves(function, item) for item in structure])
    return function(structure)


def kind_of(
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static_axes: Callable[[int, Any], frozenset[int]],
    **scope: Any,
) -> CallKind:
    """The kind of a real call.

    Args:
        names: the parameter names of the layer's `call`.
        args: positional arguments.
        kwargs: keyword arguments.
        static_axes: from a tensor's position and the tensor to the axes to guard.
        **scope: context_training, autocast and autocast_dtype of the `CallKind`.

    Raises:
        Decline: for an argument that is neither a plain tensor nor a constant.
    """
    tensors: list[TensorKind] = []

    def convert(name: str, item: Any) -> Any:
        kind = type(item)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            tensor = _tensor_kind(name, item, static_axes(len(tensors), item))
            tensors.append(tensor)
            return tensor
        if kind in (tuple, list):
            return kind(convert(f"{name}_{i}", entry) for i, entry in enumerate(item))
        if kind is dict:
            if not all(type(key) is str for key in item):
                raise Decline(Reason.STRUCTURE, f"{name} has keys that are not strings")
            return {key: convert(str(key), entry) for key, entry in item.items()}
        if kind in _CONSTANTS:
            return item
        raise Decline(Reason.INPUT, f"{name} is a {kind.__name__}")

    names = names + tuple(f"arg{i}" for i in range(len(names), len(args)))
    new_args = tuple(convert(name, item) for name, item in zip(names, args, strict=False))
    rest = {key: convert(key, item) for key, item in kwargs.items() if key != "training"}
    training = kwargs.get("training")
    if training is not None and type(training) is not bool:
        raise Decline(Reason.INPUT, f"training is a {type(training).__name__}")
    return CallKind(new_args, rest, "training" in kwargs, training, tensors=tuple(tensors), **scope)


def _tensor_kind(name: str, tensor: torch.Tensor, static: frozenset[int]) -> TensorKind:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise Decline(Reason.INPUT, f"{name} is not a dense tensor")
    mask = getattr(tensor, "_keras_mask", None)
    mask_kind = None
    if mask is not None:
        if type(mask) is not torch.Tensor:
            raise Decline(Reason.MASK, f"the mask of {name} is a {type(mask).__name__}")
        mask_kind = TensorKind(f"{name}_mask", mask.dtype, tuple(mask.shape))
    return TensorKind(name, tensor.dtype, tuple(tensor.shape), static, mask_kind)


def _primes() -> Iterator[int]:
    candidate = 101
    while True:
        if all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
            yield candidate
        candidate += 2


_COMPARISONS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "==": (operator.eq, "!="),
    "!=": (operator.ne, "=="),
    "<": (operator.lt, ">="),
    "<=": (operator.le, ">"),
    ">": (operator.gt, "<="),
    ">=": (operator.ge, "<"),
}
"""Comparisons and what each becomes when its outcome is False."""


class FakeSizes:
    """Two sets of made-up sizes for the dynamic dimensions of a call.

    Args:
        free: from a tensor's position, axis and size, whether the axis stays dynamic.
        last: whether no further strategy follows this one.
    """

    def __init__(self, free: Callable[[int, int | None], bool], last: bool) -> None:
        self.free = free
        self.last = last
        self.fixed: list[tuple[int, int, int]] = []
        self.relations: list[Relation] = []
        self._primes = _primes()
        self._fakes: dict[Any, tuple[int, int]] = {}
        self._sites: dict[tuple[int, int], list[Site]] = {}
        self._actual: dict[tuple[int, int], int | None] = {}

    @classmethod
    def strategies(cls, kind: CallKind) -> Iterator[FakeSizes]:
        """From the most general to the most special assumption about sizes."""
        sizes = {(i, axis, n) for i, t in enumerate(kind.tensors) for axis, n in enumerate(t.sizes)}
        yield cls(lambda axis, size: True, last=not sizes)
        if any(n == 1 and axis for _, axis, n in sizes):
            yield cls(lambda axis, size: axis == 0 or size != 1, last=False)
        if any(axis and n is not None for _, axis, n in sizes):
            yield cls(lambda axis, size: axis == 0 or size is None, last=False)
        if all(n is not None for _, _, n in sizes) and sizes:
            yield cls(lambda axis, size: False, last=True)

    def metas(self, position: int, kind: TensorKind) -> tuple[torch.Tensor, torch.Tensor]:
        """The meta tensors of an input, and note which of its sizes are now fixed."""
        pairs = []
        for axis, size in enumerate(kind.sizes):
            if size is not None and (axis in kind.static or not self.free(axis, size)):
                if axis not in kind.static:
                    self.fixed.append((position, axis, size))
                pairs.append((size, size))
            else:
                pairs.append(self._fake(Site(position, axis), size))
        return self._tensors(pairs, kind.dtype)

    def mask_metas(self, position: int, kind: TensorKind) -> tuple[torch.Tensor, torch.Tensor]:
        """The meta tensors of an input's mask."""
        assert kind.mask is not None
        fixed = {(p, a): n for p, a, n in self.fixed}
        pairs = []
        for axis, size in enumerate(kind.mask.sizes):
            same_axis = axis < len(kind.sizes) and kind.sizes[axis] == size
            if (
                same_axis
                and size is not None
                and (axis in kind.static or (position, axis) in fixed)
            ):
                pairs.append((size, size))
            else:
                pairs.append(self._fake(Site(position, axis, mask=True), size))
        return self._tensors(pairs, kind.mask.dtype)

    def _fake(self, site: Site, size: int | None) -> tuple[int, int]:
        key = (size, site.axis) if size is None or size == 1 else size
        if key not in self._fakes:
            # No two pairs differ by the same amount: an offset cannot turn one into another.
            gaps = {b - a for a, b in self._fakes.values()}
            first = next(self._primes)
            second = next(p for p in self._primes if p - first not in gaps)
            self._fakes[key] = (first, second)
        pair = self._fakes[key]
        self._sites.setdefault(pair, []).append(site)
        self._actual[pair] = size
        return pair

    def compare(self, symbol: str, left: tuple[Any, Any], right: tuple[Any, Any]) -> bool:
        """The outcome of a comparison of sizes, of which the guard then makes sure.

        Args:
            symbol: one of `==`, `!=`, `<`, `<=`, `>`, `>=`.
            left: the left side at both made-up sizes.
            right: the right side at both.

        Raises:
            Decline: when the outcome is not a matter of the inputs' sizes alone.
        """
        compare = _COMPARISONS[symbol][0]
        outcomes = {compare(a, b) for a, b in zip(left, right, strict=True)}
        operands = [self._operand(left), self._operand(right)]
        actual = [operand[1] for operand in operands]
        if None not in actual:
            outcomes.add(compare(*actual))
        if len(outcomes) != 1:
            raise Decline(Reason.CONTROL_FLOW, "a branch on a dynamic dimension")
        outcome = outcomes.pop()
        (first, *same), (second, *same_too) = (operand[0] for operand in operands)
        relations = [Relation("==", first, site) for site in same]
        relations += [Relation("==", second, site) for site in same_too]
        if left != right:
            symbol = symbol if outcome else _COMPARISONS[symbol][1]
            relations.append(Relation(symbol, first, second))
        self.relations += [r for r in dict.fromkeys(relations) if r not in self.relations]
        return outcome

    def real(self, metas: tuple[torch.Tensor, torch.Tensor]) -> str:
        """The shape of a traced tensor in the call that is lowered, for a reason's detail."""
        pairs = list(zip(metas[0].shape, metas[1].shape, strict=True))
        sizes = [str(a if a == b else self._actual.get((a, b), "?")) for a, b in pairs]
        return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"

    def _operand(self, pair: tuple[Any, Any]) -> tuple[list[Any], Any]:
        """Where a size stands, or the number that it is, and its value in the real call."""
        if pair in self._sites:
            return self._sites[pair], self._actual[pair]
        if pair[0] != pair[1]:
            raise Decline(Reason.CONTROL_FLOW, "a branch on a computed dimension")
        return [pair[0]], pair[0]

    @staticmethod
    def _tensors(
        pairs: list[tuple[int, int]], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (
            torch.empty([pair[i] for pair in pairs], dtype=dtype, device="meta") for i in (0, 1)
        )
        return first, second
