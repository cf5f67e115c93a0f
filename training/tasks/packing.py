"""What transformers asks of a batch that nobody needs to ask: whether several texts share a row of it.

It looks for that in every forward without an attention mask, and the answer is a number that the host must have: it
waits for all that is queued on the device, of a speech model the whole encoder, and then queues the rest. No task of
Muster packs texts that way.
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
    """Let transformers take every row of the batches in here for one text, in this thread."""
    _teach_transformers()
    token = _is_unpacked.set(True)
    try:
        yield
    finally:
        _is_unpacked.reset(token)


@functools.cache
def _teach_transformers() -> None:
    try:
        masks = importlib.import_module("transformers.masking_utils")
    except ImportError:  # one that makes its masks elsewhere
        return
    search = getattr(masks, _SEARCH, None)
    if search is None:
        return

    @functools.wraps(search)
    def search_if_packed(*args: Any, **kwargs: Any) -> Any:
        return None if _is_unpacked.get() else search(*args, **kwargs)

    setattr(masks, _SEARCH, search_if_packed)
