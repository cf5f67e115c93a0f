"""How a newcomer is let in: it takes the state from whom the coordinator names, until it is a member of a mesh."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from training.exchange.base import Anchor, ExchangeError, ExchangeTimeout
from training.exchange.control import AnchorOrder, Status
from training.exchange.handover import AnchorDesk
from training.exchange.link import PeerLost
from training.exchange.ways import Address

T = TypeVar("T")


class Newcomer:
    """A member that waits to be let in.

    Args:
        changed: told of whatever changes in the group.
        status: returns the group as the coordinator sees it.
        ended: returns why the group is lost for this member, if it is.
        note: tells the coordinator something of this member.
        deadline: of :func:`time.monotonic`.
    """

    def __init__(
        self,
        desk: AnchorDesk,
        changed: threading.Condition,
        status: Callable[[], Status | None],
        ended: Callable[[], ExchangeError | None],
        note: Callable[..., None],
        deadline: float,
    ) -> None:
        self._desk, self._changed, self._status, self._ended, self._note = desk, changed, status, ended, note
        self._deadline = deadline
        self._number = 0

    def come_in(
        self, relay: Callable[[], Address | None], take: Callable[[Anchor], None], is_in: Callable[[], bool]
    ) -> Anchor:
        """Return the state with which this member was let in.

        Args:
            take: is given a state that has come, which may turn out not to be the last one.
            is_in: whether this member has a mesh.

        Raises:
            ExchangeTimeout: not by the deadline.
            ExchangeError: the group is lost.
        """
        while True:
            self._note(ready=True)
            order = self._wait(self._new_order)
            self._number = order.number
            try:
                anchor = self._desk.fetch(order, self._deadline, relay(), self._is_ordered)
            except (PeerLost, ExchangeTimeout):  # the donor hands each order over once: there has to be another
                self._note(ready=False)
                self._wait(lambda: not self._is_ordered())
                continue
            take(anchor)
            self._note(anchored=order.number)
            self._wait(lambda: is_in() or self._is_off())
            if is_in():
                return anchor

    def _wait(self, what: Callable[[], T | None]) -> T:
        found: list[Any] = []

        def there() -> bool:
            found[:] = [what()]
            return bool(self._ended() or found[0])

        with self._changed:
            self._changed.wait_for(there, self._deadline - time.monotonic())
            ended = self._ended()
        if ended is not None:
            raise ended
        if not found[0]:
            raise ExchangeTimeout("no anchor came in time")
        result: T = found[0]
        return result

    def _new_order(self) -> AnchorOrder | None:
        status = self._status()
        order = status.anchor if status is not None else None
        return order if order is not None and order.number != self._number else None

    def _is_ordered(self) -> bool:
        """Whether the order of the moment is still on."""
        status = self._status()
        order = status.anchor if status is not None else None
        return self._ended() is None and order is not None and order.number == self._number

    def _is_off(self) -> bool:
        """Whether this member waits still, and with another state than it has."""
        status = self._status()
        return status is not None and status.newcomer and not self._is_ordered()
