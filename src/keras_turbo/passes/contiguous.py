"""Contiguous: drop copies whose only purpose is a memory order that the user ignores.

Stock Keras copies into a contiguous order before convolutions and pooling. The kernels
take floating-point numbers in any order and give the same values; in torch's channels-last
order, which a permuted Keras tensor already has, they are fastest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_ANY_ORDER: frozenset[Any] = frozenset(
    {
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.max_pool1d,
        torch.max_pool2d,
        torch.max_pool3d,
        torch.avg_pool1d,
        torch._C._nn.avg_pool2d,
        torch._C._nn.avg_pool3d,
        torch._C._nn.pad,
        torch.permute,
        torch.mean,
        torch.relu,
        "permute",
        "contiguous",
    }
)


def remove_contiguous(graph: fx.Graph) -> None:
    """Remove `contiguous` before operations that take tensors in any memory order."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_method" or node.target != "contiguous":
            continue
        metas: Any = node.meta.get("metas")
        if metas is None or not metas[0].dtype.is_floating_point:
            # Some kernels refuse integers in another order than the contiguous one.
            continue
        if node.users and all(user.target in _ANY_ORDER for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
