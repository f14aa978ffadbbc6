"""Counting graph breaks: what `torch.compile` makes of a model under turbo.

`case` supplies the model; the count goes into the table. The graphs that Dynamo captures
are run as they are, which is quick, and breaks are the same for every compiler behind it.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from keras_turbo.bench.case import turbo_on


def graph_breaks(model: Any, x: torch.Tensor) -> tuple[int | None, str]:
    """How often Dynamo has to leave the graph during one forward pass.

    Returns:
        The number of graph breaks and the reason of the first; None instead of the number,
        and why, if Dynamo fails.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    turbo_on()
    dynamo.reset()
    counters.clear()
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(model, backend="eager")(x)
    except Exception as error:  # noqa: BLE001, whatever Dynamo raises is the answer
        first = next(iter(str(error).strip().splitlines()), "")
        return None, f"{type(error).__name__}: {first}"
    finally:
        log.setLevel(level)
        dynamo.reset()
    breaks = counters["graph_break"]
    if not counters["stats"]["unique_graphs"]:
        return None, "no graph was captured"
    return sum(breaks.values()), next(iter(breaks), "").partition("\n")[0]
