"""Stand-ins for Keras objects while Keras's own code is traced.

Where a rule says that a layer's `call` can be traced as it is, the method runs with a
stand-in in place of `self`: every attribute it reads is noted as an assumption,
variables become traced values, inner layers are called through the lowering context.
"""

from __future__ import annotations

import inspect
import weakref
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.values import is_value

# Only weak references: a stand-in's class refers to the class that it stands in for, which
# may be one of the user's that is to go.
_view_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()


def layer_view(context: Any, target: Any) -> Any:
    """A stand-in for a layer or operation whose attribute reads become assumptions.

    It is an instance of a subclass of the target's class, so that `super()`, `isinstance`
    and comparisons of methods in the traced code work as they are.
    """
    cls = type(target)
    known = _view_classes.get(cls)
    view_class = None if known is None else known()
    if view_class is None:
        members = {
            "__getattribute__": _read,
            "__setattr__": _write,
            "__call__": _call,
            "__module__": cls.__module__,
        }
        metaclass: Any = type(cls)
        view_class = metaclass(cls.__name__, (cls,), members)
        _view_classes[cls] = weakref.ref(view_class)
    stand_in = object.__new__(view_class)
    object.__setattr__(stand_in, "_turbo_view", (context, target))
    return stand_in


def _read(self: Any, name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        return object.__getattribute__(self, name)
    context, target = object.__getattribute__(self, "_turbo_view")
    static = inspect.getattr_static(type(target), name, None)
    context.depend(target, name)
    if isinstance(static, property) and static.fget is not None:
        return view(context, static.fget(self))
    if isinstance(static, FunctionType):
        if name in vars(target) and name not in ("build", "quantize"):
            raise Decline(Reason.OVERRIDE, f"{name} assigned on the instance")
        if name == "add_loss":
            return lambda loss: context.add_loss(target, loss)
        return MethodType(static, self)
    return view(context, getattr(target, name))


def _write(self: Any, name: str, value: Any) -> None:
    raise Decline(Reason.SIDE_EFFECT, f"writes self.{name}")


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    context, target = object.__getattribute__(self, "_turbo_view")
    if isinstance(target, compat.Layer):
        return context.call(target, *args, **kwargs)
    if isinstance(target, compat.Operation):
        return context.call_operation(target, *args, **kwargs)
    return type(target).__call__(self, *args, **kwargs)


_VIEWED = (compat.Operation, compat.Loss, compat.Metric)


def view(context: Any, item: Any) -> Any:
    """The stand-in for an attribute's value."""
    if isinstance(item, compat.Variable):
        return context.variable(item)
    if isinstance(item, _VIEWED):
        return layer_view(context, item)
    if isinstance(item, (list, tuple)) and any(
        isinstance(entry, (compat.Variable, *_VIEWED)) for entry in item
    ):
        return [view(context, entry) for entry in item]
    if isinstance(item, torch.Tensor) and type(item) in (torch.Tensor, torch.nn.Parameter):
        raise Decline(Reason.CONSTANT, "a layer attribute that is a tensor")
    return item


_RANDOM = frozenset(
    getattr(torch, name)
    for name in (
        "normal",
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "randperm",
        "bernoulli",
        "multinomial",
        "poisson",
    )
) | {torch.Tensor.random_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_}


_READERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy})


_MAKERS = _READERS | {torch.zeros, torch.ones, torch.full, torch.arange, torch.empty}


def _holds_dimension(args: Any) -> bool:
    return any(
        isinstance(arg, fx.Proxy)
        or (isinstance(arg, (tuple, list)) and any(isinstance(a, fx.Proxy) for a in arg))
        for arg in args
    )


class RandomGuard(TorchFunctionMode):
    """Refuses random numbers while Keras's code is traced: they would become constants.

    Real tensors that the traced code makes from Python numbers and arrays are noted as
    constants of the program.
    """

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and any(is_value(arg) for arg in args):
            # These read a tensor's memory without asking it first.
            raise Decline(Reason.CONTROL_FLOW, f"torch.{func.__name__} of a traced tensor")
        if func in _MAKERS and _holds_dimension(args):
            return self.context.tracer.create_proxy("call_function", func, args, kwargs or {})
        if func in _RANDOM:
            raise Decline(Reason.UNSUPPORTED, f"random numbers ({func.__name__})")
        name = getattr(func, "__name__", "")
        if args and (name.startswith("__i") or (name.endswith("_") and name[-2:] != "__")):
            self.context.tracer.refuse_used(args[0])
        result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor and not result.is_meta:
            self.context.tracer.constant(result)
        return result
