"""`--plot`: the ratios to hand-written torch as bars, in a PNG file.

It is the only file that needs matplotlib, the extra `bench`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from keras_turbo.bench.result import Result

# Keeps a number readable where it lies across the line of the hand-written model.
_BACKGROUND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw stock Keras and turbo relative to the hand-written model, on a log scale."""
    # By name: type checkers run with and without the extra.
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(8, 1.5 + 0.5 * len(results)), layout="constrained"
    )
    axes = figure.subplots()
    places = range(len(results))
    bars = (
        ("stock Keras", [r.turbo_to_hand / r.turbo_to_stock for r in results], -0.2, "#b0b0b0"),
        ("turbo", [r.turbo_to_hand for r in results], 0.2, "#d62728"),
    )
    for label, values, shift, color in bars:
        drawn = axes.barh([p + shift for p in places], values, 0.38, label=label, color=color)
        texts = [f"{value:.2f}" for value in values]
        axes.bar_label(drawn, texts, padding=3, fontsize=8, bbox=_BACKGROUND)
    axes.set_yticks(list(places), [r.workload for r in results])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=1, label="hand-written torch")
    axes.set_xlabel("time relative to hand-written torch")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.15, y=0.01)
    axes.legend()
    figure.savefig(path, dpi=150)
