"""The tracer: appends operations to one graph and evaluates them on the meta device.

Every operation on a `Value` arrives here. It is evaluated twice, at two different sizes of
the dynamic dimensions: dtype and rank are thus known at once, and a dimension that comes
out equal at both sizes is static; the others are read from the tensor at run time.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from keras_turbo.canonical import canonical
from keras_turbo.fallback import Decline, Reason
from keras_turbo.shapes import known_meta
from keras_turbo.values import Dim, Sizes, Value


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

    def create_proxy(
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
            detail = self._problem(kind, target, args, kwargs)
            raise Decline(Reason.UNSUPPORTED, f"{_name_of(target)}: {detail}") from error
        return self.append(kind, target, args, kwargs, metas)

    def _writable(self, item: Any) -> Any:
        """What an in-place operation may write to: a constant is copied at each call first."""
        if isinstance(item, torch.Tensor) and id(item) in self._made:
            known = self._interned[id(item)]
            if known.node.op == "get_attr":
                self._interned[id(item)] = self.create_proxy("call_method", "clone", (known,), {})
            return item
        self.refuse_foreign(self._interned.get(id(item), item))
        return item

    def refuse_foreign(self, value: Any) -> None:
        """Decline a change of an input's or a weight's memory."""
        if value.metas[0].untyped_storage()._cdata in self._foreign:
            raise Decline(Reason.SIDE_EFFECT, "an input or a weight is changed in place")

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
            return Sizes(node, self, (first, second))
        if isinstance(first, (tuple, list)):
            items = [
                self.wrap(self.graph.call_function(operator.getitem, (node, i)), pair)
                for i, pair in enumerate(zip(first, second, strict=True))
            ]
            # Named results, such as those of `torch.sort`, keep their names.
            named = type(first).__module__ == "torch.return_types"
            return type(first)(items) if named or type(first) is list else tuple(items)
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
            args = tuple("meta" if i and _is_device(a) else a for i, a in enumerate(args))
            evaluate = getattr(args[0], target)
            args = args[1:]
        else:
            evaluate = getattr(target, "meta", target)
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return evaluate(*args, **kwargs)

    def _problem(self, kind: str, target: Any, args: Any, kwargs: Any) -> str:
        """Torch's words for what it refuses, without the made-up sizes."""
        texts = []
        for which in (0, 1):
            try:
                self._evaluate(kind, target, args, kwargs, which)
            except Exception as error:  # noqa: BLE001, torch raises all kinds
                texts.append(re.split(r"(\d+)", str(error)))
        if len(texts) < 2 or len(texts[0]) != len(texts[1]):
            return "refused at some sizes"
        return "".join(a if a == b else "?" for a, b in zip(*texts, strict=True))

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise Decline(Reason.CONTROL_FLOW, "a branch on a tensor's value")

    def iter(self, obj: fx.Proxy) -> Any:
        raise Decline(Reason.CONTROL_FLOW, "iteration over a tensor")

    def keys(self, obj: fx.Proxy) -> Any:
        raise Decline(Reason.CONTROL_FLOW, "keys of a tensor")


def _is_device(item: Any) -> bool:
    if isinstance(item, torch.device):
        return True
    return isinstance(item, str) and item.split(":")[0] in ("cpu", "cuda", "mps", "xpu")


def _identifier(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name).strip("_").lower() or "weight"
    return f"_{text}" if text[0].isdigit() else text


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", repr(target))
