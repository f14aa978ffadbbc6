"""`jit_compile=True`: what `fit`, `evaluate` and `predict` run then.

Stock Keras gives the whole step function to `torch.compile`, which Dynamo takes apart at
every call it cannot follow. Where a step is Keras's own, the plain function stays and its
lowered step is compiled behind it, as one graph; a step that a user wrote goes through
`torch.compile` as ever, and runs eagerly from the first failure of the compiler on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import compat, dispatch, fallback, guard
from keras_turbo.fallback import Decline
from keras_turbo.guard import MISS
from keras_turbo.training.joint import Joints

stock_predict_step: Callable[..., Any] = compat.TorchTrainer.predict_step
_PREDICT = "predict"


def making(stock: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """A trainer's `make_train_function` and the like, for one mode."""
    function_name, step_name = f"{mode}_function", f"{mode}_step"

    def make_function(self: Any, force: bool = False) -> Any:
        if guard.thread_state.stock:
            return stock(self, force=force)
        own = getattr(type(self), step_name) is getattr(compat.TorchTrainer, step_name)
        if own and step_name not in vars(self):
            # Not even asking for `torch.compile` saves loading it, which takes seconds.
            self.__dict__["_should_torch_compile"] = _never
            try:
                return stock(self, force=force)
            finally:
                del self.__dict__["_should_torch_compile"]
        result = stock(self, force=force)
        function = getattr(self, function_name)
        plain = getattr(function, "_torchdynamo_orig_callable", None)
        if plain is not None and not isinstance(function, OrEagerly):
            setattr(self, function_name, OrEagerly(function, plain))
        return result

    return make_function


def _never() -> bool:
    return False


class OrEagerly:
    """A compiled function that gives way to the plain one if the compiler fails.

    Args:
        compiled: what `torch.compile` returned.
        plain: the function that it compiles.
    """

    def __init__(self, compiled: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._torchdynamo_orig_callable = plain
        self.function = compiled

    def __call__(self, data: Any) -> Any:
        try:
            return self.function(data)
        except compat.compiler_errors() as error:
            if self.function is self._torchdynamo_orig_callable:
                raise
            problem = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self.function = self._torchdynamo_orig_callable
        fallback.warn(
            f"keras_turbo: torch.compile failed ({problem}). The step runs eagerly from now on."
        )
        return self.function(data)


def predict_step(self: Any, data: Any) -> Any:
    """One step of `predict`: compiled where the model asks for it and can be lowered."""
    if not self.jit_compile or torch.compiler.is_compiling() or guard.thread_state.stock:
        return stock_predict_step(self, data)
    x = data[0] if isinstance(data, (tuple, list)) else data
    kwargs = {"training": False} if self._call_has_training_arg else {}
    cache = self.__dict__.get("_keras_turbo")
    joints = None if cache is None else cache.compiled.get(_PREDICT)
    args = (x,)
    if type(x) is not torch.Tensor:
        converted = dispatch.from_numpy(self, args, {})
        args = args if converted is None else converted[0]
    if joints is not None:
        for entry, _ in joints.entries:
            outputs = entry(args, kwargs)
            if outputs is not MISS:
                if args[0] is not x:
                    dispatch.warn_of_array(self, (x,), kwargs)
                return outputs[0]
    outputs = stock_predict_step(self, data)
    cache = self.__dict__.get("_keras_turbo")
    if cache is not None and cache.programs and not torch.is_grad_enabled():
        _compile(self, cache, args, kwargs)
    return outputs


def _compile(model: Any, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the program that has just served a batch compiled for its sizes."""
    joints = cache.compiled.setdefault(_PREDICT, Joints())
    try:
        kind = dispatch.kind_of_call(model, args, kwargs)
    except Decline:
        return
    for program in cache.programs:
        if program.kind == kind:
            joints.seen(model, program, args, kwargs, training=False)
            return
