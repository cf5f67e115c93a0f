"""Disable transformers' detection of packed sequences (several texts in one row of a batch).

It runs in every forward without an attention mask and reads a number on the host, which waits for everything queued on
the device (in a speech model the whole encoder). No task of Muster packs sequences.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_is_unpacked: ContextVar[bool] = ContextVar("is_unpacked", default=False)
_SEARCH = "find_packed_sequence_indices"


@contextmanager
def unpacked() -> Iterator[None]:
    """Make transformers treat every batch row as a single text within this context, in this thread."""
    _patch_transformers()
    token = _is_unpacked.set(True)
    try:
        yield
    finally:
        _is_unpacked.reset(token)


@functools.cache
def _patch_transformers() -> None:
    try:
        masks = importlib.import_module("transformers.masking_utils")
    except ImportError:  # a version that builds its masks elsewhere
        return
    search = getattr(masks, _SEARCH, None)
    if search is None:
        return

    @functools.wraps(search)
    def search_if_packed(*args: Any, **kwargs: Any) -> Any:
        return None if _is_unpacked.get() else search(*args, **kwargs)

    setattr(masks, _SEARCH, search_if_packed)
