"""Memory: which values of a recorded step share it, and when it is written to.

A recorded step writes in place, as the program did and as the effects do. A pass that reads a
value earlier or later than the step did has to know that nothing is written to it in between.
"""

from __future__ import annotations

from typing import Any

from torch import fx

VIEWS = frozenset(["t", "view", "permute", "transpose", "unsqueeze", "squeeze"])


class Writes:
    """When the memory behind each value of a graph is written to for the last time.

    Args:
        graph: a recorded graph whose operations have been named.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.last: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node.meta.get("effect"):
                for target in _targets(node):
                    self.last[owner(target)] = self.order[node]

    def settled(self, *nodes: Any) -> bool:
        """Whether nothing is written to these values once they are there."""
        return all(
            self.last.get(owner(node), -1) <= self.order.get(node, len(self.order))
            for node in nodes
            if isinstance(node, fx.Node)
        )


def _targets(node: fx.Node) -> list[fx.Node]:
    """What an operation writes to: all that it takes, where it does not say."""
    if "writes" not in node.meta:
        return node.all_input_nodes
    positions, names = node.meta["writes"]
    given = [node.args[i] for i in positions if i < len(node.args)]
    given += [node.kwargs[name] for name in names if name in node.kwargs]
    found: list[fx.Node] = []
    fx.map_arg(given, lambda n: found.append(n) or n)
    return found


def owner(node: fx.Node) -> fx.Node:
    """The value whose memory a value lies in."""
    while _shares(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _shares(node: fx.Node) -> bool:
    """Whether a value lies in the memory of its first operand."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    name = node.meta.get("name", "")
    if node.op == "call_method":
        # Recorded methods are views and writes in place, but for the copy of a number.
        return node.target != "clone"
    return node.op == "call_function" and (
        name == "getitem" or "unsafe" in name or node.meta.get("aliases", True)
    )
