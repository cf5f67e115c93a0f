"""textual-serve's server behind an :class:`Authenticator`, with a page that loads nothing from elsewhere.

Three things are checked: the ticket, because every program of every user of this machine can reach a loopback port; the
Host header, because a foreign page can make its own name point here (DNS rebinding); the Origin header, because a
foreign page can open a WebSocket to any address, and the browser adds the cookie.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp_jinja2
from aiohttp import web
from textual_serve.app_service import AppService
from textual_serve.server import Server, to_int

from app.html_report.page import script_hashes, write_report
from profiles.errors import BadInput, MusterError

REPORT = "/report"
MOST_SCREENS = 8
"""Largest number of screens at once; each is a process."""
PATIENCE = 5.0
"""Seconds after which a screen that was asked to stop is killed."""
_SHUTDOWN = 6.0
_HERE = Path(__file__).parent
_TIGHT = {
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every response."""
_NO_TICKET = "This address was already used, or is unknown here.\nPress Enter where 'runs web' runs for a new one.\n"
_FULL = f"{MOST_SCREENS} screens are open already: close one of them.\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WebServer(Server):
    """Serves screens to browsers that have a session.

    Args:
        run: folder of the run to show; ``None``: the guided set-up.
        listener: a listening socket's address and port.
        title: of the page.
        own_names: names of this machine.
    """

    def __init__(
        self, run: Path | None, listener: tuple[str, int], title: str, own_names: tuple[str, ...] = ()
    ) -> None:
        words = [sys.executable, str(_HERE / "session.py"), *([str(run.resolve())] if run else [])]
        address, port = listener
        # exec: so that ending it ends the screen and not a shell
        super().__init__(f"exec {shlex.join(words)}", address, port, title, templates_path=_HERE)
        self.authenticator = Authenticator()
        self.most_screens, self.patience = MOST_SCREENS, PATIENCE
        self._run = run
        self._names = AllowedHosts(address, port, own_names)
        self._cookie = f"muster-{port}"  # cookies know no ports: two servers must not overwrite each other's
        self._policy = _policy((_HERE / "page.html").read_text())
        self._screens = 0

    def new_address(self) -> str:
        """Return a URL that admits one browser, once."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{bracketed(host)}:{self.port}/?token={self.authenticator.new_ticket()}"

    async def application(self) -> web.Application:
        """Return the application with the guard as middleware."""
        app = await self._make_app()
        app.middlewares.append(self._guard())
        if self._run is not None:
            app.router.add_get(REPORT, self._report)
        return app

    def initialize_logging(self) -> None:
        """Do nothing: this program configures logging itself."""

    async def on_startup(self, app: web.Application) -> None:
        """Silence textual-serve: the command prints the address."""
        logging.getLogger("textual-serve").setLevel(logging.CRITICAL)

    # ---------------------------------------------------------------------------------------------------- admission

    def _guard(self) -> Any:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = self._refusal(request) or await handler(request)
            if not response.prepared:
                if request.path != REPORT:  # a report sets its own policy
                    response.headers["Content-Security-Policy"] = self._policy
                response.headers.update(_TIGHT)
            return response

        return guard

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """Return the response that refuses a request or redeems its ticket; ``None``: the request is admitted."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if request.method != "GET" or not self._names.is_ours(host):
            return web.Response(status=403, text="This server does not answer to that name.\n")
        if origin is not None and not self._names.is_same_origin(origin, host):
            return web.Response(status=403, text="Other pages may not use this server.\n")
        if self.authenticator.admits(request.cookies.get(self._cookie, "")):
            if request.path == "/ws" and origin is None:
                return web.Response(status=403, text="Only a page of this server may do that.\n")
            return web.HTTPSeeOther("/") if "token" in request.query else None
        session = self.authenticator.redeem(request.query.get("token", "")) if request.path == "/" else None
        if session is None:
            return web.Response(status=403, text=_NO_TICKET)
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(self._cookie, session, httponly=True, samesite="Strict", path="/")
        return answer

    # ---------------------------------------------------------------------------------------------------- the screens

    async def _report(self, request: web.Request) -> web.Response:
        """Return the report of the run; a screen opens it in the user's browser instead of on this machine."""
        assert self._run is not None
        try:
            path = await asyncio.to_thread(write_report, self._run)
            content = await asyncio.to_thread(path.read_text)
        except (MusterError, OSError) as error:
            raise web.HTTPInternalServerError(text=f"{error}\n") from error
        return web.Response(text=content, content_type="text/html")

    @aiohttp_jinja2.template("page.html")
    async def handle_index(self, request: web.Request) -> dict[str, Any]:
        """Return the values of the page's template."""
        size = min(64, max(6, to_int(request.query.get("fontsize", "16"), 16)))
        return {"title": self.title, "font_size": size, "socket": f"ws://{request.host}/ws"}

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run a screen for a browser until one of them ends."""
        if self._screens >= self.most_screens:
            raise web.HTTPServiceUnavailable(text=_FULL)
        self._screens += 1
        connection = web.WebSocketResponse(heartbeat=15, max_msg_size=1 << 20)

        async def close() -> None:
            await connection.close()

        screen = AppService(
            self.command,
            write_bytes=connection.send_bytes,
            write_str=connection.send_str,
            close=close,
            download_manager=self.download_manager,
        )
        try:
            await connection.prepare(request)
            asked = ((request.query.get("width", ""), 80), (request.query.get("height", ""), 24))
            await screen.start(*(min(1000, max(1, to_int(size, usual))) for size, usual in asked))
            with contextlib.suppress(ValueError, AssertionError, KeyError, IndexError, TypeError):  # not from our page
                await self._process_messages(connection, screen)
        finally:
            self._screens -= 1
            await _end(screen, self.patience)
        return connection


async def _end(screen: AppService, patience: float) -> None:
    """Ask a screen to stop, and kill it after ``patience`` seconds."""
    process = screen._process
    try:
        await asyncio.wait_for(screen.stop(), patience)
    except (asyncio.TimeoutError, ConnectionError):
        pass
    finally:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _policy(page: str) -> str:
    """Return a content security policy that allows only the scripts of this server and of its page."""
    hashes = script_hashes(re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL))
    return (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self' 'unsafe-inline'; font-src 'self' data:; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


# ------------------------------------------------------------------------------------------------------ serving


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


def serve(run: Path | None, listener: socket.socket, tell: Callable[[str], None]) -> None:
    """Serve until a signal; ``tell`` gets the URLs to open: one at the start, one more with every Enter."""
    title = run.name if run else "Muster"
    endpoint: tuple[str, int] = listener.getsockname()[:2]
    name = socket.gethostname().lower()
    short = name.partition(".")[0]
    asyncio.run(_serve(WebServer(run, endpoint, title, (name, short, f"{short}.local")), listener, tell))


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
    with _on_enter(loop, lambda: tell(server.new_address())):
        await ended.wait()
    await runner.cleanup()


@contextlib.contextmanager
def _on_enter(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> Iterator[None]:
    """Call ``act`` on every Enter at this terminal, if stdin is one."""
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


_MOST_SESSIONS = 64


class Authenticator:
    """Issues tickets, redeems each for one session, and holds the sessions."""

    def __init__(self) -> None:
        self._tickets: list[str] = []
        self._sessions: list[str] = []

    def new_ticket(self) -> str:
        """Return a ticket that admits one browser, once; it invalidates an earlier unused one."""
        self._tickets = [secrets.token_urlsafe(32)]
        return self._tickets[0]

    def redeem(self, ticket: str) -> str | None:
        """Return a new session for an unused ticket, else ``None``."""
        if not _matches_any(ticket, self._tickets):
            return None
        self._tickets = []
        session = secrets.token_urlsafe(32)
        self._sessions = [*self._sessions, session][-_MOST_SESSIONS:]
        return session

    def admits(self, session: str) -> bool:
        """Whether a session is valid."""
        return _matches_any(session, self._sessions)


def _matches_any(candidate: str, valid: list[str]) -> bool:
    """Whether ``candidate`` is among ``valid``, compared in constant time."""
    matches = [hmac.compare_digest(candidate.encode("utf-8", "surrogatepass"), secret.encode()) for secret in valid]
    return any(matches)


class AllowedHosts:
    """The host names by which this server may be addressed.

    Args:
        address: address it listens on; ``0.0.0.0`` or ``::`` stand for all addresses of this machine.
        port: port it listens on.
        own_names: names of this machine.
    """

    def __init__(self, address: str, port: int, own_names: tuple[str, ...] = ()) -> None:
        self._port = port
        self._any_address = ipaddress.ip_address(address).is_unspecified
        self._names = {"localhost", "127.0.0.1", "[::1]", bracketed(address)}
        if not ipaddress.ip_address(address).is_loopback:
            self._names |= {name.lower() for name in own_names if name}

    def is_ours(self, host: str) -> bool:
        """Return whether a Host header names this server.

        If it listens on all addresses, any literal address does: only names can be made to point here from outside.
        """
        name, colon, port = host.rpartition(":")
        if not colon or name.endswith(":") or port != str(self._port):
            return False
        return name.lower() in self._names or (self._any_address and _is_address(name))

    def is_same_origin(self, origin: str, host: str) -> bool:
        """Whether an Origin header is that of a page of this server under ``host``."""
        return origin.lower() == f"http://{host.lower()}"


def bracketed(address: str) -> str:
    """Return an address as written in a URL."""
    return f"[{address}]" if ":" in address else address


def _is_address(name: str) -> bool:
    """Whether ``name`` is a literal address as written in a URL."""
    inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return (ipaddress.ip_address(inner).version == 6) == (inner != name)
    except ValueError:
        return False
