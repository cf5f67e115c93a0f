"""Operations that go on beside the training: whoever waits for them does not hold it up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    counts = True


this_thread = _Thread()
"""Whether the time of operations that a thread starts counts as that of the training."""


@contextmanager
def untimed() -> Iterator[None]:
    """Start operations whose time stops nobody, and is not counted."""
    this_thread.counts = False
    try:
        yield
    finally:
        this_thread.counts = True
