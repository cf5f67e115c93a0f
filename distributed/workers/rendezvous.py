"""Where a worker on another machine reaches coordinator and relay, and when it has to be told anew."""

from __future__ import annotations

from typing import Protocol


class Reach(Protocol):
    """How a machine dials coordinator and relay; it may change while the run is on."""

    def __call__(self, address: str) -> str:
        """Turn the engine's address into the one to use there at the moment.

        Raises:
            MusterError: none works.
        """
        ...

    def avoid(self) -> bool:
        """Take another way than before, which leads nowhere; return whether there is one."""
        ...


class SameEverywhere:
    """The engine's own addresses."""

    def __call__(self, address: str) -> str:
        return address

    def avoid(self) -> bool:
        return False


class RendezvousUpdates:
    """What one worker was told.

    Args:
        reach: of its machine.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._engine: tuple[str, str] | None = None
        self._sent: tuple[str, str] | None = None

    def begin(self, address: str, relay: str) -> dict[str, str]:
        """Take the engine's addresses of coordinator and relay; return the message that tells the worker its own.

        Raises:
            MusterError: it cannot reach them.
        """
        self._engine = address, relay
        return self._message(self._reached(self._engine))

    def news(self) -> dict[str, str]:
        """Return the message that tells the worker what has changed; an empty one where nothing has.

        Raises:
            MusterError: it cannot reach them any more.
        """
        if self._engine is None or (reached := self._reached(self._engine)) == self._sent:
            return {}
        return {"command": "redial", **self._message(reached)}

    def instead_of(self, address: str) -> dict[str, str]:
        """Return the message that sends the worker elsewhere than to an address that leads nowhere: to a new one, else
        another way; an empty one where there is none.

        Raises:
            MusterError: it cannot reach them any more.
        """
        if self._sent is None or self._sent[0] != address:  # said before it heard of another one
            return {}
        news = self.news()
        return self.news() if not news and self._reach.avoid() else news

    def _reached(self, engine: tuple[str, str]) -> tuple[str, str]:
        address, relay = (self._reach(one) if one else "" for one in engine)
        return address, relay

    def _message(self, addresses: tuple[str, str]) -> dict[str, str]:
        self._sent = addresses
        return dict(zip(("address", "relay"), addresses, strict=True))
