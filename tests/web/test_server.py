"""The server's doors, asked by a client that can lie about everything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web

from app.web.server import WebServer, listen
from cli_typer import main
from profiles.errors import BadInput
from tests.app.app_events import step
from tests.report.report_runs import write_run
from tests.waiting import until

Test = Callable[["Door"], Awaitable[None]]


class Door:
    """A server, and a client without a memory."""

    def __init__(self, server: WebServer, client: aiohttp.ClientSession) -> None:
        self.server = server
        self.client = client
        self.home = f"http://127.0.0.1:{server.port}"

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        async with self.client.request(method, self.home + path, headers=headers, allow_redirects=False) as answer:
            return answer.status, dict(answer.headers), await answer.text()

    async def enter(self) -> str:
        """Redeem a ticket and return the cookie."""
        address = self.server.new_address()
        status, headers, _ = await self.get(address.removeprefix(self.home))
        assert status == 303 and headers["Location"] == "/"
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        return headers["Set-Cookie"].partition(";")[0]


def visit(test: Test, run: Path | None = None) -> None:
    async def there() -> None:
        async with opened(run) as door:
            await test(door)

    asyncio.run(there())


@contextlib.asynccontextmanager
async def opened(run: Path | None) -> AsyncIterator[Door]:
    listener = listen("127.0.0.1", 0)
    server = WebServer(run, listener.getsockname()[:2], "a <run>")
    server.command = "exec sleep 60"
    runner = web.AppRunner(await server.application(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client:
        yield Door(server, client)
    await runner.cleanup()


def test_an_address_lets_one_browser_in_once() -> None:
    async def test(door: Door) -> None:
        path = door.server.new_address().removeprefix(door.home)
        status, headers, _ = await door.get(path)
        cookie = headers["Set-Cookie"].partition(";")[0]
        again = await door.get(path)
        assert (status, again[0]) == (303, 403)
        assert "already used" in again[2] and "Set-Cookie" not in again[1]
        status, headers, page = await door.get("/", Cookie=cookie)
        assert status == 200 and "a &lt;run&gt;" in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "token" not in page and headers["Referrer-Policy"] == "no-referrer"

    visit(test)


def test_without_a_session_there_is_nothing_to_have() -> None:
    async def test(door: Door) -> None:
        paths = ("/", "/ws", "/static/js/textual.js", "/download/x", "/?token=", "/?token=%00", "/nothing", "/static/")
        cookies = ("", f"muster-{door.server.port}=", f"muster-{door.server.port}=x", "muster-1=x")
        for path in paths:
            for cookie in cookies:
                assert (await door.get(path, Cookie=cookie))[0] == 403
        assert (await door.get(door.server.new_address().removeprefix(door.home), method="HEAD"))[0] == 403

    visit(test)


def test_the_address_survives_who_only_looks_at_its_head() -> None:
    async def test(door: Door) -> None:
        path = door.server.new_address().removeprefix(door.home)
        assert (await door.get(path, method="HEAD"))[0] == 403
        assert (await door.get(path))[0] == 303

    visit(test)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.test"},
        {"Host": "evil.test:{port}"},
        {"Origin": "http://evil.test"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Host": "evil.test:{port}", "Origin": "http://evil.test:{port}"},
    ],
)
def test_a_page_from_outside_gets_nothing_even_with_the_cookie(headers: dict[str, str]) -> None:
    async def test(door: Door) -> None:
        cookie = await door.enter()
        lies = {name: value.format(port=door.server.port) for name, value in headers.items()}
        for path in ("/", "/ws", "/static/js/textual.js"):
            assert (await door.get(path, Cookie=cookie, **lies))[0] == 403
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await door.client.ws_connect(f"{door.home}/ws", headers={"Cookie": cookie, **lies})

    visit(test)


def test_a_socket_needs_a_page_and_its_screen_ends_with_it() -> None:
    async def test(door: Door) -> None:
        door.server.patience = 0.2
        cookie = await door.enter()
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await door.client.ws_connect(f"{door.home}/ws", headers={"Cookie": cookie})
        about: dict[str, Any] = {"headers": {"Cookie": cookie, "Origin": door.home}}
        before = set(psutil.Process().children())
        async with door.client.ws_connect(f"{door.home}/ws?width=x&height=-5", **about) as socket_:
            (screen,) = await asyncio.to_thread(until, lambda: set(psutil.Process().children()) - before)
            await asyncio.to_thread(until, lambda: screen.name() == "sleep")
            await socket_.send_str('["stdin"]')  # nonsense ends the screen, not the server
        await asyncio.to_thread(until, lambda: not screen.is_running())
        assert (await door.get("/", Cookie=cookie))[0] == 200

    visit(test)


def test_the_report_of_the_run_is_served_with_its_own_policy(tmp_path: Path) -> None:
    async def test(door: Door) -> None:
        assert (await door.get("/report"))[0] == 403
        status, headers, page = await door.get("/report", Cookie=await door.enter())
        assert status == 200 and "Content-Security-Policy" not in headers
        assert '<meta http-equiv="Content-Security-Policy"' in page and "Where the time went" in page

    visit(test, write_run(tmp_path, [step(1)]))


def test_screens_are_counted() -> None:
    async def test(door: Door) -> None:
        door.server.most_screens = 0
        cookie = await door.enter()
        assert (await door.get("/ws", Cookie=cookie, Origin=door.home))[0] == 503

    visit(test)


def test_what_cannot_be_listened_on_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="not an address"):
        listen("my-machine", 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["web", "--port", str(taken.getsockname()[1])]) == 2
    assert "give another --port" in capsys.readouterr().err
    assert main(["web", "no-such-run"]) == 2


def test_who_listens_on_the_network_is_told_what_it_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(run: Path | None, listener: socket.socket, tell: object) -> None:
        listener.close()

    monkeypatch.setattr("app.web.server.serve", end)
    assert main(["web"]) == 0
    assert "warning" not in capsys.readouterr().err
    assert main(["web", "--listen", "0.0.0.0"]) == 0
    said = capsys.readouterr().err
    assert "nothing is encrypted" in said and "ssh -L" in said


@pytest.mark.parametrize(("display", "opened"), [(":0", ["http://127.0.0.1:1/"]), ("", [])])
def test_the_address_is_opened_where_there_is_a_browser(
    display: str, opened: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from app.cli.runs.listing import _show_address

    for name in ("WAYLAND_DISPLAY", "SSH_CONNECTION", "TEXTUAL_DRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.setattr("sys.platform", "linux")
    pages: list[str] = []
    _show_address("http://127.0.0.1:1/", lambda address: pages.append(address) is None)
    assert pages == opened and "http://127.0.0.1:1/" in capsys.readouterr().out
