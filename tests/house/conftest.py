"""What the tests of the house share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_among_syntax_trees() -> Iterator[None]:
    """To look for it in the million nodes of all our files takes longer than to read them."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
