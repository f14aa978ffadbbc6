"""The recurrent sequence models of the workloads `lstm`, `gru` and `bilstm`, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keras_turbo.bench.reference.copying import put, tensor


class Recurrent(nn.Module):
    """A stack of recurrent layers over batches of sequences.

    Args:
        kind: `nn.LSTM` or `nn.GRU`.
        inputs: the number of features.
        units: the units of each layer.
        depth: how many layers are stacked.
        both: whether each layer runs in both directions.
    """

    def __init__(self, kind: Any, inputs: int, units: int, depth: int, both: bool) -> None:
        super().__init__()
        self.recurrent = kind(inputs, units, depth, batch_first=True, bidirectional=both)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.recurrent(x)
        return outputs

    def copy_from(self, model: Any) -> None:
        """Take the weights of the Keras model."""
        for i, layer in enumerate(model.layers):
            if self.recurrent.bidirectional:
                self._copy(layer.forward_layer.cell, f"l{i}")
                self._copy(layer.backward_layer.cell, f"l{i}_reverse")
            else:
                self._copy(layer.cell, f"l{i}")

    def _copy(self, cell: Any, suffix: str) -> None:
        module: Any = self.recurrent
        put(getattr(module, f"weight_ih_{suffix}"), self._gates(tensor(cell.kernel).t()))
        put(getattr(module, f"weight_hh_{suffix}"), self._gates(tensor(cell.recurrent_kernel).t()))
        bias = tensor(cell.bias)
        first, second = (bias, torch.zeros_like(bias)) if bias.ndim == 1 else bias
        put(getattr(module, f"bias_ih_{suffix}"), self._gates(first))
        put(getattr(module, f"bias_hh_{suffix}"), self._gates(second))

    def _gates(self, weight: torch.Tensor) -> torch.Tensor:
        """Keras's order of the gates as torch's."""
        if isinstance(self.recurrent, nn.LSTM):
            return weight
        update, reset, new = weight.chunk(3)
        return torch.cat((reset, update, new))
