"""Tests whether machines can connect to this computer, where a run's coordinator listens, while they are checked."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from types import TracebackType
from typing import Any

from distributed.machine.link import MachineLink, address_towards
from training.exchange.links.dialling import listen_on


class DialBack:
    """A local port that sends a secret word to every connection; a context manager.

    A proxy on the route that accepts connections and forwards nothing does not know the word.
    """

    def __init__(self) -> None:
        self._word = secrets.token_hex(8)
        self._socket = self._listen()

    @staticmethod
    def _listen() -> socket.socket:
        with contextlib.suppress(OSError):
            return listen_on("::", 0)
        return listen_on("0.0.0.0", 0)  # without IPv6

    def __enter__(self) -> DialBack:
        threading.Thread(target=self._answer, name="dial back", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # or accept() would go on waiting
        self._socket.close()

    def address_for(self, link: MachineLink) -> str:
        """Return ``host port`` for a machine to dial; empty where it does not dial this computer."""
        if link.machine.is_local or not link.host or link.machine.coordinator_at:
            return ""
        return f"{address_towards(link.host)} {self._socket.getsockname()[1]}"

    def came_through(self, report: dict[str, Any]) -> bool:
        """Whether a machine's report on itself contains the secret word."""
        return report.get("dialled") == self._word

    def _answer(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(self._word.encode())
