"""Functions of one tensor, and perhaps numbers, that treat every element alike."""

from __future__ import annotations

from typing import Any

import torch

ELEMENTWISE: frozenset[Any] = frozenset(
    {
        torch.relu,
        torch.sigmoid,
        torch.tanh,
        torch._C._nn.gelu,
        torch._C._nn.silu,
        torch._C._nn.hardtanh,
        torch._C._nn.hardswish,
        torch._C._nn.hardsigmoid,
        torch._C._nn.elu,
        torch._C._nn.leaky_relu,
    }
)
