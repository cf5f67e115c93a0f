"""The dashboard of a run in a real browser, by the command that a person types."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from app.demo.services import write_demo_run
from tests.waiting import PATIENCE
from tests.web.chromium import Page, chromium, needs_chromium

SCRIPT = Path(__file__).parents[2] / "cli_typer.py"


def screen_text(page: Page) -> str:
    """What the screen was told to draw so far, without the escape codes."""
    frames = (about["response"] for method, about in page.events if method == "Network.webSocketFrameReceived")
    content = b"".join(base64.b64decode(frame["payloadData"]) for frame in frames if frame["opcode"] == 2)
    return re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", content).decode(errors="replace")


@needs_chromium
@pytest.mark.slow
def test_the_dashboard_appears_takes_a_key_and_ends_with_the_server(tmp_path: Path) -> None:
    run = write_demo_run(tmp_path, 3)
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command = [sys.executable, str(SCRIPT), "web", str(run)]
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert server.stdout is not None and server.stderr is not None
    address = server.stdout.readline().strip()

    async def look() -> None:
        async with chromium() as page:
            await page.size(1200, 800)
            await page.open(address)
            await page.until(lambda: drawn(page, "Overview", "Completed", "demo-pc", "214/214"))
            before = len(screen_text(page))
            await page.press("2")
            await page.until(lambda: drawn(page, "samples/s", "compute/wait", after=before))
            assert len(await page.screenshot(tmp_path / "dashboard.png")) > 10_000
            assert await page.value("document.title") == run.name
            assert await page.value("location.search") == "", "the ticket does not stay in the address"
            assert await page.value("document.cookie") == "", "no script reads the session"
            await page.press("o")
            await page.until(lambda: tab(page, "/report"))
            assert page.complaints == []
            home = address.partition("?")[0]
            assert all(one.startswith((home, home.replace("http", "ws"), "data:")) for one in page.requests)
            await page.send("Network.clearBrowserCookies")  # now it is somebody else's browser
            await page.open(address)
            await page.until_true("document.body && document.body.innerText.includes('already used')")

    async def tab(page: Page, path: str) -> bool:
        return any(target["url"].endswith(path) for target in (await page.send("Target.getTargets"))["targetInfos"])

    async def drawn(page: Page, *words: str, after: int = 0) -> bool:
        return all(word in screen_text(page)[after:] for word in words)

    try:
        asyncio.run(look())
        screens = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        assert server.wait(60) == 0
        assert psutil.wait_procs(screens, PATIENCE)[1] == []
    finally:
        server.kill()
        server.communicate()
