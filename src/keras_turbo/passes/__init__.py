"""Passes: pure rewrites from graph to graph that keep every result equal.

Each pass is one function in a file of its own. They run in the order below, on every
program, after its effects have been appended.
"""

from __future__ import annotations

from torch import fx

from keras_turbo.passes.contiguous import remove_contiguous
from keras_turbo.passes.dead_code import remove_dead_code
from keras_turbo.passes.flips import remove_double_flips
from keras_turbo.passes.in_place import reuse_owned_memory, reuse_without_gradients
from keras_turbo.passes.no_ops import remove_no_ops
from keras_turbo.passes.permutes import merge_permutes
from keras_turbo.passes.rows import use_rows

PASSES = (
    remove_no_ops,
    remove_double_flips,
    remove_contiguous,
    merge_permutes,
    remove_dead_code,
    reuse_owned_memory,
)

WITHOUT_GRADIENTS = (use_rows, remove_dead_code, reuse_without_gradients)
"""What a program for calls without gradients gets on top."""


def without_gradients(graph: fx.Graph) -> fx.Graph:
    """A copy of a finished graph for calls that keep nothing for a backward pass."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for rewrite in WITHOUT_GRADIENTS:
        rewrite(copy)
    return copy


def run_passes(graph: fx.Graph) -> None:
    """Run all passes on a graph."""
    for rewrite in PASSES:
        rewrite(graph)
