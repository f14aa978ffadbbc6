"""Random numbers from Keras seeds, as programs draw them at run time.

A seed is a state tensor of two numbers; every draw makes a generator of its own from them,
as stock Keras does. A compiler cannot look into a generator: under `torch.compile` each
draw is one operator of ours, opaque to it, with the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Draw = Callable[..., torch.Tensor]
is_compiling = torch.compiler.is_compiling
_DRAWS: dict[str, tuple[Draw, Draw]] = {}
_operators: dict[str, Any] = {}


def generator(state: torch.Tensor, draw: int) -> torch.Generator:
    """A generator seeded by a Keras seed state, `draw` draws ahead."""
    first, second = state.tolist()
    return torch.Generator(device=state.device).manual_seed((first + second + draw) & 0xFFFFFFFF)


def _draw(meta: Callable[..., torch.Tensor]) -> Callable[[Draw], Draw]:
    """Make a function one node of a program, and one operator where a compiler looks on.

    Args:
        meta: its result on meta tensors.
    """

    def decorate(function: Draw) -> Draw:
        name = function.__name__

        @functools.wraps(function)
        def draw(*args: Any) -> torch.Tensor:
            return _operators[name](*args) if is_compiling() else function(*args)

        draw.one_node, draw.meta = True, meta  # type: ignore[attr-defined]
        _DRAWS[name] = function, meta
        return draw

    return decorate


@_draw(lambda p, state, draw: torch.empty_like(p))
def bernoulli(probabilities: torch.Tensor, state: torch.Tensor, draw: int) -> torch.Tensor:
    """Ones with the given probabilities, drawn from a Keras seed state."""
    return torch.bernoulli(probabilities, generator=generator(state, draw))


@_draw(lambda like, mean, stddev, dtype, state, draw: torch.empty_like(like, dtype=dtype))
def normal(
    like: torch.Tensor,
    mean: float,
    stddev: float,
    dtype: torch.dtype,
    state: torch.Tensor,
    draw: int,
) -> torch.Tensor:
    """Normal numbers of a tensor's shape, drawn from a Keras seed state."""
    return torch.normal(
        mean,
        stddev,
        size=like.shape,
        generator=generator(state, draw),
        dtype=dtype,
        device=like.device,
    )


def register() -> None:
    """Make an operator of every draw, before a compiler meets one."""
    if _operators:
        return
    for name, (function, meta) in _DRAWS.items():
        operator = torch.library.custom_op(f"keras_turbo::{name}", function, mutates_args=())
        operator.register_fake(meta)
        _operators[name] = getattr(torch.ops.keras_turbo, name).default
