"""The kind of call that a built layer declares for itself, without a real input.

`lower`, `explain` and the command line use it: a model says its inputs, any other layer
remembers the shapes it was built with.
"""

from __future__ import annotations

from typing import Any

from keras_turbo import compat
from keras_turbo.dispatch import axes_to_guard
from keras_turbo.fallback import Decline, Reason
from keras_turbo.specs import CallKind, TensorKind


def declared_kind(layer: Any, training: bool) -> CallKind:
    """The kind of a call of `layer` with its declared inputs.

    Raises:
        Decline: when the layer is not built or declares no input shapes.
    """
    if not getattr(layer, "built", False):
        raise Decline(Reason.NOT_BUILT)
    model = getattr(layer, "_functional", None) or layer
    struct = getattr(model, "_inputs_struct", None)
    tensors: list[TensorKind] = []

    def tensor(name: str, shape: Any, dtype: str, floating: bool) -> TensorKind:
        torch_dtype = compat.to_torch_dtype(dtype)
        static = axes_to_guard(layer, len(tensors), len(shape), torch_dtype) if floating else ()
        sizes = tuple(shape)
        axes = frozenset(a for a in static if sizes[a] is not None)
        axes |= {a for a, size in enumerate(sizes) if size is not None and a > 0}
        # The batch size of a build by call is that call's, not a promise.
        kind = TensorKind(name, torch_dtype, (None, *sizes[1:]) if sizes else (), axes)
        tensors.append(kind)
        return kind

    if struct is not None:
        kinds = iter(
            [tensor(_name(t.name), t.shape, t.dtype, True) for t in compat.tree.flatten(struct)]
        )
        args = compat.tree.map_structure(lambda _: next(kinds), struct)
        if isinstance(args, list) and len(args) == 1:
            args = args[0]
        return CallKind((args,), {}, True, training, tensors=tuple(tensors))
    shapes = layer._build_shapes_dict
    if not shapes:
        raise Decline(Reason.NOT_BUILT, "it declares no input shapes")
    parameters = list(layer._call_signature.parameters)
    arguments: dict[str, Any] = {}
    for i, (key, shape) in enumerate(shapes.items()):
        name = key.removesuffix("_shape")
        name = name if name in parameters else parameters[i]
        if name == "input" or not _is_shape(shape):
            arguments[parameters[i]] = _nested(name, shape, layer, tensor)
        else:
            arguments[name] = tensor(name, shape, _dtype(layer), True)
    first, *rest = arguments.items()
    return CallKind((first[1],), dict(rest), True, training, tensors=tuple(tensors))


def _nested(name: str, shape: Any, layer: Any, tensor: Any) -> Any:
    if _is_shape(shape):
        return tensor(name, shape, _dtype(layer), True)
    if isinstance(shape, dict):
        return {key: _nested(f"{name}_{key}", item, layer, tensor) for key, item in shape.items()}
    if isinstance(shape, (list, tuple)):
        return [_nested(f"{name}_{i}", item, layer, tensor) for i, item in enumerate(shape)]
    raise Decline(Reason.STRUCTURE, f"{name} has the shape {shape!r}")


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, (list, tuple)) and all(
        size is None or isinstance(size, int) for size in shape
    )


def _dtype(layer: Any) -> str:
    if type(layer).__name__ == "Embedding":
        return "int32"
    return layer.input_dtype


def _name(name: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in name)
    return text if text and not text[0].isdigit() else f"input_{text}"
