"""Which threads have asked for stock Keras: read by every guard, set by `stock()`.

It imports nothing, so that `with keras_turbo.stock():` works before Keras is imported and on
every backend.
"""

from __future__ import annotations

import threading


class ThreadState(threading.local):
    """Whether this thread asked for stock Keras."""

    stock = False


thread_state = ThreadState()


class StockScope:
    """Run stock Keras in this thread, inside a `with` block."""

    def __enter__(self) -> None:
        self.outer = thread_state.stock
        thread_state.stock = True

    def __exit__(self, *exc: object) -> None:
        thread_state.stock = self.outer
