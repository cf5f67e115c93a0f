"""What some members have for all, in gathers to which only they give something."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from training.exchange.base import Exchange, ExchangeError, Pending

MAX_BROADCAST = 1 << 40
"""Bytes that one member may hand over to all."""
_PIECE = 4 << 20
"""Bytes of a gather."""


def broadcast(exchange: Exchange, name: str, data: bytes, source: int, max_bytes: int = MAX_BROADCAST) -> bytes:
    """Return the ``data`` of member ``source``, byte for byte; the others' is not looked at.

    Args:
        most: bytes that it may have, equal on all members.

    Raises:
        ExchangeError: that member is gone, did not come in time, or hands over something else than it said.
    """
    received = broadcasts(exchange, name, data, (source,), max_bytes).get(source)
    if received is None:
        raise ExchangeError(f"member {source} did not hand over all of '{name}'")
    return received


def broadcasts(
    exchange: Exchange, name: str, data: bytes, sources: Collection[int], max_bytes: int
) -> dict[int, bytes]:
    """Return the ``data`` of the members ``sources``, byte for byte; the others' is not looked at.

    All are under way at the same time, each by its member's own line. Who is gone, did not come in time, or hands over
    something else than it said is left out.

    Args:
        most: bytes that each may have, equal on all members.
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
            if all(len(one) != start - _PIECE for one in received.values()):
                break  # nobody goes on
    while under_way:
        take()
    return {source: bytes(one) for source, one in received.items() if len(one) == sizes[source]}


def _size(announced: bytes, max_bytes: int) -> int:
    """Return how many bytes a member says it has; -1 for what can be none."""
    size = int(announced) if announced.isdigit() and len(announced) < 16 else -1
    return size if size <= max_bytes else -1
