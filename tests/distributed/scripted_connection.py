"""Machines for tests: one that says what it is told to say, this one in the place of a far one, one nobody may dial;
and servers that are none of SSH's."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from distributed.hosts.schema import Machine
from distributed.machine.link import HereConnection, MachineLink
from distributed.ssh.process import Completed


class Says(HereConnection):
    """This machine with one answer to everything."""

    def __init__(self, answer: bytes) -> None:
        super().__init__("box")
        self._answer = answer

    def run(self, *_: object, **__: object) -> Completed:
        return Completed(0, self._answer, b"")

    def put(self, *_: object, **__: object) -> None:
        pass


def far_machine(folder: Path, connection: HereConnection | None = None) -> MachineLink:
    """This machine in the place of a far one, whose folder of ours is ``folder / "far"``."""
    machine = Machine(name="far", python=sys.executable, project_path=str(folder / "far"))
    link = MachineLink(machine, lambda: connection or HereConnection("far"))
    link.put_agent()
    return link


def undialled(name: str, host: str = "", **fields: Any) -> MachineLink:
    """A machine that nobody may dial; ``fields`` are those of its hosts file."""

    def nobody() -> NoReturn:
        raise AssertionError("nobody is called")

    return MachineLink(Machine(name=name, **fields), nobody, host)


@contextlib.contextmanager
def serving(play: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port on loopback where every connection is treated the same way."""
    listener = socket.create_server(("127.0.0.1", 0))

    def one(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            play(peer)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port on loopback at which nobody listens, and that nobody else is given meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def garbage(peer: socket.socket) -> None:
    peer.sendall(b"\x1b[2J\x00\xff\n" * 3000)


def silent(peer: socket.socket) -> None:
    """Stay silent until the other side leaves."""
    while peer.recv(65536):
        pass
