"""The loop over time steps around a traced step, for every cell and configuration.

The program holds it as one node, which takes the sequence, its mask, the initial states and
what the step captured. It runs under autograd, below a recorder and under Dynamo as it is,
for any number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason
from keras_turbo.rules.rnn_step import Step, trace_step


def loop(
    ctx: Any,
    step: Callable[..., Any],
    sequence: Any,
    states: Any,
    mask: Any,
    *,
    backwards: bool,
    zeros_for_mask: bool,
    sequences: bool,
) -> tuple[Any, Any, Any]:
    """Trace a step, and loop over the time steps of a sequence with it.

    Args:
        ctx: the lowering context.
        step: `step(x, states)` gives the output and the states after one time step.
        sequence: the inputs, with time as the second axis.
        states: the structure of initial states.
        mask: which steps count, by batch and time; None if all do.
        backwards: whether the last step is taken first.
        zeros_for_mask: whether a step that does not count gives zeros, not the output before.
        sequences: whether the outputs of all steps are wanted.

    Returns:
        The last output, all outputs in the order in which they were made or None, and the
        structure of states at the end.

    Raises:
        Decline: for a step whose states change their kind on the way.
    """
    flat = compat.tree.flatten(states)

    def one(x: Any, *flat_states: Any) -> Any:
        return step(x, compat.tree.pack_sequence_as(states, list(flat_states)))

    def traced_from(metas: Any) -> tuple[Step, Any, Any]:
        inputs = [("x", tuple(meta[:, 0] for meta in sequence.metas))]
        inputs += [(f"state_{i}", pair) for i, pair in enumerate(metas)]
        traced = trace_step(ctx, one, inputs)
        output, after = traced.structure
        if compat.tree.is_nested(output):
            raise Decline(Reason.STRUCTURE, "a cell with several outputs")
        return traced, output, [pair.metas for pair in compat.tree.flatten(after)]

    kinds = [state.metas for state in flat]
    first, output, after = traced_from(kinds)
    rest = first
    if not _alike(after, kinds) and mask is None:
        # The first step may promote zeros to what all later states are.
        kinds = after
        rest, output, after = traced_from(kinds)
    if not _alike(after, kinds):
        raise Decline(Reason.STRUCTURE, "states that change their shape or dtype")
    if mask is not None:
        if mask.ndim != 2:
            raise Decline(Reason.MASK, "a mask that is not one of batch and time")
        mask = mask if mask.dtype == torch.bool else mask.to(torch.bool)
    node = TimeLoop((first, rest), len(flat), backwards, zeros_for_mask, sequences)
    last = output.metas
    every = _every(sequence.metas, last) if sequences else last
    metas = tuple((last[i], every[i], *(pair[i] for pair in kinds)) for i in (0, 1))
    captured = (*first.captured, *(() if rest is first else rest.captured))
    args = (sequence, mask, *flat, *captured)
    last, every, *after = ctx.tracer.append("call_function", node.run, args, {}, metas)
    packed = compat.tree.pack_sequence_as(states, list(after))
    return last, every if sequences else None, packed


def _alike(after: Any, before: Any) -> bool:
    """Whether states are of the same kinds before and after a step."""
    return len(after) == len(before) and all(
        a.shape == b.shape and a.dtype == b.dtype
        for pairs in zip(after, before, strict=True)
        for a, b in zip(*pairs, strict=True)
    )


def _every(sequences: Any, outputs: Any) -> tuple[torch.Tensor, ...]:
    """The meta outputs of all steps: time-major in memory, as they are stacked."""
    return tuple(
        out.new_empty((x.shape[1], *out.shape)).transpose(0, 1)
        for x, out in zip(sequences, outputs, strict=True)
    )


class TimeLoop:
    """A loop over time steps, for traced steps.

    Args:
        steps: the step that is taken first, and the one that is taken after it.
        count: how many states there are.
        backwards: whether the last step is taken first.
        zeros_for_mask: whether a step that does not count gives zeros.
        sequences: whether all outputs are wanted.

    Attributes:
        run: takes the sequence, the mask or None, the initial states and what the steps
            captured; returns the last output, all outputs (or the last one again) and the
            states at the end.
    """

    def __init__(
        self,
        steps: tuple[Step, Step],
        count: int,
        backwards: bool,
        zeros_for_mask: bool,
        sequences: bool,
    ) -> None:
        first, later = steps
        with_gradients = first.run, later.run
        without = first.run_without_gradients, later.run_without_gradients
        own = len(first.captured) if later is not first else None

        def time_loop(x: torch.Tensor, mask: torch.Tensor | None, *rest: Any) -> Any:
            run, run_later = with_gradients if torch.is_grad_enabled() else without
            state, captured = rest[:count], rest[count:]
            captured, captured_later = captured[:own], captured[own or 0 :]
            steps = x.unbind(1)
            masks = None if mask is None else mask.unbind(1)
            if not steps:
                raise ValueError("a sequence without steps")
            outputs, output = [], None
            for t in range(len(steps) - 1, -1, -1) if backwards else range(len(steps)):
                new, *after = run(steps[t], *state, *captured)
                if masks is not None:
                    keep = masks[t]
                    after = [_select(keep, a, b) for a, b in zip(after, state, strict=True)]
                    if zeros_for_mask or output is None:
                        output = torch.zeros_like(new)
                    new = _select(keep, new, output)
                output, state = new, tuple(after)
                run, captured = run_later, captured_later
                if sequences:
                    outputs.append(output)
            every = torch.stack(outputs).transpose(0, 1) if sequences else output
            return (output, every, *state)

        time_loop.source = later.source  # type: ignore[attr-defined]
        self.run = time_loop


def _select(keep: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The new value in rows that count, the old one in the others."""
    return torch.where(keep.reshape(keep.shape + (1,) * (new.ndim - 1)), new, old)
