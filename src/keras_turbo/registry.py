"""The table of lowering rules: which function lowers which Keras class.

Rules register themselves here by decorator; lowering looks them up by exact type, or by
the nearest registered base class when the subclass overrides nothing that the rule
relies on.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

from keras_turbo.fallback import Decline, Reason

RuleFunction = TypeVar("RuleFunction", bound=Callable[..., Any])

# Methods of a Keras class that do not take part in a call of a built layer.
_OUTSIDE_THE_CALL = frozenset(
    [
        "__init__",
        "__new__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__dict__",
        "__weakref__",
        "__repr__",
        "__str__",
        "__annotations__",
        "__init_subclass__",
        "__reduce__",
        "__signature__",
        "__static_attributes__",
        "__firstlineno__",
        "__abstractmethods__",
        "_abc_impl",
        "build",
        "get_config",
        "from_config",
        "build_from_config",
        "get_build_config",
        "compute_output_shape",
        "compute_output_spec",
        "get_compile_config",
        "compile_from_config",
        "save_own_variables",
        "load_own_variables",
        "save_assets",
        "load_assets",
        "enable_lora",
        "quantize",
        "quantized_build",
        "_obj_type",
        "add",
        "pop",
        "summary",
        "to_json",
        "variable_serialization_spec",
        "get_layer",
        "input_shape",
        "output_shape",
        "_lock_state",
        "_maybe_rebuild",
        "layers",
        "operations",
    ]
)

# Methods of the base Layer that a rule relies on whatever the layer is.
_BASE_METHODS = (
    "__call__",
    "call",
    "forward",
    "compute_mask",
    "quantized_call",
    "rematerialized_call",
    "symbolic_call",
    "compute_dtype",
    "variable_dtype",
    "input_dtype",
    "dtype_policy",
    "quantization_mode",
    "supports_masking",
    "trainable",
    "add_loss",
    "_set_mask_metadata",
    "_assert_input_compatibility",
    "_get_call_context",
    "_maybe_reset_call_context",
    "_resolve_and_populate_arg",
    "__getattr__",
    "__getattribute__",
    "__torch_function__",
)


@dataclass(frozen=True)
class Rule:
    """One lowering rule.

    Attributes:
        cls: the Keras class it lowers.
        function: called as `function(ctx, layer, *args, **kwargs)`, with the arguments
            that Keras would pass to `layer.call`.
        mask: called as `mask(ctx, layer, inputs, previous_mask)` in place of
            `layer.compute_mask`, or None where the layer keeps the default.
    """

    cls: type
    function: Callable[..., Any]
    mask: Callable[..., Any] | None = None


_rules: dict[type, Rule] = {}


def rule(
    *classes: type, mask: Callable[..., Any] | None = None
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a lowering rule for one's own layer class.

    The function is plain torch code. It reads attributes through `ctx.read`, weights
    through `ctx.variable`, and calls inner layers through `ctx.call`, so that every fact
    it used is protected: when one changes, the program is lowered again.

    Args:
        *classes: the `keras.layers.Layer` subclasses that the rule lowers.
        mask: computes the output mask as `mask(ctx, layer, inputs, previous_mask)`, for
            a class that overrides `compute_mask`.

    Raises:
        TypeError: if an argument is not a class.

    Example:

    >>> import keras, keras_turbo
    >>> class Scale(keras.layers.Layer):
    ...     def build(self, shape):
    ...         self.factor = self.add_weight(shape=shape[-1:], name="factor")
    ...     def call(self, x):
    ...         return x * self.factor
    >>> @keras_turbo.rule(Scale)
    ... def scale(ctx, layer, x):
    ...     return x * ctx.variable(layer.factor)
    """
    for cls in classes:
        if not isinstance(cls, type):
            raise TypeError(f"keras_turbo.rule takes layer classes; got {cls!r}.")

    def register(function: RuleFunction) -> RuleFunction:
        for cls in classes:
            _rules[cls] = Rule(cls, function, mask)
        _overriding.clear()
        return function

    return register


def trace_call(*classes: type, mask: Callable[..., Any] | None = None) -> None:
    """Register classes whose `call` can be traced as Keras wrote it.

    Every tensor operation of such a `call` is torch's, applied to its inputs and variables;
    the program then holds exactly the operations that stock Keras runs.
    """

    def traced(ctx: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        return ctx.trace(ctx.view(layer).call, *args, **kwargs)

    rule(*classes, mask=mask)(traced)


def rules() -> dict[type, Rule]:
    """All registered rules by class."""
    return dict(_rules)


def find(operation: Any) -> Rule:
    """The rule for a layer or operation.

    Raises:
        Decline: if there is none, or the class or instance overrides what it relies on.
    """
    for cls in type(operation).__mro__:
        found = _rules.get(cls)
        if found is not None:
            break
    else:
        raise Decline(Reason.NO_RULE)
    if type(operation) is not found.cls:
        name = _overridden(type(operation), found.cls)
        if name:
            raise Decline(Reason.OVERRIDE, f"{type(operation).__name__}.{name}")
    for name, value in vars(operation).items():
        if name in ("build", "quantize"):
            continue
        if callable(value) and isinstance(getattr(found.cls, name, None), FunctionType):
            raise Decline(Reason.OVERRIDE, f"{name} assigned on the instance")
    return found


_overriding: weakref.WeakKeyDictionary[type, tuple[type, str | None]] = weakref.WeakKeyDictionary()
"""What is known of subclasses, which may be the user's and go: their rule's class, and what
`_first_override` has found."""


def _overridden(subclass: type, registered: type) -> str | None:
    """The first attribute of `registered` that `subclass` overrides and a call may use."""
    known = _overriding.get(subclass)
    if known is None or known[0] is not registered:
        known = _overriding[subclass] = registered, _first_override(subclass, registered)
    return known[1]


def _first_override(subclass: type, registered: type) -> str | None:
    for name in (*_BASE_METHODS, *_own_names(registered)):
        if inspect.getattr_static(subclass, name, None) is not inspect.getattr_static(
            registered, name, None
        ):
            return name
    return None


def _own_names(registered: type) -> list[str]:
    names = []
    for cls in registered.__mro__:
        if cls.__name__ in ("Layer", "Model", "Trainer", "Operation", "object"):
            break
        names += [n for n in vars(cls) if n not in _OUTSIDE_THE_CALL]
    return names
