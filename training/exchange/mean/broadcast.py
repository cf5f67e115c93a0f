"""Broadcasts of data that one or some members have, built on gathers in which only those contribute."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from training.exchange.base import Exchange, ExchangeError, Pending

MAX_BROADCAST = 1 << 40
"""Largest number of bytes one member may broadcast."""
_PIECE = 4 << 20
"""Bytes of one gather."""


def broadcast(exchange: Exchange, name: str, data: bytes, source: int, max_bytes: int = MAX_BROADCAST) -> bytes:
    """Return the ``data`` of member ``source``, byte for byte; the data of other members is ignored.

    Args:
        max_bytes: limit of its length, equal on all members.

    Raises:
        ExchangeError: that member is gone or late, or sends something other than it announced.
    """
    received = broadcasts(exchange, name, data, (source,), max_bytes).get(source)
    if received is None:
        raise ExchangeError(f"member {source} did not hand over all of '{name}'")
    return received


def broadcasts(
    exchange: Exchange, name: str, data: bytes, sources: Collection[int], max_bytes: int
) -> dict[int, bytes]:
    """Return the ``data`` of the members ``sources``, byte for byte, by rank; the data of other members is ignored.

    All transfers run at the same time, each over its sender's links. Members that are gone or late, or that send
    something other than they announced, are left out.

    Args:
        max_bytes: limit of each one's length, equal on all members.
    """
    own_data = data if exchange.rank in sources else b""
    announced = exchange.gather(f"{name}/size", str(len(own_data)).encode())
    sizes = {source: _size(announced.get(source, b""), max_bytes) for source in sources}
    under_way: deque[Pending[dict[int, bytes]]] = deque()
    received = {source: bytearray() for source in sources}

    def take() -> None:
        pieces = under_way.popleft().wait()
        for source in received:
            received[source] += pieces.get(source, b"")

    for start in range(0, max(sizes.values(), default=0), _PIECE):
        under_way.append(exchange.start_gather(f"{name}/{start}", own_data[start : start + _PIECE]))
        if len(under_way) > 2:
            take()
            if all(len(data) != start - _PIECE for data in received.values()):
                break  # no source has more
    while under_way:
        take()
    return {source: bytes(one) for source, one in received.items() if len(one) == sizes[source]}


def _size(announced: bytes, max_bytes: int) -> int:
    """Return the number of bytes a member announced; -1 if it is invalid."""
    size = int(announced) if announced.isdigit() and len(announced) < 16 else -1
    return size if size <= max_bytes else -1
