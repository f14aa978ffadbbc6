"""Values that stand for tensors while a rule runs: a `torch.fx` proxy that knows its meta data.

Lowering hands `Value` objects to rules, which are plain torch code. Every operation is
appended to the fx graph and evaluated twice on the meta device, at two different sizes of
the dynamic dimensions. Dtype and rank are thus known to the rule, and a dimension that
comes out equal at both sizes is static; the others are read from the tensor at run time.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from keras_turbo.canonical import canonical
from keras_turbo.shapes import known_meta
from keras_turbo.fallback import Decline, Reason

_TENSOR_ATTRIBUTES = frozenset(dir(torch.Tensor))


class Dim(fx.Proxy):
    """A number that is known only at run time, such as a batch size."""

    def __init__(self, node: fx.Node, tracer: Tracer, metas: tuple[Any, Any]) -> None:
        super().__init__(node, tracer)
        self.metas = metas

    @property
    def __class__(self) -> type:
        return torch.SymFloat if isinstance(self.metas[0], float) else torch.SymInt

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


class Value(fx.Proxy):
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


class VariableValue(Value):
    """The value of a Keras variable, with those methods of the variable that a call uses."""

    def __init__(self, value: Value, variable: Any, context: Any) -> None:
        super().__init__(value.node, value.tracer, value.metas)
        self.variable = variable
        self.context = context

    @property
    def value(self) -> VariableValue:
        return self

    @property
    def trainable(self) -> bool:
        return self.variable.trainable

    def assign(self, value: Any) -> Any:
        self.context.assign(self.variable, value)
        return value

    def assign_add(self, value: Any) -> Any:
        return self.assign(self + value)

    def assign_sub(self, value: Any) -> Any:
        return self.assign(self - value)


def is_value(item: Any) -> bool:
    """Whether `item` is a traced tensor."""
    return type(item) in (Value, VariableValue)


class Tracer(fx.proxy.TracerBase):
    """Appends operations to one graph and evaluates them on the meta device.

    Attributes:
        may_specialise: whether a rule that stumbles over a dynamic dimension can be tried
            again with that dimension fixed.
        sizes: the made-up sizes of the dynamic dimensions, which decide comparisons.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.device = device
        self.may_specialise = False
        self.sizes: Any = None
        self.constants: dict[str, Any] = {}
        self._interned: dict[int, Value] = {}
        self._made: set[int] = set()
        self._foreign: set[int] = set()
        self._counts: dict[str, int] = {}

    def placeholder(self, name: str, metas: tuple[Any, Any]) -> Value:
        node = self.graph.placeholder(name)
        node.meta["metas"] = metas
        self._foreign.update(meta.untyped_storage()._cdata for meta in metas)
        return Value(node, self, metas)

    def parameter(self, name: str, tensor: torch.Tensor) -> Value:
        """The program's view of a live tensor; the same tensor gives the same value."""
        value = self._interned.get(id(tensor))
        if value is None:
            name = self._unique(_identifier(name))
            self.constants[name] = tensor
            node = self.graph.create_node("get_attr", name, (), {}, name=name)
            meta = torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            node.meta["metas"] = (meta, meta)
            self._foreign.add(meta.untyped_storage()._cdata)
            value = Value(node, self, (meta, meta))
            self._interned[id(tensor)] = value
        return value

    def refuse_used(self, tensor: Any) -> None:
        """Decline a change of a real tensor that the graph has read already."""
        known = self._interned.get(id(tensor))
        if known is not None and (known.node.users or known.node.op != "get_attr"):
            raise Decline(Reason.SIDE_EFFECT, "a constant is changed in place after its use")

    def _unique(self, name: str) -> str:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        candidate = f"{name}_{count}" if count else name
        return candidate if candidate not in self.constants else self._unique(name)

    def constant(self, tensor: torch.Tensor) -> Value:
        """A tensor that never changes, made while Keras's code was traced."""
        self._made.add(id(tensor))
        return self.parameter("constant", tensor)

    def create_proxy(  # noqa: PLR0913, the signature is torch.fx's
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        if kind == "call_function":
            target, args, kwargs = canonical(target, args, kwargs)
        elif target.endswith("_") and not target.endswith("__"):
            args = (self._writable(args[0]), *args[1:])
        try:
            metas = tuple(self._evaluate(kind, target, args, kwargs, i) for i in (0, 1))
        except (Decline, RecursionError):
            raise
        except Exception as error:
            raise Decline(Reason.UNSUPPORTED, f"{_name_of(target)}: {error}") from error
        return self.append(kind, target, args, kwargs, metas)

    def _writable(self, item: Any) -> Any:
        """What an in-place operation may write to: a constant is copied at each call first."""
        if isinstance(item, torch.Tensor) and id(item) in self._made:
            known = self._interned[id(item)]
            if known.node.op == "get_attr":
                self._interned[id(item)] = self.create_proxy("call_method", "clone", (known,), {})
            return item
        known = self._interned.get(id(item), item)
        if known.metas[0].untyped_storage()._cdata in self._foreign:
            raise Decline(Reason.SIDE_EFFECT, "an input or a weight is changed in place")
        return item

    def append(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        metas: tuple[Any, ...],
    ) -> Any:
        """Append a node whose meta results are already known."""
        node_args = map_aggregate(args, self._node_of)
        node_kwargs = map_aggregate(kwargs, self._node_of)
        if kind == "call_method":
            name = target.rstrip("_") or target
        else:
            name = getattr(target, "__name__", "value")
        node = self.graph.create_node(kind, target, node_args, node_kwargs, name=name)
        return self.wrap(node, metas)

    def wrap(self, node: fx.Node, metas: tuple[Any, ...]) -> Any:
        """The proxy, or the structure of proxies, for a node with these meta results."""
        first, second = metas
        if isinstance(first, torch.Tensor):
            node.meta["metas"] = metas
            return Value(node, self, (first, second))
        if isinstance(first, torch.Size):
            return _Sizes(node, self, (first, second))
        if isinstance(first, (tuple, list)):
            items = [
                self.wrap(self.graph.call_function(operator.getitem, (node, i)), pair)
                for i, pair in enumerate(zip(first, second, strict=True))
            ]
            return type(first)(items) if type(first) in (tuple, list) else tuple(items)
        if isinstance(first, (bool, torch.dtype, torch.device, str)) or first is None:
            if first != second:
                raise Decline(Reason.CONTROL_FLOW, "a fact that depends on a dynamic dimension")
            self.graph.erase_node(node)
            return first
        if isinstance(first, (int, float)):
            return Dim(node, self, (first, second))
        return Dim(node, self, (first, second))

    def _node_of(self, item: Any) -> Any:
        if isinstance(item, fx.Proxy):
            return item.node
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            known = self._interned.get(id(item))
            if known is None:
                raise Decline(Reason.CONSTANT, f"a tensor of shape {tuple(item.shape)}")
            return known.node
        return item

    def _evaluate(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], which: int
    ) -> Any:
        def meta_of(item: Any) -> Any:
            if isinstance(item, fx.Proxy):
                return item.metas[which]
            if isinstance(item, torch.Tensor):
                known = self._interned.get(id(item))
                if known is None:
                    raise Decline(Reason.CONSTANT, f"a tensor of shape {tuple(item.shape)}")
                return known.metas[which]
            return item

        args = map_aggregate(args, meta_of)
        kwargs = map_aggregate(kwargs, meta_of)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": "meta"}
        result = known_meta(target, args, kwargs)
        if result is not None:
            return result
        evaluate: Callable[..., Any]
        if kind == "call_method":
            args = tuple(
                "meta" if i and _is_device(a) else a for i, a in enumerate(args)
            )
            evaluate = getattr(args[0], target)
            args = args[1:]
        else:
            evaluate = getattr(target, "meta", target)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return evaluate(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise Decline(Reason.CONTROL_FLOW, "a branch on a tensor's value")

    def iter(self, obj: fx.Proxy) -> Any:
        raise Decline(Reason.CONTROL_FLOW, "iteration over a tensor")

    def keys(self, obj: fx.Proxy) -> Any:
        raise Decline(Reason.CONTROL_FLOW, "keys of a tensor")


class _Sizes(fx.Proxy):
    """A whole `shape`, of which single dimensions are read."""

    def __init__(self, node: fx.Node, tracer: Tracer, metas: tuple[Any, Any]) -> None:
        super().__init__(node, tracer)
        self.metas = metas

    def __getitem__(self, index: int) -> Any:
        pair = (self.metas[0][index], self.metas[1][index])
        node = self.tracer.graph.call_function(operator.getitem, (self.node, index))
        return Dim(node, self.tracer, pair)


def _is_device(item: Any) -> bool:
    if isinstance(item, torch.device):
        return True
    return isinstance(item, str) and item.split(":")[0] in ("cpu", "cuda", "mps", "xpu")


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name).strip("_").lower() or "weight"
    return f"_{text}" if text[0].isdigit() else text


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))
