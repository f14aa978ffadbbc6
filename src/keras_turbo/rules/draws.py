"""Random numbers from Keras seeds, as programs draw them at run time.

A seed is a state tensor of two numbers; every draw makes a generator of its own from them,
as stock Keras does. A compiler cannot look into a generator: under `torch.compile` each
draw is one operator of ours, opaque to it, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

is_compiling = torch.compiler.is_compiling


def generator(state: torch.Tensor, draw: int) -> torch.Generator:
    """A generator seeded by a Keras seed state, `draw` draws ahead."""
    first, second = state.tolist()
    return torch.Generator(device=state.device).manual_seed((first + second + draw) & 0xFFFFFFFF)


def _bernoulli(probabilities: torch.Tensor, state: torch.Tensor, draw: int) -> torch.Tensor:
    return torch.bernoulli(probabilities, generator=generator(state, draw))


def bernoulli(probabilities: torch.Tensor, state: torch.Tensor, draw: int) -> torch.Tensor:
    """Ones with the given probabilities, drawn from a Keras seed state."""
    if is_compiling():
        return _operators["bernoulli"](probabilities, state, draw)
    return _bernoulli(probabilities, state, draw)


bernoulli.one_node = True  # type: ignore[attr-defined]
bernoulli.meta = lambda p, state, draw: torch.empty_like(p)  # type: ignore[attr-defined]


def _normal(
    like: torch.Tensor,
    mean: float,
    stddev: float,
    dtype: torch.dtype,
    state: torch.Tensor,
    draw: int,
) -> torch.Tensor:
    return torch.normal(
        mean,
        stddev,
        size=like.shape,
        generator=generator(state, draw),
        dtype=dtype,
        device=like.device,
    )


def normal(
    like: torch.Tensor,
    mean: float,
    stddev: float,
    dtype: torch.dtype,
    state: torch.Tensor,
    draw: int,
) -> torch.Tensor:
    """Normal numbers of a tensor's shape, drawn from a Keras seed state."""
    if is_compiling():
        return _operators["normal"](like, mean, stddev, dtype, state, draw)
    return _normal(like, mean, stddev, dtype, state, draw)


normal.one_node = True  # type: ignore[attr-defined]
normal.meta = (  # type: ignore[attr-defined]
    lambda like, mean, stddev, dtype, state, draw: torch.empty_like(like, dtype=dtype)
)

_DRAWS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "bernoulli": (_bernoulli, bernoulli.meta),  # type: ignore[attr-defined]
    "normal": (_normal, normal.meta),  # type: ignore[attr-defined]
}


_operators: dict[str, Any] = {}


def register() -> None:
    """Make an operator of every draw, before a compiler meets one."""
    if _operators:
        return
    for name, (function, meta) in _DRAWS.items():
        operator = torch.library.custom_op(f"keras_turbo::{name}", function, mutates_args=())
        operator.register_fake(meta)
        _operators[name] = getattr(torch.ops.keras_turbo, name).default
