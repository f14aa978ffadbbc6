"""Dead code: drop every node whose result nobody uses and that is no effect."""

from __future__ import annotations

from torch import fx

from keras_turbo.stocknode import StockCall


def remove_dead_code(graph: fx.Graph) -> None:
    """Remove unused nodes; effects, inputs and stock nodes stay."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node.meta.get("effect") or isinstance(node.target, StockCall):
            continue
        graph.erase_node(node)
