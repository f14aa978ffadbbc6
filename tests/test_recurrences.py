"""The recurrences that programs call, against plain loops that autograd differentiates.

In float64, so that a formula that is nearly right is found.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from keras_turbo.rules import rnn_calls, rnn_kernels

pytestmark = [
    # Forward mode loads decompositions that torch itself deprecates.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning"),
]
GATES = {"lstm": 4, "gru": 3, "simple": 1}
WANTED = {"all": slice(None), "outputs": slice(0, 1), "last": slice(1, 2)}


def arguments(kind, dtype, batch, steps, masked, bias, start, backwards):
    def weight(*shape):
        return torch.randn(shape, dtype=dtype).requires_grad_()

    gates = GATES[kind] * 6
    biases = [weight(gates) if bias else None for _ in range(2 if kind == "gru" else 1)]
    states = [weight(batch, 6) if start else None for _ in range(2 if kind == "lstm" else 1)]
    mask = torch.rand(batch, steps) < 0.6 if masked else None
    x = weight(batch, steps, 5)
    return x, weight(5, gates), weight(6, gates), *biases, *states, mask, backwards


def plain(kind, args):
    outputs, *rest = getattr(rnn_kernels, f"plain_{kind}")(
        rnn_kernels.time_major(args[0]), *args[1:]
    )
    return outputs.transpose(0, 1), *rest


def gradients(results, weights, **how):
    generator = torch.Generator().manual_seed(5)
    total = sum(
        (r * torch.randn(r.shape, generator=generator, dtype=r.dtype)).sum() for r in results
    )
    return torch.autograd.grad(total, weights, allow_unused=True, retain_graph=True, **how)


def assert_close(got, want, limit):
    for a, b in zip(got, want, strict=True):
        if b is None:
            assert a is None or not a.any()
        elif b.numel():
            assert float((a - b).abs().max() / max(1.0, float(b.abs().max()))) <= limit


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", GATES)
def test_values_and_gradients(kind, dtype):
    limit = 1e-12 if dtype == torch.float64 else 1e-5
    sizes = itertools.product((4, 1, 0), (7, 1), *[(False, True)] * 4)
    for batch, steps, *flags in sizes:
        args = arguments(kind, dtype, batch, steps, *flags)
        weights = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        function = getattr(rnn_calls, kind)
        got, want = function(*args), plain(kind, args)
        with torch.no_grad():
            assert_close(function(*args), want, limit)
        assert_close(got, want, limit)
        for part in WANTED.values():
            assert_close(gradients(got[part], weights), gradients(want[part], weights), limit)
        first = [gradients(r, weights, create_graph=True) for r in (got, want)]
        nonlinear = [[g.sin() for g in grads if g is not None] for grads in first]
        assert_close(*(gradients(grads, weights) for grads in nonlinear), 10 * limit)


@pytest.mark.parametrize("kind", GATES)
def test_one_input_that_depends_on_another(kind):
    """The gradients of gradients count no way through the outer graph twice."""
    args = list(arguments(kind, torch.float64, 3, 5, False, True, True, False))
    weights = [args[0], args[1]]
    args[4 if kind != "gru" else 5] = torch.tanh(args[0][:, 0].sum(-1, keepdim=True)).expand(3, 6)
    for how in ({}, {"create_graph": True}):
        got = gradients(getattr(rnn_calls, kind)(*args), weights, **how)
        assert_close(got, gradients(plain(kind, args), weights, **how), 1e-12)


@pytest.mark.parametrize("kind", GATES)
def test_forward_mode_derivatives(kind):
    args = list(arguments(kind, torch.float32, 3, 5, False, True, False, False))
    tangent = torch.randn_like(args[0])
    with torch.autograd.forward_ad.dual_level():
        args[0] = torch.autograd.forward_ad.make_dual(args[0].detach(), tangent)
        both = [
            torch.autograd.forward_ad.unpack_dual(f(*a)[0]).tangent
            for f, a in ((getattr(rnn_calls, kind), args), (lambda *a: plain(kind, a), args))
        ]
    assert_close(both[:1], both[1:], 1e-5)
