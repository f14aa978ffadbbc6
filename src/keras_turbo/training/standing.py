"""What a compiled step is called with and returns, apart from its batch.

Compiled code takes parameters and states as plain tensors and returns a flat tuple. `Standing`
keeps the tensors ready and follows parameters whose `.data` is replaced; `rebuild` gives
results the structure that the step's graph had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Standing:
    """Aliases of live tensors, made once and anew when one of them has moved.

    Args:
        live: parameters and states of a model.
    """

    def __init__(self, live: Sequence[torch.Tensor]) -> None:
        self._live = list(live)
        self._kinds = [_kind(tensor) for tensor in live]
        self._current = self._renewed()

    def __call__(self) -> list[torch.Tensor] | None:
        """The aliases; None where a tensor has another kind than the code was compiled for."""
        aliases, places = self._current
        for tensor, place in zip(self._live, places, strict=True):
            if tensor.data_ptr() != place:
                break
        else:
            return aliases
        if [_kind(tensor) for tensor in self._live] != self._kinds:
            return None
        # In one write, for calls from other threads.
        self._current = self._renewed()
        return self._current[0]

    def _renewed(self) -> tuple[list[torch.Tensor], list[int]]:
        aliases = [tensor.detach() for tensor in self._live]
        return aliases, [alias.data_ptr() for alias in aliases]


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class Place:
    """Where in the flat results a value of the outputs is."""

    def __init__(self, index: int) -> None:
        self.index = index


def rebuild(template: Any, results: Sequence[Any]) -> Any:
    """The outputs of a step, in containers of Python's own.

    Args:
        template: the structure of the outputs, with places in it.
        results: the flat results.
    """
    if isinstance(template, Place):
        return results[template.index]
    if isinstance(template, dict):
        return {key: rebuild(item, results) for key, item in template.items()}
    if isinstance(template, tuple):
        return tuple([rebuild(item, results) for item in template])
    if isinstance(template, list):
        return [rebuild(item, results) for item in template]
    return template
