"""The numbers of an optimizer's step: learning rate, step count, bias corrections.

Keras computes them as tensors of the variables' dtype. Their rounding is large where two
nearly equal numbers are subtracted, as in a bias correction, so it is reproduced here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from keras_turbo import compat
from keras_turbo.fallback import Decline, Reason


class Numbers:
    """Reads and computes the numbers of one optimizer's steps.

    Args:
        optimizer: the optimizer.
        dtype: the dtype of its variables.

    Attributes:
        number: makes a number of that dtype.
    """

    def __init__(self, optimizer: Any, dtype: torch.dtype) -> None:
        self.optimizer = optimizer
        self.dtype = dtype
        self.number = np.float64 if dtype == torch.float64 else np.float32
        self.iterations = optimizer._iterations._value
        self.every = optimizer.gradient_accumulation_steps or 1
        rate = optimizer._learning_rate
        self.variable = rate._value if isinstance(rate, compat.Variable) else None
        self.bases: dict[float, torch.Tensor] = {}
        self.exponent = torch.tensor(0.0, dtype=dtype)
        if self.iterations.device.type != "cpu":
            raise Decline(Reason.UNSUPPORTED, "a step count on the device")

    def count(self) -> int:
        """The number of this step, from 1."""
        return self.iterations.item() // self.every + 1

    def rate(self) -> float:
        """The current learning rate: a variable's value, a schedule's, or a function's."""
        if self.variable is not None:
            return self.variable.item()
        return float(self.optimizer._get_current_learning_rate())

    def power(self, base: float, exponent: int) -> Any:
        """A power in the variables' dtype, with the rounding of torch's own `pow`."""
        tensor = self.bases.get(base)
        if tensor is None:
            tensor = self.bases[base] = torch.tensor(base, dtype=self.dtype)
        return self.number(torch.pow(tensor, self.exponent.fill_(exponent)).item())

    def adam_rate(self, beta_1: float, beta_2: float) -> float:
        """Adam's learning rate with both bias corrections in it."""
        count = self.count()
        corrected = np.sqrt(1 - self.power(beta_2, count))
        return float(self.number(self.rate()) * corrected / (1 - self.power(beta_1, count)))

    def kept(self, decay: float) -> float:
        """The part of a weight that weight decay leaves."""
        return float(1 - self.number(decay) * self.number(self.rate()))
