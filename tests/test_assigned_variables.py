"""Variables that a call assigns and reads again: values, and where gradients go.

Stock Keras writes the variable at once, so that what is read afterwards is the variable
itself: no gradient flows into the computation of its new value.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from keras import layers

import keras_turbo
from keras_turbo import registry


class Running(layers.Layer):
    """Normalizes by a running maximum that the batch has just changed."""

    def __init__(self, trainable_peak=False):
        super().__init__()
        self.trainable_peak = trainable_peak

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.peak = self.add_weight(
            shape=(), initializer="ones", trainable=self.trainable_peak, name="peak"
        )

    def call(self, inputs):
        scaled = inputs * self.scale
        self.peak.assign(self.peak * 0.5 + (scaled * scaled).mean())
        return scaled / self.peak


def outcome(layer, x, stock):
    x = x.clone().requires_grad_()
    with keras_turbo.stock() if stock else contextlib.nullcontext():
        outputs = layer(x)
        outputs.square().sum().backward()
    grads = [parameter.grad for parameter in layer.parameters()]
    return [outputs.detach(), x.grad, *grads, *(v.value.detach() for v in layer.variables)]


@pytest.fixture
def rule(monkeypatch):
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))
    registry.trace_call(Running)


def pair(**how):
    made = []
    for _ in range(2):
        layer = Running(**how)
        layer.build((None, 5))
        made.append(layer)
    return made


def test_no_gradient_flows_into_what_was_assigned(rule):
    first, second = pair()
    for _ in range(2):
        x = torch.randn(4, 5)
        for a, b in zip(outcome(first, x, False), outcome(second, x, True), strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, atol=1e-6)
    assert first._keras_turbo.programs


@pytest.mark.allow_fallback("UNSUPPORTED")
def test_a_trained_variable_that_is_assigned_runs_stock(rule):
    first, second = pair(trainable_peak=True)
    x = torch.randn(4, 5)
    with contextlib.suppress(keras_turbo.FallbackError):
        first(x)
    assert "assigned and trained on" in str(first._keras_turbo.declined)
    assert second.peak.trainable
