"""The only file that touches `keras.src` or private torch names.

Everything the package needs from the inside of Keras and torch is looked up here, once,
so that a new release breaks one file and not twenty.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from keras.src import backend as keras_backend
from keras.src import ops, tree
from keras.src.activations import activations
from keras.src.backend.common import dtypes, global_state
from keras.src.backend.common.keras_tensor import KerasTensor
from keras.src.backend.common.stateless_scope import StatelessScope
from keras.src.backend.common.symbolic_scope import SymbolicScope
from keras.src.backend.common.variables import AutocastScope, is_float_dtype, standardize_dtype
from keras.src.backend.torch import trainer as torch_trainer
from keras.src.callbacks.callback_list import CallbackList
from keras.src.dtype_policies.dtype_policy_map import DTypePolicyMap
from keras.src.layers.core.input_layer import InputLayer
from keras.src.layers.layer import CallContext, Layer
from keras.src.layers.rnn.conv_lstm import ConvLSTMCell
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell
from keras.src.losses.loss import Loss
from keras.src.metrics.metric import Metric
from keras.src.models.functional import Functional
from keras.src.models.sequential import Sequential
from keras.src.ops.function import Function
from keras.src.ops.operation import Operation
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, SeedGenerator
from keras.src.trainers import trainer as base_trainer
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.utils import traceback_utils
from torch.autograd import forward_ad as _forward_ad
from torch.nn.modules import module as _torch_module
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DEFAULT_DEVICE",
    "GLOBAL_SEED_GENERATOR",
    "GLOBAL_STATE",
    "ArrayDataAdapter",
    "AutocastScope",
    "BaseOptimizer",
    "CallContext",
    "CallbackList",
    "ConvLSTMCell",
    "DTypePolicyMap",
    "DropoutRNNCell",
    "Function",
    "Functional",
    "InputLayer",
    "KerasTensor",
    "Layer",
    "Loss",
    "Metric",
    "Operation",
    "SeedGenerator",
    "Sequential",
    "StopRecomputation",
    "TorchTrainer",
    "Trainer",
    "Variable",
    "activations",
    "ambient",
    "autograd_is_watched",
    "backend",
    "call_on_meta",
    "compiler_errors",
    "default_device",
    "forward_mode_active",
    "function_transform_active",
    "global_hooks",
    "global_hooks_active",
    "has_hooks",
    "inductor_compile",
    "is_float",
    "large_negative",
    "mask_warning",
    "onednn_enabled",
    "opaque_attention",
    "ops",
    "outside_modes",
    "recording",
    "result_type",
    "storage_is_shared",
    "to_torch_dtype",
    "traceback_utils",
    "tree",
    "unsupported",
    "warn_of_array",
]


def _torch_backend(name: str) -> Any:
    """A module of Keras's torch backend, which newer releases keep one folder deeper."""
    for path in (f"keras.src.backend.torch.{name}", f"keras.src.backend.torch.ops.{name}"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path and not path.startswith(f"{error.name}."):
                raise
    raise ImportError(f"Keras's torch backend has no module {name}")


torch_core, torch_nn = _torch_backend("core"), _torch_backend("nn")

TorchTrainer: Any = getattr(torch_trainer, "TorchTrainer", None) or torch_trainer.Trainer
Trainer: Any = getattr(base_trainer, "BaseTrainer", None) or base_trainer.Trainer

backend = SimpleNamespace(
    backend=keras_backend.backend,
    cast=torch_core.cast,
    convert_to_tensor=torch_core.convert_to_tensor,
    device_scope=torch_core.device_scope,
    floatx=keras_backend.floatx,
    is_float_dtype=is_float_dtype,
    standardize_dtype=standardize_dtype,
)
"""The functions of Keras's backend that are used here, wherever this release keeps them."""

Variable = torch_core.Variable
DEFAULT_DEVICE: str = torch_core.DEFAULT_DEVICE
GLOBAL_STATE = global_state

MINIMUM_KERAS = (3, 13)
MINIMUM_TORCH = (2, 6)


def unsupported() -> str | None:
    """Why this Keras or torch cannot be served, or None if it can."""
    for name, version, minimum in (
        ("keras", _keras_version(), MINIMUM_KERAS),
        ("torch", torch.__version__, MINIMUM_TORCH),
    ):
        numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
        if numbers < minimum:
            wanted = ".".join(map(str, minimum))
            return f"{name} {version} is older than {wanted}"
    if backend.backend() != "torch":
        return f"the Keras backend is '{backend.backend()}', not 'torch'"
    return None


def _keras_version() -> str:
    import keras

    version = getattr(keras, "__version__", None)
    return version if isinstance(version, str) else metadata.version("keras")


def ambient() -> dict[str, Any]:
    """This thread's scopes, as Keras keeps them."""
    return global_state.GLOBAL_STATE_TRACKER.__dict__


def default_device() -> torch.device:
    """The device on which Keras places tensors outside any device scope."""
    device = torch.device(DEFAULT_DEVICE)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def to_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype for a Keras dtype name."""
    return torch_core.to_torch_dtype(dtype)


def call_on_meta(layer: Any, args: Any, kwargs: Any) -> Any:
    """A layer's `call` for KerasTensors, evaluated on the meta device, without effects."""

    def tensor(item: Any) -> Any:
        if not isinstance(item, KerasTensor):
            return item
        return torch.empty(item.shape, dtype=to_torch_dtype(item.dtype), device="meta")

    with backend.device_scope("meta"), torch.no_grad():
        values = [
            (v, torch.empty(tuple(v.shape), dtype=to_torch_dtype(v._dtype), device="meta"))
            for v in layer.variables
        ]
        with StatelessScope(values), SymbolicScope():
            meta_args: Any = tree.map_structure(tensor, args)
            meta_kwargs: Any = tree.map_structure(tensor, kwargs)
            return layer.call(*meta_args, **meta_kwargs)


def is_float(dtype: torch.dtype) -> bool:
    """Whether Keras counts `dtype` as a floating-point dtype."""
    return backend.is_float_dtype(backend.standardize_dtype(dtype))


def result_type(*kinds: Any) -> torch.dtype:
    """Keras's promoted dtype; without 64-bit numbers, float64 comes out as float32."""
    return to_torch_dtype(dtypes.result_type(*kinds))


def mask_warning(name: str, kind: str) -> Callable[[], None]:
    """The installed Keras's warning for a layer at which a mask ends.

    Users filter warnings by their text and place, and Python shows each text once per place, so
    both are taken from Keras's own code.
    """
    code = inspect.unwrap(Layer.__call__).__code__
    line, ending = code.co_firstlineno, ") has no masking support: the mask of its input ends here."
    called = line
    for instruction in dis.get_instructions(code):
        line = instruction.starts_line or line
        if instruction.argval == "warn":
            called = line
        elif isinstance(instruction.argval, str) and "mask attached to it" in instruction.argval:
            ending = instruction.argval
            break
    text = f"Layer '{name}' (of type {kind}{ending}"
    module = sys.modules[Layer.__module__]
    registry = vars(module).setdefault("__warningregistry__", {})

    def warn() -> None:
        place = code.co_filename, called
        warnings.warn_explicit(text, UserWarning, *place, module.__name__, registry)

    return warn


def warn_of_array(model: Any, inputs: Any) -> None:
    """A Functional model's own warning for an array where it declares a list of one input.

    A tensor in that place is put into a list without a word.
    """
    declared = getattr(model, "_inputs_struct", None)
    warn = getattr(model, "_maybe_warn_inputs_struct_mismatch", None)
    if warn is not None and isinstance(declared, list) and len(declared) == 1:
        warn(inputs)


large_negative = torch_nn._get_large_negative


def opaque_attention(ctx: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    """Keras's own attention function as one operation of a program."""

    def attention(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return torch_nn.dot_product_attention(query, key, value, *rest)

    def meta(query: Any, _key: Any, value: Any, *_: Any) -> Any:
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    attention.meta = meta  # type: ignore[attr-defined]
    arguments = (query, key, value, *rest)
    return ctx.tracer.create_proxy("call_function", attention, arguments, {})


global_hooks = tuple(
    getattr(_torch_module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)


def global_hooks_active() -> bool:
    """Whether any hook is registered for all torch modules."""
    return any(global_hooks)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a forward, pre-forward or backward hook is registered on `module`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


_peek_transform = torch._C._functorch.peek_interpreter_stack
_tracing_state = torch._C._get_tracing_state
_mode_depth = torch._C._len_torch_dispatch_stack
_function_mode_depth = torch._C._len_torch_function_stack


def function_transform_active() -> bool:
    """Whether a torch.func transform, a jit trace or a torch mode is active."""
    return (
        _peek_transform() is not None
        or _tracing_state() is not None
        or _mode_depth() > 0
        or _function_mode_depth() > 0
    )


def recording() -> bool:
    """Whether something watches or changes every operation on its way to a kernel."""
    return _mode_depth() > 0


def forward_mode_active() -> bool:
    """Whether tensors may carry tangents of a forward-mode derivative."""
    return _forward_ad._current_level >= 0


def onednn_enabled() -> bool:
    """Whether torch may use oneDNN's kernels on the CPU."""
    return torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()


def compiler_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile` raises where it, and not the compiled code, fails."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_any_autocast = torch._C._is_any_autocast_enabled


def autograd_is_watched() -> bool:
    """Whether saved-tensor hooks, anomaly mode or torch's autocast see or change a step."""
    return _saved_tensors_hooks(True) is not None or torch.is_anomaly_enabled() or _any_autocast()


StopRecomputation: type[Exception] = checkpoint._StopRecomputationError
"""How `torch.utils.checkpoint` leaves a recomputation that has made all it needs."""


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """A context outside all torch modes, such as those of export and fake tensors.

    Export records even `no_grad` blocks through a function mode.
    """
    modes = []
    while _function_mode_depth() > 0:
        modes.append(torch.overrides._pop_mode())
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            torch.overrides._push_mode(mode)


def inductor_compile(module: Any, examples: list[Any], how: dict[str, Any]) -> Any:
    """A compiled function of a graph module, which Dynamo has no part in.

    Args:
        module: straight-line operations.
        examples: its arguments.
        how: `mode` and `options`, as `torch.compile` takes them.
    """
    from torch import _inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = how.get("mode")
    chosen = _inductor.list_mode_options(mode) if mode else {}
    # Inductor finds in its cache on disk only what was traced with an environment of shapes.
    shapes = ShapeEnv(assume_static_by_default=True)
    with tracing(TracingContext(FakeTensorMode(shape_env=shapes))):
        return _inductor.compile(module, examples, {**chosen, **how.get("options", {})})


def storage_is_shared(tensor: torch.Tensor) -> bool:
    """Whether another tensor or array may view the storage of `tensor`."""
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.numel() * tensor.element_size() or not storage.resizable():
        return True
    # One reference is the tensor's own, one is held by `storage` above.
    return torch._C._storage_Use_Count(storage._cdata) > 2
