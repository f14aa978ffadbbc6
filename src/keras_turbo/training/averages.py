"""The moving averages that an optimizer keeps of its variables, for all of them at once."""

from __future__ import annotations

from typing import Any

import torch

from keras_turbo.fallback import Decline, Reason
from keras_turbo.training.kernels import matched
from keras_turbo.training.numbers import Numbers


class Average:
    """Updates the averages after each step, and writes them back where the optimizer asks.

    Args:
        optimizer: an optimizer with `use_ema`.
        numbers: its numbers.
    """

    def __init__(self, optimizer: Any, numbers: Numbers) -> None:
        slots = optimizer._model_variables_moving_average
        if len(slots) != len(optimizer._trainable_variables) or None in slots:
            raise Decline(Reason.UNSUPPORTED, "moving averages of some variables only")
        self.parameters = [v._value for v in optimizer._trainable_variables]
        self.averages = matched(slots, optimizer._trainable_variables)
        self.numbers = numbers
        self.momentum = float(optimizer.ema_momentum)
        self.frequency = optimizer.ema_overwrite_frequency

    def run(self) -> None:
        """Update the averages, before the step is counted."""
        count = self.numbers.count()
        momentum = 0.0 if count == 1 else self.momentum
        torch._foreach_mul_(self.averages, momentum)
        torch._foreach_add_(self.averages, self.parameters, alpha=1 - momentum)
        if self.frequency and count % self.frequency == 0:
            torch._foreach_copy_(self.parameters, self.averages)
