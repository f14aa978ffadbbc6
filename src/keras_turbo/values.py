"""Values that stand for tensors and sizes while a rule runs: `torch.fx` proxies that know more.

A `Value` knows its dtype and rank, and which of its dimensions are static; a `Dim` is a
dimension that is known only at run time. Rules are plain torch code over them, and Keras's
own backend functions take them for tensors.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

from keras_turbo.fallback import Decline, Reason

if TYPE_CHECKING:
    from keras_turbo.tracing import Tracer

_TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))


class Traced(fx.Proxy):
    """What stands for something that torch's functions take."""

    @classmethod
    def __torch_function__(
        cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None
    ) -> Any:
        """Append a call, as `fx.Proxy` does, which changes Python's warning filters for it.

        Warnings that the user should see once would then come again and again.
        """
        args, kwargs = args or (), kwargs or {}
        if isinstance(orig_method, (torch._C.ScriptMethod, torch._ops.HigherOrderOperator)):
            return super().__torch_function__(orig_method, types, args, kwargs)
        tracer = _first_proxy((args, kwargs)).tracer
        name = getattr(orig_method, "__name__", "")
        if name == "__get__" or getattr(torch.Tensor, name, None) is orig_method:
            return tracer.create_proxy("call_method", name, args, kwargs)
        return tracer.create_proxy("call_function", orig_method, args, kwargs)


def _first_proxy(item: Any) -> Any:
    if isinstance(item, fx.Proxy):
        return item
    if isinstance(item, dict):
        item = item.values()
    elif not isinstance(item, (tuple, list)):
        return None
    found = (_first_proxy(entry) for entry in item)
    return next((proxy for proxy in found if proxy is not None), None)


class Dim(Traced):
    """A number that is known only at run time, such as a batch size."""

    def __init__(self, node: fx.Node, tracer: Tracer, metas: tuple[Any, Any]) -> None:
        super().__init__(node, tracer)
        self.metas = metas

    @property
    def __class__(self) -> type:
        return torch.SymFloat if isinstance(self.metas[0], float) else torch.SymInt

    def __repr__(self) -> str:
        """A mark for messages; no number, which code that reads it might take for the size."""
        return "?"

    def __bool__(self) -> bool:
        raise Decline(Reason.CONTROL_FLOW, "a branch on a dynamic dimension")

    def __index__(self) -> int:
        raise Decline(Reason.CONTROL_FLOW, "a dynamic dimension used as a Python number")

    __int__ = __index__

    def _compare(self, symbol: str, other: Any) -> Any:
        if type(other) is Dim:
            metas = other.metas
        elif isinstance(other, numbers.Real):
            metas = (other, other)
        else:
            return NotImplemented
        if self.metas[0] == self.metas[1] or (type(other) is Dim and metas[0] == metas[1]):
            # Computed, such as a remainder: equal at both made-up sizes, not at every size.
            raise Decline(Reason.CONTROL_FLOW, "a branch on a computed dimension")
        return self.tracer.sizes.compare(symbol, self.metas, metas)

    def __eq__(self, other: object) -> Any:
        return self._compare("==", other)

    def __ne__(self, other: object) -> Any:
        return self._compare("!=", other)

    def __lt__(self, other: Any) -> Any:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Any:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compare(">=", other)

    def __hash__(self) -> int:
        return id(self)


class Value(Traced):
    """A tensor inside a program that is being lowered.

    It passes `isinstance(value, torch.Tensor)`, so that Keras's own backend functions can
    be traced as they are. `_keras_mask` is an ordinary attribute, as on a tensor.
    """

    def __init__(self, node: fx.Node, tracer: Tracer, metas: tuple[Any, Any]) -> None:
        super().__init__(node, tracer)
        self.metas = metas
        self._shape: tuple[Any, ...] | None = None

    @property
    def __class__(self) -> type:
        return torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.metas[0].dtype

    @property
    def ndim(self) -> int:
        return self.metas[0].ndim

    def dim(self) -> int:
        return self.metas[0].ndim

    @property
    def device(self) -> torch.device:
        return self.tracer.device

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def requires_grad(self) -> bool:
        raise Decline(Reason.CONTROL_FLOW, "requires_grad read during the call")

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape: an `int` for a static dimension, a `Dim` for a dynamic one."""
        if self._shape is None:
            first, second = self.metas
            if first.shape == second.shape:
                self._shape = tuple(first.shape)
            else:
                sizes = self.tracer.create_proxy("call_function", getattr, (self, "shape"), {})
                self._shape = tuple(
                    a if a == b else sizes[i]
                    for i, (a, b) in enumerate(zip(first.shape, second.shape, strict=True))
                )
        return self._shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> Any:
        known = math.prod(size for size in self.shape if isinstance(size, int))
        total: Any = None
        for size in self.shape:
            if type(size) is Dim:
                total = size if total is None else total * size
        if total is None:
            return known
        return total if known == 1 else total * known

    def __len__(self) -> Any:
        size = self.shape[0]
        if isinstance(size, int):
            return size
        raise Decline(Reason.CONTROL_FLOW, "len() of a dynamic dimension")

    def __iter__(self) -> Any:
        return iter([self[i] for i in range(len(self))])

    def __bool__(self) -> bool:
        raise Decline(Reason.CONTROL_FLOW, "a branch on a tensor's value")

    def _value_read(self, *_: Any) -> Any:
        raise Decline(Reason.CONTROL_FLOW, "a tensor's value read as a Python number")

    __index__ = __int__ = __float__ = item = tolist = numpy = __array__ = _value_read

    def __hash__(self) -> int:
        return id(self)

    def __setitem__(self, key: Any, item: Any) -> None:
        raise Decline(Reason.SIDE_EFFECT, "an assignment into a tensor")

    def __getattr__(self, name: str) -> Any:
        if name not in _TENSOR_ATTRIBUTES or name.startswith("_"):
            raise AttributeError(name)
        if name in ("T", "mT", "real", "imag"):
            return self.tracer.create_proxy("call_function", getattr, (self, name), {})
        return super().__getattr__(name)


def _augmented(name: str) -> Any:
    """`x += y` and its kin: on a tensor of the caller's they would change it in place."""
    operation = getattr(operator, name)

    def augment(self: Any, other: Any) -> Any:
        self.tracer.refuse_foreign(self)
        result = operation(self, other)
        if result.dtype == self.dtype:
            return result
        # In place: the result has to fit into what is there.
        if not torch.can_cast(result.dtype, self.dtype):
            raise Decline(Reason.UNSUPPORTED, f"{result.dtype} in place of {self.dtype}")
        return result.to(self.dtype)

    return augment


_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "pow", "and_", "or_", "xor")
for _name in _AUGMENTED:
    setattr(Value, f"__i{_name.rstrip('_')}__", _augmented(_name))


class VariableValue(Value):
    """The value of a Keras variable, with those methods of the variable that a call uses."""

    def __init__(self, value: Value, variable: Any, context: Any) -> None:
        super().__init__(value.node, cast("Tracer", value.tracer), value.metas)
        self.variable = variable
        self.context = context

    @property
    def value(self) -> VariableValue:
        return self

    @property
    def trainable(self) -> bool:
        return self.variable.trainable

    def __iadd__(self, other: Any) -> Any:
        return self + other

    def __isub__(self, other: Any) -> Any:
        return self - other

    def __imul__(self, other: Any) -> Any:
        return self * other

    def assign(self, value: Any) -> Any:
        self.context.assign(self.variable, value)
        return value

    def assign_add(self, value: Any) -> Any:
        return self.assign(self + value)

    def assign_sub(self, value: Any) -> Any:
        return self.assign(self - value)


class Sizes(fx.Proxy):
    """A whole `shape`, of which single dimensions are read."""

    def __init__(self, node: fx.Node, tracer: Tracer, metas: tuple[Any, Any]) -> None:
        super().__init__(node, tracer)
        self.tracer: Tracer = tracer
        self.metas = metas

    def __getitem__(self, index: int) -> Any:
        pair = (self.metas[0][index], self.metas[1][index])
        node = self.tracer.graph.call_function(operator.getitem, (self.node, index))
        return Dim(node, self.tracer, pair)


def is_value(item: Any) -> bool:
    """Whether `item` is a traced tensor."""
    return type(item) in (Value, VariableValue)
