"""Standing views of parameters for calls without gradients.

A kernel often wants a parameter under another shape or axis order. Making that view costs
more than many kernels on small inputs. Without gradients a view made once can stand for it,
as it shares the parameter's memory; it is made anew when the parameter moved elsewhere.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from keras_turbo import compat

# Never copies, unlike `reshape` and `flatten`.
_VIEWS = frozenset({"view", "t", "permute", "transpose", "squeeze"})


def view_chains(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes that are views of a parameter with constant arguments, by node.

    Returns:
        From the node of each such view to the `get_attr` node of its parameter.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            roots[node] = node
        elif node.op == "call_method" and node.target in _VIEWS and not node.kwargs:
            source, *rest = node.args
            if source in roots and not any(isinstance(arg, fx.Node) for arg in rest):
                roots[node] = roots[source]
    return {
        node: root
        for node, root in roots.items()
        if node is not root and not any(user.op == "output" for user in node.users)
    }


class Aliases:
    """The standing views of one program.

    Args:
        chains: what `view_chains` found.
        namespace: the globals of the generated function, which hold parameters and views.
        names: the name under which each view stands there.
    """

    def __init__(
        self, chains: dict[fx.Node, fx.Node], namespace: dict[str, Any], names: dict[fx.Node, str]
    ) -> None:
        self.chains = chains
        self.namespace = namespace
        self.names = names
        # No parameter is there: the first call makes the views.
        self.namespace.update({f"{root.target}__at": -1 for root in chains.values()})

    def refresh(self) -> None:
        """Make all views anew and note where their parameters are now."""
        views: dict[fx.Node, torch.Tensor] = {}
        with compat.outside_modes(), torch.no_grad():
            for node, root in self.chains.items():
                source = node.args[0]
                parameter = self.namespace[str(root.target)]
                base = parameter.detach() if source is root else views[cast(fx.Node, source)]
                views[node] = getattr(base, str(node.target))(*node.args[1:])
                self.namespace[f"{root.target}__at"] = parameter.data_ptr()
        self.namespace.update({self.names[node]: view for node, view in views.items()})
