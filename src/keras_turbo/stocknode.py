"""Stock nodes: parts of a program that run Keras as it is.

A layer without a rule inside a lowered model becomes a node that calls the layer itself,
inside the call context and the autocast scope that stock Keras would have there.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.rehearsal import rehearsal


class StockCall:
    """A callable node target that runs a layer or function as stock Keras would.

    Args:
        function: the layer or function.
        training: the training flag of the call context before it.
        autocast: the autocast scope around it.
        after: the training flag behind it, as far as its arguments tell.

    Attributes:
        relied_on: whether the rest of the program relies on the flag behind it.
    """

    __module__ = "keras_turbo.stocknode"

    def __init__(self, function: Any, training: Any, autocast: Any, after: Any) -> None:
        self.function = function
        self.training = training
        self.after = after
        self.relied_on = False
        self.scope = compat.AutocastScope(None) if autocast.active else None
        if self.scope is not None and autocast.dtype is not None:
            self.scope.dtype = compat.backend.standardize_dtype(autocast.dtype)
        self.dtypes: list[Any] = []
        name = getattr(function, "name", None) or getattr(function, "__name__", "function")
        self.__name__ = self.__qualname__ = f"stock_{name}".replace("<", "").replace(">", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ambient = compat.ambient()
        context = ambient.get("current_call_ctx")
        if context is not None:
            context.set_value("training", self.training)
        outer = ambient.get("autocast_scope")
        ambient["autocast_scope"] = self.scope
        try:
            outputs = self.function(*args, **kwargs)
        finally:
            ambient["autocast_scope"] = outer
        changed = context is not None and context.get_value("training") is not self.after
        if changed and self.relied_on:
            raise Decline(Reason.UNSUPPORTED, f"{self.__name__} changed the training flag")
        for output, dtype in zip(compat.tree.flatten(outputs), self.dtypes, strict=True):
            if getattr(output, "_keras_mask", None) is not None:
                raise Decline(Reason.MASK, f"{self.__name__} attached a mask to its output")
            if getattr(output, "dtype", None) is not dtype:
                problem = f"{self.__name__} did not return {dtype}, which it declares"
                raise Decline(Reason.UNSUPPORTED, problem)
        return outputs

    def declares(self, metas: Any) -> StockCall:
        """Note the dtypes that the rest of the program relies on."""
        self.dtypes = [getattr(m, "dtype", None) for m in compat.tree.flatten(metas)]
        return self


# Two made-up sizes for a dimension that a layer says it cannot know.
_UNKNOWN = (7919, 7927)


def stock_metas(
    layer: Any, args: Any, kwargs: Any, scope: compat.AutocastScope | None
) -> tuple[Any, Any]:
    """The meta outputs of a layer that will run stock, at both sizes.

    Args:
        layer: the layer.
        args: positional arguments of the call.
        kwargs: its keyword arguments.
        scope: the autocast scope in which its `call` will run.

    Raises:
        Decline: when its output shapes or masks cannot be known.
    """
    if not layer.built:
        raise Decline(Reason.NOT_BUILT, layer.name)

    def mask_free(item: Any) -> Any:
        if isinstance(item, fx.Proxy) and getattr(item, "_keras_mask", None) is not None:
            raise Decline(Reason.MASK, f"a mask enters {layer.name}, which runs stock Keras")
        return item

    map_aggregate((args, kwargs), mask_free)
    kwargs = {key: value for key, value in kwargs.items() if key != "training"}
    metas: list[Any] = []
    for which in (0, 1):
        if which and _sizes_known((args, kwargs)):
            return metas[0], metas[0]

        def spec(item: Any, which: int = which) -> Any:
            if not isinstance(item, fx.Proxy):
                return item
            meta = item.metas[which]
            if not isinstance(meta, torch.Tensor):
                return meta
            return compat.KerasTensor(tuple(meta.shape), dtype=_dtype_inside(layer, meta))

        spec_args, spec_kwargs = map_aggregate((args, kwargs), spec)
        try:
            with scope or contextlib.nullcontext(), rehearsal(layer):
                outputs = _outputs(layer, spec_args, spec_kwargs)
        except Exception as error:
            raise Decline(Reason.UNSUPPORTED, f"output shape of {layer.name}") from error
        specs = compat.tree.flatten((spec_args, spec_kwargs))
        batch = next((s.shape[0] for s in specs if getattr(s, "shape", ())), None)

        def meta(item: Any, which: int = which, batch: Any = batch) -> torch.Tensor:
            sizes = [_UNKNOWN[which] if size is None else size for size in item.shape]
            if sizes and item.shape[0] is None and batch is not None:
                sizes[0] = batch
            dtype = compat.to_torch_dtype(item.dtype)
            return torch.empty(sizes, dtype=dtype, device="meta")

        metas.append(compat.tree.map_structure(meta, outputs))
    return metas[0], metas[1]


def _sizes_known(arguments: Any) -> bool:
    """Whether the arguments have the same sizes in both of the tracer's runs."""
    found: list[bool] = []

    def compare(item: Any) -> Any:
        if isinstance(item, fx.Proxy):
            a, b = item.metas
            found.append(a.shape == b.shape if isinstance(a, torch.Tensor) else a == b)
        return item

    map_aggregate(arguments, compare)
    return all(found)


def _outputs(layer: Any, args: Any, kwargs: Any) -> Any:
    """The outputs of a layer for symbolic inputs, with the dtypes they will really have.

    `compute_output_spec` reads variables without the autocast scope, so a `call` that it
    would trace is traced here, on variables that the scope casts.
    """
    method = type(layer).compute_output_spec is compat.Layer.compute_output_spec
    if method and getattr(layer.compute_output_shape, "_is_default", False):
        with contextlib.suppress(Exception):
            return compat.call_on_meta(layer, args, kwargs)
    return layer.compute_output_spec(*args, **kwargs)


def _dtype_inside(layer: Any, meta: torch.Tensor) -> str:
    """The dtype in which a layer's `call` sees a tensor argument."""
    converts = layer._convert_input_args and layer.autocast and compat.is_float(meta.dtype)
    return layer.input_dtype if converts else compat.backend.standardize_dtype(meta.dtype)


def opaque_metas(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The meta results of a Python function that is called as it is, at both sizes."""
    metas = []
    for which in (0, 1):
        meta_args = map_aggregate(
            args, lambda a, which=which: a.metas[which] if isinstance(a, fx.Proxy) else a
        )
        try:
            with compat.backend.device_scope("meta"), torch.no_grad(), rehearsal(function):
                metas.append(function(*meta_args))
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)
            raise Decline(Reason.UNSUPPORTED, f"output shape of {name}") from error
    return metas[0], metas[1]


def given_training(layer: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """Whether a call of a layer gives the training flag itself, and the flag or its default."""
    if "training" in kwargs:
        return True, kwargs["training"]
    bound = layer._call_signature.bind_partial(*args).arguments
    if "training" in bound:
        return True, bound["training"]
    parameter = layer._call_signature.parameters.get("training")
    if parameter is None or parameter.default is parameter.empty:
        return False, None
    return False, parameter.default
