"""Stock nodes: parts of a program that run Keras as it is.

A layer without a rule inside a lowered model becomes a node that calls the layer itself,
inside the call context and the autocast scope that stock Keras would have there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason


class StockCall:
    """A callable node target that runs a layer or function as stock Keras would."""

    __module__ = "keras_turbo.stocknode"

    def __init__(self, function: Any, training: Any, autocast: Any) -> None:
        self.function = function
        self.training = training
        self.scope = compat.AutocastScope(None) if autocast.active else None
        if self.scope is not None and autocast.dtype is not None:
            self.scope.dtype = compat.backend.standardize_dtype(autocast.dtype)
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
        for output in compat.tree.flatten(outputs):
            if getattr(output, "_keras_mask", None) is not None:
                raise Decline(Reason.MASK, f"{self.__name__} attached a mask to its output")
        return outputs


def stock_metas(layer: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The meta outputs of a layer that will run stock, at both sizes.

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
    metas = []
    for which in (0, 1):

        def spec(item: Any, which: int = which) -> Any:
            if not isinstance(item, fx.Proxy):
                return item
            meta = item.metas[which]
            if not isinstance(meta, torch.Tensor):
                return meta
            dtype = compat.backend.standardize_dtype(meta.dtype)
            return compat.KerasTensor(tuple(meta.shape), dtype=dtype)

        spec_args, spec_kwargs = map_aggregate((args, kwargs), spec)
        try:
            output = layer.compute_output_spec(*spec_args, **spec_kwargs)
        except Exception as error:
            raise Decline(Reason.UNSUPPORTED, f"output shape of {layer.name}") from error
        metas.append(compat.tree.map_structure(_meta_tensor, output))
    return metas[0], metas[1]


def _meta_tensor(spec: Any) -> torch.Tensor:
    return torch.empty(
        [size or 1 for size in spec.shape],
        dtype=compat.to_torch_dtype(spec.dtype),
        device="meta",
    )


def opaque_metas(function: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
    """The meta results of a Python function that is called as it is, at both sizes."""
    metas = []
    for which in (0, 1):
        meta_args = map_aggregate(
            args, lambda a, which=which: a.metas[which] if isinstance(a, fx.Proxy) else a
        )
        try:
            with compat.backend.device_scope("meta"), torch.no_grad():
                metas.append(function(*meta_args))
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)
            raise Decline(Reason.UNSUPPORTED, f"output shape of {name}") from error
    return metas[0], metas[1]
