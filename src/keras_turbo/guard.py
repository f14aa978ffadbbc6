"""The guard: one list of checks per program, compiled into one function.

`compile_entry` writes the checks of a program and the call of the program as straight
Python. The result returns `MISS` when the call is not of the program's kind; nothing on
that path raises, allocates or walks a structure. `ambient_reason` names what a miss was
due to when it was due to the surroundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import compat
from keras_turbo.fallback import Reason
from keras_turbo.specs import CallKind, Relation, Site, TensorKind
from keras_turbo.stock_scope import thread_state

MISS = object()

_SCOPES = {
    "stateless_scope": Reason.STATELESS,
    "symbolic_scope": Reason.SYMBOLIC,
    "distribution": Reason.DISTRIBUTION,
}


def ambient_reason() -> tuple[Reason, str] | None:
    """Why nothing can be lowered in the current surroundings, or None."""
    ambient = compat.ambient()
    for name, reason in _SCOPES.items():
        if ambient.get(name) is not None:
            return reason, ""
    device = ambient.get("torch_device")
    if device is not None and device != compat.DEFAULT_DEVICE:
        return Reason.DEVICE, f"device scope {device}"
    if compat.function_transform_active():
        return Reason.TRANSFORM, ""
    if compat.global_hooks_active():
        return Reason.HOOKS, "global"
    return None


def compile_entry(program: Any) -> Callable[..., Any]:
    """The inline-cache entry of a program: its guard and, behind it, its call.

    Args:
        program: the program; the entry refers to the layer weakly, through it.

    Returns:
        A function of a call's `args` and `kwargs` that returns the outputs, or `MISS`.
    """
    kind: CallKind = program.kind
    writer = _Writer(kind, program.fixed, program.relations)
    source = writer.source(program)
    namespace: dict[str, Any] = {
        "MISS": MISS,
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "GLOBAL_STATE": compat.GLOBAL_STATE,
        "DEVICE": compat.DEFAULT_DEVICE,
        "THREAD": thread_state,
        "peek": torch._C._functorch.peek_interpreter_stack,
        "tracing": torch._C._get_tracing_state,
        "program": program,
        "run": program.run,
        "run_without_gradients": program.run_without_gradients,
        "gradients": torch.is_grad_enabled,
        "owner": program.owner,
        "CallContext": compat.CallContext,
        **{f"hooks{i}": hooks for i, hooks in enumerate(compat.global_hooks)},
        **writer.constants,
    }
    exec(compile(source, "<keras_turbo guard>", "exec"), namespace)
    entry: Callable[..., Any] = namespace["entry"]
    entry.source = source  # type: ignore[attr-defined]
    return entry


class _Writer:
    """Writes the source of one entry."""

    def __init__(
        self, kind: CallKind, fixed: list[tuple[int, int, int]], relations: list[Relation]
    ) -> None:
        self.kind = kind
        self.fixed = fixed
        self.relations = relations
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.tensors: list[str] = []
        self.masks: list[str] = []

    def source(self, program: Any) -> str:
        kind = self.kind
        # First: inside a trace the sizes of a tensor are tensors themselves.
        self._unless("tracing() is None")
        self._arguments()
        self._relations()
        self.lines.append("ambient = GLOBAL_STATE.GLOBAL_STATE_TRACKER.__dict__")
        self.lines.append("get = ambient.get")
        self._unless(
            " and ".join(f"get({name!r}) is None" for name in _SCOPES)
            + " and not THREAD.stock and peek() is None"
            + "".join(f" and not hooks{i}" for i in range(len(compat.global_hooks)))
        )
        self.lines.append("device = get('torch_device')")
        self._unless("device is None or device == DEVICE")
        self.lines.append("scope = get('autocast_scope')")
        if kind.autocast is None:
            self._unless("scope is None")
        else:
            self._unless(f"scope is not None and str(scope.dtype) == {kind.autocast!r}")
        self.lines.append("context = get('current_call_ctx')")
        if not kind.has_training:
            wanted = repr(kind.context_training)
            self._unless(
                f"context is None or getattr(context, 'training', None) is {wanted}"
                if kind.context_training is None
                else f"context is not None and getattr(context, 'training', None) is {wanted}"
            )
        self._call(program)
        return "def entry(args, kwargs):\n" + "\n".join("    " + line for line in self.lines) + "\n"

    def _unless(self, condition: str) -> None:
        self.lines.append(f"if not ({condition}): return MISS")

    def _arguments(self) -> None:
        kind = self.kind
        expected = dict(kind.kwargs)
        if kind.has_training:
            expected["training"] = kind.training
        if expected:
            self._unless(f"len(kwargs) == {len(expected)}")
        else:
            self.lines.append("if kwargs: return MISS")
        if len(kind.args) == 1:
            self._unless("len(args) == 1")
            self.lines.append("a0, = args")
        else:
            self._unless(f"len(args) == {len(kind.args)}")
            if kind.args:
                names = ", ".join(f"a{i}" for i in range(len(kind.args)))
                self.lines.append(f"{names} = args")
        for i, item in enumerate(kind.args):
            self._item(f"a{i}", item)
        for i, (key, item) in enumerate(kind.kwargs.items()):
            self.lines.append(f"k{i} = kwargs.get({key!r}, MISS)")
            self._item(f"k{i}", item)
        if kind.has_training:
            self._unless(f"kwargs.get('training', MISS) is {kind.training!r}")

    def _relations(self) -> None:
        def size(side: Any) -> str:
            if not isinstance(side, Site):
                return repr(side)
            names = self.masks if side.mask else self.tensors
            return f"{names[side.position]}.shape[{side.axis}]"

        for relation in self.relations:
            self._unless(f"{size(relation.left)} {relation.symbol} {size(relation.right)}")

    def _item(self, name: str, item: Any) -> None:
        if isinstance(item, TensorKind):
            self._tensor(name, item)
        elif isinstance(item, (tuple, list)):
            self._unless(f"type({name}) is {type(item).__name__} and len({name}) == {len(item)}")
            for i, entry in enumerate(item):
                self.lines.append(f"{name}_{i} = {name}[{i}]")
                self._item(f"{name}_{i}", entry)
        elif isinstance(item, dict):
            self._unless(f"type({name}) is dict and list({name}) == {list(item)!r}")
            for i, (key, entry) in enumerate(item.items()):
                self.lines.append(f"{name}_{i} = {name}[{key!r}]")
                self._item(f"{name}_{i}", entry)
        elif item is None or isinstance(item, bool):
            self._unless(f"{name} is {item!r}")
        else:
            constant = f"c{len(self.constants)}"
            self.constants[constant] = item
            self._unless(f"type({name}) is {type(item).__name__} and {name} == {constant}")

    def _tensor(self, name: str, kind: TensorKind) -> None:
        position = len(self.tensors)
        self.tensors.append(name)
        dtype = f"dtype{len(self.constants)}"
        self.constants[dtype] = kind.dtype
        device = compat.default_device()
        on_device = f"{name}.is_cpu" if device.type == "cpu" else f"{name}.device == home"
        if device.type != "cpu":
            self.constants["home"] = device
        self._unless(
            f"(type({name}) is Tensor or type({name}) is Parameter)"
            f" and {name}.dtype is {dtype} and {on_device}"
        )
        static = {axis: kind.sizes[axis] for axis in kind.static}
        static.update({axis: size for p, axis, size in self.fixed if p == position})
        if static:
            self.lines.append(f"s{position} = {name}.shape")
            self._unless(
                f"len(s{position}) == {len(kind.sizes)}"
                + "".join(f" and s{position}[{a}] == {n}" for a, n in sorted(static.items()))
            )
        else:
            self._unless(f"{name}.ndim == {len(kind.sizes)}")
        if kind.mask is None:
            self._unless(f"getattr({name}, '_keras_mask', None) is None")
        else:
            mask = f"m{position}"
            self.constants[f"{dtype}m"] = kind.mask.dtype
            self.lines.append(f"{mask} = getattr({name}, '_keras_mask', None)")
            self._unless(
                f"type({mask}) is Tensor and {mask}.dtype is {dtype}m"
                f" and {mask}.ndim == {len(kind.mask.sizes)}"
            )
        self.masks.append(f"m{position}" if kind.mask is not None else "")

    def _call(self, program: Any) -> None:
        inputs = []
        for name, mask in zip(self.tensors, self.masks, strict=True):
            inputs.append(name)
            if mask:
                inputs.append(mask)
        add = self.lines.append
        chosen = "run"
        if program.run is not program.run_without_gradients:
            add("chosen = run if gradients() else run_without_gradients")
            chosen = "chosen"
        call = f"{chosen}({', '.join(inputs)})"
        add("if context is None:")
        add("    if program.clear_losses: program.begin()")
        if program.stock_calls:
            add("    ambient['current_call_ctx'] = CallContext(owner())")
            add("    try:")
            add(f"        return {call}")
            add("    finally:")
            add("        ambient['current_call_ctx'] = None")
        else:
            add(f"    return {call}")
        if program.stock_calls:
            # Stock nodes set the flag; where one fails, stock Keras starts from what it was.
            add("before = getattr(context, 'training', None)")
            add("try:")
            add(f"    outputs = {call}")
            add("except BaseException:")
            add("    context.set_value('training', before)")
            add("    raise")
        else:
            add(f"outputs = {call}")
        if program.final_training is None or isinstance(program.final_training, bool):
            add(f"context.set_value('training', {program.final_training!r})")
        add("return outputs")
