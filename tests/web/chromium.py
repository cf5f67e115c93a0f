"""A real headless Chromium for tests, driven through its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.waiting import PATIENCE, words_of

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium (Debian: apt-get install chromium)")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # the tests of CI run as root in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost, EXCLUDE *.test",
)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
            else:
                self.events.append((content["method"], content["params"]))

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        content = await asyncio.wait_for(answer, PATIENCE)
        assert "error" not in content, content
        return content["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return answer["result"].get("value")

    async def until(self, condition: Callable[[], Awaitable[Any]]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := await condition()):
            assert time.monotonic() < deadline, (words_of(condition), self.complaints)
            await asyncio.sleep(0.1)
        return found

    async def until_true(self, expression: str) -> Any:
        return await self.until(lambda: self.value(expression))

    async def press(self, key: str) -> None:
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)

    async def screenshot(self, path: Path, whole: bool = False) -> bytes:
        answer = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path.read_bytes()

    @property
    def requests(self) -> list[str]:
        """Addresses of everything that the page wanted to load."""
        return [about["request"]["url"] for method, about in self.events if method == "Network.requestWillBeSent"]

    @property
    def complaints(self) -> list[str]:
        """What the page wrote to its console as an error, and exceptions that nobody caught."""
        found = [about["exceptionDetails"] for method, about in self.events if method == "Runtime.exceptionThrown"]
        found += [
            about for method, about in self.events if method == "Runtime.consoleAPICalled" and about["type"] == "error"
        ]
        found += [
            about["entry"]
            for method, about in self.events
            if method == "Log.entryAdded" and about["entry"]["level"] == "error"
        ]
        return [json.dumps(one)[:1000] for one in found]


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """Start a browser with an empty profile, and end it."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="muster-chromium-", ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, *_OPTIONS, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                address = await _first_tab(session, port)
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            process.kill()
            process.wait()


async def _port(file: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            port, _ = file.read_text().splitlines()  # with the second line the first one is whole
            return port
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not start")


async def _first_tab(session: aiohttp.ClientSession, port: str) -> str:
    """Return the address of the first tab, which comes a while after the port."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        async with session.get(f"http://127.0.0.1:{port}/json") as answer:
            for tab in await answer.json():
                if tab["type"] == "page":
                    return str(tab["webSocketDebuggerUrl"])
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium shows no tab")
