"""What `Layer.__call__` does around a layer's `call`, done once, at lowering.

Input conversion, argument binding, the input spec, the resolution of `training`, masks in
and out, the autocast scope and activity regularizers are decided here from what is known
about the layer and the kinds of its inputs; only their tensor operations remain in the
program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from keras_turbo import compat, registry
from keras_turbo.fallback import Decline, Reason
from keras_turbo.specs import map_leaves
from keras_turbo.values import is_value

# Attributes that a call of any layer depends on.
_ASSUMED = (
    "hooks",
    "call",
    "compute_mask",
    "quantized_call",
    "_dtype_policy",
    "autocast",
    "activity_regularizer",
    "_supports_masking",
    "_input_spec",
    "_remat_mode",
    "_call_context_args",
    "_convert_input_args",
    "built",
)


def call_layer(ctx: Any, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Lower one call of a layer.

    Raises:
        Decline: when the layer has no rule, or is in a state that only stock Keras handles.
    """
    found = registry.find(layer)
    ctx.depend(layer, *_ASSUMED)
    _check_state(layer)
    args, kwargs = _convert(layer, args, kwargs)
    names, bound = _bind(layer, args, kwargs)
    first = bound[names[0]] if names else None
    _check_spec(ctx, layer, first)

    given = "training" in kwargs
    training = kwargs["training"] if given else bound.get("training")
    training = ctx.training = ctx.resolve_training(given, training)
    kwargs = dict(kwargs)
    if "training" in names and training is not None:
        kwargs["training"] = training
    elif "training" not in names:
        kwargs.pop("training", None)

    _populate_masks(names, bound, kwargs)
    previous_mask = kwargs.get("mask")
    if previous_mask is None:
        previous_mask = map_leaves(mask_of, first)

    active, dtype = _autocast(ctx, layer)
    with ctx.autocast_scope(active, dtype):
        row = len(ctx.record.rows)
        outputs = found.function(ctx, layer, *args, **kwargs)
        ctx.lowered(layer)
        ctx.record.rows.insert(row, ctx.record.rows.pop())
        _regularize_activity(ctx, layer, outputs)
    _attach_masks(ctx, layer, found, first, outputs, previous_mask)
    return outputs


def mask_of(item: Any) -> Any:
    """The Keras mask of a traced tensor, None where there is none."""
    return getattr(item, "_keras_mask", None) if isinstance(item, fx.Proxy) else None


def _check_state(layer: Any) -> None:
    if not layer.built:
        raise Decline(Reason.NOT_BUILT)
    if layer._remat_mode is not None:
        raise Decline(Reason.REMAT)
    if layer.quantization_mode is not None:
        raise Decline(Reason.QUANTIZED, layer.quantization_mode)
    if compat.has_hooks(layer):
        raise Decline(Reason.HOOKS)
    if layer._call_context_args != {"training"}:
        raise Decline(Reason.UNSUPPORTED, "call context arguments beside training")


def _convert(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast floating-point inputs as the layer's dtype policy asks."""
    if not layer._convert_input_args:
        return args, kwargs
    dtype = compat.to_torch_dtype(layer.input_dtype)
    autocast = layer.autocast

    def convert(item: Any) -> Any:
        if not is_value(item):
            return item
        if not autocast or item.dtype == dtype or not compat.is_float(item.dtype):
            return item
        mask = mask_of(item)
        item = item.to(dtype)
        if mask is not None:
            item._keras_mask = mask
        return item

    args, kwargs = map_leaves(convert, (args, kwargs))
    if not layer._allow_non_tensor_positional_args:

        def tensors_only(item: Any) -> None:
            if item is not None and not is_value(item):
                raise Decline(Reason.STRUCTURE, "a positional argument that is no tensor")

        map_leaves(tensors_only, args)
    return args, kwargs


def _bind(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Names and values of all parameters of `call`, defaults included."""
    signature = layer._call_signature
    given = {
        name: value
        for name, value in kwargs.items()
        if name != "training" or "training" in signature.parameters
    }
    try:
        bound = signature.bind(*args, **given)
    except TypeError as error:
        raise Decline(Reason.STRUCTURE, str(error)) from error
    bound.apply_defaults()
    return list(bound.arguments), dict(bound.arguments)


def _check_spec(ctx: Any, layer: Any, first: Any) -> None:
    """Decline what the input spec would refuse or adjust; stock Keras words the error."""
    specs = layer.input_spec
    if not specs:
        return
    specs = compat.tree.flatten(specs)
    if isinstance(first, dict) and all(spec.name for spec in specs):
        leaves = [first.get(spec.name) for spec in specs]
    else:
        leaves = compat.tree.flatten(first)
    if len(specs) != len(leaves):
        raise Decline(Reason.STRUCTURE, "another number of inputs than the input spec has")
    for spec, item in zip(specs, leaves, strict=True):
        if spec is None or (item is None and spec.optional):
            continue
        if item is None or not is_value(item):
            raise Decline(Reason.STRUCTURE, "an input that is no tensor")
        if not _fits(spec, item):
            raise Decline(Reason.SHAPE, ctx.tracer.sizes.real(item.metas))


def _fits(spec: Any, item: Any) -> bool:
    sizes = item.metas[0].shape
    rank = len(sizes)
    if spec.ndim is not None and rank != spec.ndim:
        return False
    if spec.max_ndim is not None and rank > spec.max_ndim:
        return False
    if spec.min_ndim is not None and rank < spec.min_ndim:
        return False
    if spec.dtype is not None and compat.backend.standardize_dtype(item.dtype) != spec.dtype:
        return False
    wanted = dict(spec.axes or {})
    if spec.shape is not None:
        if len(spec.shape) != rank:
            return False
        wanted.update(enumerate(spec.shape))
    for axis, size in wanted.items():
        if size is None:
            continue
        if not -rank <= int(axis) < rank:
            return False
        if sizes[int(axis)] != size or item.metas[1].shape[int(axis)] != size:
            return False
    return True


def _populate_masks(names: list[str], bound: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Fill mask arguments from the masks that the tensor arguments carry."""
    tensors = {name: value for name, value in bound.items() if _holds_tensors(value)}
    if len(tensors) == 1:
        if "mask" in names and bound["mask"] is None:
            (only,) = tensors.values()
            kwargs["mask"] = map_leaves(mask_of, only)
    else:
        for name, value in tensors.items():
            if f"{name}_mask" in names and bound[f"{name}_mask"] is None:
                kwargs[f"{name}_mask"] = map_leaves(mask_of, value)


def _holds_tensors(item: Any) -> bool:
    if is_value(item):
        return True
    if not isinstance(item, (tuple, list, dict)) or not item:
        return False
    leaves = compat.tree.flatten(item)
    found = [is_value(leaf) for leaf in leaves]
    if any(found) and not all(ok or leaf is None for ok, leaf in zip(found, leaves, strict=True)):
        raise Decline(Reason.STRUCTURE, "an argument that mixes tensors and other values")
    return all(ok or leaf is None for ok, leaf in zip(found, leaves, strict=True))


def _autocast(ctx: Any, layer: Any) -> tuple[bool, torch.dtype | None]:
    """The autocast scope that surrounds this layer's `call`."""
    compute = layer.compute_dtype
    outer = ctx.autocast
    if outer.active:
        if not layer.autocast or not compat.backend.is_float_dtype(compute):
            return True, None
        return True, compat.to_torch_dtype(compute)
    if compute != layer.variable_dtype:
        return True, compat.to_torch_dtype(compute)
    return False, None


def scope_inside(ctx: Any, layer: Any) -> compat.AutocastScope | None:
    """The autocast scope object for a layer's `call`, None where there is none."""
    active, dtype = _autocast(ctx, layer)
    if not active:
        return None
    return compat.AutocastScope(None if dtype is None else compat.backend.standardize_dtype(dtype))


def per_sample(loss: torch.Tensor, batch: int, dtype: torch.dtype) -> torch.Tensor:
    """A loss divided by the batch size, zero for an empty batch: `keras.ops.divide_no_nan`."""
    size = torch.tensor(batch, dtype=loss.dtype, device=loss.device).to(dtype)
    loss = loss.to(dtype)
    return torch.where(size == 0, 0, loss / size) if batch == 0 else loss / size


def _regularize_activity(ctx: Any, layer: Any, outputs: Any) -> None:
    regularizer = layer.activity_regularizer
    if regularizer is None:
        return

    def add(output: Any) -> None:
        if not is_value(output):
            return
        from keras_turbo.penalties import penalty

        loss = penalty(ctx, regularizer, output)
        if loss is None:
            loss = ctx.opaque(regularizer, output)
        if output.ndim > 0:
            dtype = compat.result_type(loss.dtype, loss.dtype, float)
            loss = ctx.tracer.create_proxy(
                "call_function", per_sample, (loss, output.shape[0], dtype), {}
            )
        ctx.add_loss(layer, loss)

    map_leaves(add, outputs)


class MaskWarning:
    """Says, on each call, that a mask ends at a layer, in stock Keras's words."""

    __module__ = "keras_turbo.calls"

    def __init__(self, layer: Any) -> None:
        self.__name__ = self.__qualname__ = "warn_mask_ends"
        self.warn = compat.mask_warning(layer.name, type(layer).__name__)

    def __call__(self) -> None:
        self.warn()


def _attach_masks(
    ctx: Any, layer: Any, found: registry.Rule, first: Any, outputs: Any, previous_mask: Any
) -> None:
    leaves = compat.tree.flatten(outputs)
    if not layer.supports_masking:
        if any(mask is not None for mask in compat.tree.flatten(previous_mask)):
            ctx.effect(MaskWarning(layer))
        return
    if leaves and all(mask_of(leaf) is not None for leaf in leaves):
        return
    if found.mask is not None:
        masks = found.mask(ctx, layer, first, previous_mask)
    elif getattr(type(layer).compute_mask, "_is_default", False):
        masks = previous_mask
    else:
        masks = ctx.view(layer).compute_mask(first, previous_mask)
    if masks is None:
        return
    for leaf, mask in zip(leaves, compat.tree.flatten(masks), strict=False):
        if mask is not None and is_value(leaf) and mask_of(leaf) is None:
            leaf._keras_mask = mask
