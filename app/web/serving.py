"""Running the web server until somebody ends it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from aiohttp import web

from app.web.server import WebServer
from profiles.errors import BadInput

_SHUTDOWN = 6.0


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        BadInput: not an address of this machine, or the port is taken.
    """
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError as error:
        hint = "for example 127.0.0.1, or 192.168.1.20 for others on that network"
        raise BadInput(f"--listen {address}: not an address", hint) from error
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise BadInput(f"cannot listen on {address}, port {port}: {error.strerror}", "give another --port") from error
    return listener


def own_names() -> tuple[str, ...]:
    """Return the names of this machine."""
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    return (name, short, f"{short}.local")


def serve(run: Path | None, listener: socket.socket, tell: Callable[[str], None]) -> None:
    """Serve until a signal; ``tell`` gets the addresses to open, the first one at once, one more with every Enter."""
    title = run.name if run else "Muster"
    place: tuple[str, int] = listener.getsockname()[:2]
    asyncio.run(_serve(WebServer(run, place, title, own_names()), listener, tell))


async def _serve(server: WebServer, listener: socket.socket, tell: Callable[[str], None]) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    runner = web.AppRunner(
        await server.application(), access_log=None, handle_signals=False, shutdown_timeout=_SHUTDOWN
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    tell(server.new_address())
    with _asked_for_more(loop, lambda: tell(server.new_address())):
        await ended.wait()
    await runner.cleanup()


@contextlib.contextmanager
def _asked_for_more(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> Iterator[None]:
    """Act on every Enter of the person at this terminal, if there is one."""
    if not sys.stdin.isatty():
        yield
        return

    def read() -> None:
        if sys.stdin.readline():
            act()
        else:
            loop.remove_reader(sys.stdin)

    loop.add_reader(sys.stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(sys.stdin)
