"""Rules for models that Keras knows as graphs: Functional and Sequential."""

from __future__ import annotations

from typing import Any

from keras_turbo import compat
from keras_turbo.calls import is_value, mask_of
from keras_turbo.fallback import Decline, Reason
from keras_turbo.registry import rule


@rule(compat.Functional)
def functional(
    ctx: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None, **kwargs: Any
) -> Any:
    """Walk the graph of a Functional model in the order in which Keras runs it."""
    if kwargs:
        raise Decline(Reason.STRUCTURE, f"call arguments {sorted(kwargs)}")
    flat = _standardize(layer, inputs)
    masks = [None] * len(flat) if mask is None else compat.tree.flatten(mask)
    for value, given in zip(flat, masks, strict=False):
        if given is not None:
            value._keras_mask = given
    ctx.depend(layer, "_nodes_by_depth", "_inputs", "_outputs", "_inputs_struct", "_operations")
    outputs = _run(ctx, layer, flat, training)
    return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs


@rule(compat.Sequential)
def sequential(
    ctx: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None, **kwargs: Any
) -> Any:
    """Run the Functional model behind a Sequential one, or its layers one by one."""
    inner = ctx.read(layer, "_functional")
    ctx.depend(layer, "_layers", "layers")
    if inner is not None:
        return functional(ctx, inner, inputs, training=training, mask=mask, **kwargs)
    if kwargs:
        raise Decline(Reason.STRUCTURE, f"call arguments {sorted(kwargs)}")
    outputs = inputs
    for child in layer.layers:
        given: dict[str, Any] = {}
        if child._call_has_mask_arg:
            given["mask"] = mask
        if child._call_has_training_arg and training is not None:
            given["training"] = training
        outputs = ctx.call(child, outputs, **given)
        mask = compat.tree.map_structure(mask_of, outputs)
    return outputs


@rule(compat.InputLayer)
def input_layer(ctx: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """An input layer is never called; its node is where an input enters."""
    raise Decline(Reason.UNSUPPORTED, "an InputLayer is called")


def _standardize(model: Any, inputs: Any) -> list[Any]:
    """Flat inputs, cast to the declared dtypes; anything irregular is left to stock Keras."""
    struct = model._inputs_struct
    if isinstance(struct, list) and len(struct) == 1 and is_value(inputs):
        inputs = [inputs]
    if isinstance(inputs, dict) and not isinstance(struct, dict):
        raise Decline(Reason.STRUCTURE, "a dict for inputs that are not declared as one")
    try:
        compat.tree.assert_same_structure(
            compat.tree.lists_to_tuples(inputs), compat.tree.lists_to_tuples(struct)
        )
    except (ValueError, TypeError) as error:
        raise Decline(Reason.STRUCTURE, "another structure than the declared inputs") from error
    if isinstance(inputs, dict) and list(inputs) != list(struct):
        raise Decline(Reason.STRUCTURE, "a dict with its keys in another order")
    flat = []
    for value, declared in zip(compat.tree.flatten(inputs), model._inputs, strict=True):
        if value is None:
            if not getattr(declared._keras_history.operation, "optional", False):
                raise Decline(Reason.STRUCTURE, "None for an input that is not optional")
            flat.append(None)
            continue
        if not is_value(value) or value.ndim != len(declared.shape):
            raise Decline(Reason.SHAPE, f"an input of another rank than {declared.shape}")
        mask = mask_of(value)
        dtype = compat.to_torch_dtype(declared.dtype)
        cast = value if value.dtype == dtype else value.to(dtype)
        if mask is not None:
            cast._keras_mask = mask
        flat.append(cast)
    return flat


def _run(ctx: Any, model: Any, flat: list[Any], training: Any) -> Any:
    known = {id(k): v for k, v in zip(model.inputs, flat, strict=True)}
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if not node.operation or node.is_input:
                continue
            if any(id(tensor) not in known for tensor in node.input_tensors):
                continue
            args, kwargs = node.arguments.fill_in(known)
            outputs = _call_node(ctx, node.operation, args, kwargs, training)
            for tensor, value in zip(node.outputs, compat.tree.flatten(outputs), strict=False):
                known[id(tensor)] = value
    missing = [tensor for tensor in model.outputs if id(tensor) not in known]
    if missing:
        raise Decline(Reason.STRUCTURE, "an output that is not connected to the inputs")
    return compat.tree.pack_sequence_as(
        model._outputs_struct, [known[id(tensor)] for tensor in model.outputs]
    )


def _call_node(ctx: Any, operation: Any, args: Any, kwargs: Any, training: Any) -> Any:
    if isinstance(operation, compat.Layer):
        if training is not None and "training" in operation._call_context_args:
            kwargs = {**kwargs, "training": training}
        return ctx.call(operation, *args, **kwargs)
    return ctx.call_operation(operation, *args, **kwargs)
