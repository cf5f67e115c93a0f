"""What some members have for all, in gathers to which only they give something."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from training.exchange.base import Exchange, ExchangeError, Pending

MAX_BROADCAST = 1 << 40
"""Bytes that one member may hand over to all."""
_PIECE = 4 << 20
"""Bytes of a gather."""


def broadcast(exchange: Exchange, name: str, data: bytes, source: int, most: int = MAX_BROADCAST) -> bytes:
    """Return the ``data`` of member ``source``, byte for byte; the others' is not looked at.

    Args:
        most: bytes that it may have, equal on all members.

    Raises:
        ExchangeError: that member is gone, did not come in time, or hands over something else than it said.
    """
    found = broadcasts(exchange, name, data, (source,), most).get(source)
    if found is None:
        raise ExchangeError(f"member {source} did not hand over all of '{name}'")
    return found


def broadcasts(exchange: Exchange, name: str, data: bytes, sources: Collection[int], most: int) -> dict[int, bytes]:
    """Return the ``data`` of the members ``sources``, byte for byte; the others' is not looked at.

    All are under way at the same time, each by its member's own line. Who is gone, did not come in time, or hands over
    something else than it said is left out.

    Args:
        most: bytes that each may have, equal on all members.
    """
    own = data if exchange.rank in sources else b""
    said = exchange.gather(f"{name}/size", str(len(own)).encode())
    sizes = {source: _size(said.get(source, b""), most) for source in sources}
    under_way: deque[Pending[dict[int, bytes]]] = deque()
    whole = {source: bytearray() for source in sources}

    def take() -> None:
        pieces = under_way.popleft().wait()
        for source in whole:
            whole[source] += pieces.get(source, b"")

    for start in range(0, max(sizes.values(), default=0), _PIECE):
        under_way.append(exchange.start_gather(f"{name}/{start}", own[start : start + _PIECE]))
        if len(under_way) > 2:
            take()
            if all(len(one) != start - _PIECE for one in whole.values()):
                break  # nobody goes on
    while under_way:
        take()
    return {source: bytes(one) for source, one in whole.items() if len(one) == sizes[source]}


def _size(said: bytes, most: int) -> int:
    """Return how many bytes a member says it has; -1 for what can be none."""
    size = int(said) if said.isdigit() and len(said) < 16 else -1
    return size if size <= most else -1
