"""Addresses at which a remote worker reaches coordinator, relay and store, and the messages that update them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class EngineRoute(Protocol):
    """How a machine dials coordinator, relay and store; may change during the run."""

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
        self._engine: dict[str, str] | None = None
        self._sent: dict[str, str] | None = None

    def begin(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Set the engine's addresses by what listens there; return the message with the addresses for the worker.

        Raises:
            MusterError: the machine cannot reach them.
        """
        self._engine = {name: address for name, address in addresses.items() if name != "store"}  # of the start alone
        self._sent = self._addresses_for(self._engine)
        return self._addresses_for(addresses) | self._sent

    def update(self) -> dict[str, str]:
        """Return the message with changed addresses; empty where nothing has changed.

        Raises:
            MusterError: the machine cannot reach them any more.
        """
        if self._engine is None or (addresses := self._addresses_for(self._engine)) == self._sent:
            return {}
        self._sent = addresses
        return {"command": "redial", **addresses}

    def replace_address(self, address: str) -> dict[str, str]:
        """Return the message that replaces an unreachable address, by a changed one, else by another route; empty where
        there is none.

        Raises:
            MusterError: the machine cannot reach them any more.
        """
        if self._sent is None or self._sent["address"] != address:  # reported before it received another one
            return {}
        message = self.update()
        return self.update() if not message and self._route.switch_route() else message

    def _addresses_for(self, engine: Mapping[str, str]) -> dict[str, str]:
        return {name: address and self._route(address) for name, address in engine.items()}
