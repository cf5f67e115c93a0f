"""Addresses at which a remote worker reaches coordinator and relay, and the messages that update them."""

from __future__ import annotations

from typing import Protocol


class EngineRoute(Protocol):
    """How a machine dials coordinator and relay; may change during the run."""

    def __call__(self, address: str) -> str:
        """Turn an address of the engine into the one to dial on the machine now.

        Raises:
            MusterError: no route works.
        """
        ...

    def switch_route(self) -> bool:
        """Switch from a route that does not work to another one; return whether there is one."""
        ...


class SameAddress:
    """Route of a machine that dials the engine's own addresses."""

    def __call__(self, address: str) -> str:
        return address

    def switch_route(self) -> bool:
        return False


class RendezvousUpdates:
    """The addresses last sent to one worker, and the messages that change them.

    Args:
        route: from the worker's machine to the engine.
    """

    def __init__(self, route: EngineRoute) -> None:
        self._route = route
        self._engine: tuple[str, str] | None = None
        self._sent: tuple[str, str] | None = None

    def begin(self, address: str, relay: str) -> dict[str, str]:
        """Set the engine's addresses of coordinator and relay; return the message with the addresses for the worker.

        Raises:
            MusterError: the machine cannot reach them.
        """
        self._engine = address, relay
        return self._message(self._addresses_for(self._engine))

    def update(self) -> dict[str, str]:
        """Return the message with changed addresses; empty where nothing has changed.

        Raises:
            MusterError: the machine cannot reach them any more.
        """
        if self._engine is None or (addresses := self._addresses_for(self._engine)) == self._sent:
            return {}
        return {"command": "redial", **self._message(addresses)}

    def replace_address(self, address: str) -> dict[str, str]:
        """Return the message that replaces an unreachable address, by a changed one, else by another route; empty where
        there is none.

        Raises:
            MusterError: the machine cannot reach them any more.
        """
        if self._sent is None or self._sent[0] != address:  # reported before it received another one
            return {}
        message = self.update()
        return self.update() if not message and self._route.switch_route() else message

    def _addresses_for(self, engine: tuple[str, str]) -> tuple[str, str]:
        address, relay = (self._route(part) if part else "" for part in engine)
        return address, relay

    def _message(self, addresses: tuple[str, str]) -> dict[str, str]:
        self._sent = addresses
        return dict(zip(("address", "relay"), addresses, strict=True))
