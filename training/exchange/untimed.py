"""Operations in the background of the training: waiting for them does not hold it up, and is not counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    is_timed = True


this_thread = _Thread()
"""Whether the duration of operations that a thread starts counts as training time."""


@contextmanager
def untimed() -> Iterator[None]:
    """Start operations whose duration does not count as training time."""
    this_thread.is_timed = False
    try:
        yield
    finally:
        this_thread.is_timed = True
