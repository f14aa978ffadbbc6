"""Passes on recorded operations: each rewrite, and what must keep it from happening.

A function is recorded and simplified, and run again on other numbers: every result and every
tensor that it writes to has to have the same bits.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx

from keras_turbo import emit
from keras_turbo.training.below_autograd import simplify
from keras_turbo.training.recording import Recorder


def recorded(function, *inputs):
    """The simplified graph of a function, its source, and the function that it became."""
    graph = fx.Graph()
    recorder = Recorder(graph)
    tensors = [t.clone() for t in inputs]
    for i, tensor in enumerate(tensors):
        recorder.made(tensor, graph.placeholder(f"x{i}"))
    with torch.no_grad():
        with recorder:
            results = function(*tensors)
        graph.output(tuple(recorder.node_of(t) for t in results))
        constants = dict(recorder.numbers)
        simplify(graph, constants)
        return emit.without_gradients(graph, constants)


def agree(function, *shapes):
    draw = [torch.randn(shape) for shape in shapes]
    source, run = recorded(function, *draw)
    for _ in range(3):
        one = [torch.randn(shape) for shape in shapes]
        two = [t.clone() for t in one]
        with torch.no_grad():
            want, got = function(*one), run(*two)
        for a, b in zip([*got, *two], [*want, *one], strict=True):
            assert a.shape == b.shape and torch.equal(a, b), source
    return source


def spread_after_division(v, x):
    return (v.expand(4, 3) / 7 * x,)


def sum_of_negated(x):
    return (torch.neg(x).sum(0), torch.neg(x * 3).mean())


def factor_of_the_large(v, x):
    return (v.expand(4, 3) * (x * 2.0),)


def zeros_of_one_kind(x, y):
    return (torch.where(x > 0, y, torch.zeros_like(x)),)


def power_and_axis(x):
    return (x.pow(1.0) * 2, x.sum([0], True).view([3]))


def constants_of_the_step(x):
    return ((torch.ones_like(x) / 5).neg() + x,)


@pytest.mark.parametrize(
    ("function", "shapes", "gone"),
    [
        (spread_after_division, [(3,), (4, 3)], None),
        (sum_of_negated, [(4, 3)], None),
        (factor_of_the_large, [(3,), (4, 3)], None),
        (zeros_of_one_kind, [(4, 3), (4, 3)], "zeros_like"),
        (power_and_axis, [(4, 3)], "torch_pow"),
        (constants_of_the_step, [(4, 3)], "ones_like"),
    ],
)
def test_rewrites(function, shapes, gone):
    source = agree(function, *shapes)
    assert gone is None or gone not in source


def test_what_is_computed_before_it_is_spread():
    source = agree(spread_after_division, (3,), (4, 3))
    assert source.index("div") < source.index("expand")
    source = agree(sum_of_negated, (4, 3))
    assert source.index("torch_sum") < source.index("neg")


def written_between(v, x):
    scaled = x * 2.0
    x.relu_()
    return (v.expand(4, 3) * scaled, x)


def negated_before_a_write(x):
    negated = torch.neg(x)
    x.mul_(3.0)
    return (negated.sum(0),)


def a_view_read_after_a_write(v, x):
    seen = x.t()
    scaled = seen * 2.0
    x.add_(1.0)
    return (v.expand(3, 4) * scaled, seen.sum())


def zeros_written_through_a_view(x):
    zeros = torch.zeros_like(x)
    zeros.select(0, 1).copy_(x.select(0, 0))
    return (zeros * 3 + x,)


def zeros_written_themselves(x):
    zeros = torch.zeros_like(x)
    zeros.add_(x)
    return (zeros / 2, zeros)


def an_operand_that_is_read_again(x, y):
    product = torch.mul(x, y)
    scaled = torch.mul(product, 3.0)
    return (scaled, product + scaled)


def a_view_that_outlives_its_owner(x, y):
    product = torch.mm(x, y)
    seen = product.t()
    return (torch.neg(product), seen + 1)


def an_input_is_never_written(x):
    return (torch.neg(x), torch.mul(x.t(), 2.0))


def both_operands(x):
    product = torch.mm(x, x)
    return (torch.mul(product, product),)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (written_between, [(3,), (4, 3)]),
        (negated_before_a_write, [(4, 3)]),
        (a_view_read_after_a_write, [(4,), (4, 3)]),
        (zeros_written_through_a_view, [(4, 3)]),
        (zeros_written_themselves, [(4, 3)]),
        (an_operand_that_is_read_again, [(4, 3), (4, 3)]),
        (a_view_that_outlives_its_owner, [(4, 3), (3, 4)]),
        (an_input_is_never_written, [(4, 3)]),
        (both_operands, [(3, 3)]),
    ],
)
def test_traps(function, shapes):
    agree(function, *shapes)


def test_sizes_that_depend_on_data_decline():
    from keras_turbo.fallback import Decline

    with pytest.raises(Decline, match="depends on the numbers"):
        recorded(lambda x: (x[x > 0],), torch.randn(5))
