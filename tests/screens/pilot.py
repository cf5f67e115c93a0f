"""Screens under test: Pilot without an event loop of pytest's, and pictures of a screen as plain text.

::

    def test_it(screen_text) -> None:
        async def drive(pilot: Pilot[None]) -> None:
            await pilot.press("down")
            await comes_to_match(pilot, "machines-80x24")

        run(MyApp(clock=fixed_clock), drive, size=(80, 24))

``MUSTER_SNAPSHOTS=write`` writes the pictures instead of comparing; look at the difference before it is committed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input

from app.shell.row_table import RowTable
from tests.waiting import PATIENCE, words_of

SNAPSHOTS = Path(__file__).with_name("snapshots")
SIZES = ((80, 24), (120, 32), (160, 45))
_MOST_TURNS = 10_000
"""Of the event loop, for an application that never rests."""
FIXED = 1_790_000_000.0
"""The one moment of all pictures: 2026-09-21 13:33:20 UTC."""


def fixed_clock() -> float:
    """Return the one moment of all pictures."""
    return FIXED


def run(app: App[Any], drive: Callable[[Pilot[Any]], Awaitable[None]], size: tuple[int, int] = (80, 24)) -> None:
    """Start an application without a terminal, let ``drive`` use it, and end it."""

    async def whole() -> None:
        app.animation_level = "none"
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await drive(pilot)

    async def idle(*_: float) -> None:
        await settle(app)

    with patch("textual.app.wait_for_idle", idle), patch("textual.pilot.wait_for_idle", idle):
        asyncio.run(whole())


async def settle(app: App[Any]) -> None:
    """Let an application do all that it can do now: nothing is ready in its loop then, and nothing is to be drawn.

    Textual's pilot waits instead until this process has used no processor for 20 ms: that takes longer, and where other
    programs run it may as well have been given none.
    """
    # what the loop has still to call: asyncio has no public name for it
    ready: Collection[object] = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(_MOST_TURNS):
        await asyncio.sleep(0)
        if ready:
            continue
        if not app.screen_stack:  # it has ended
            return
        if app._resize_event is not None:  # it would be heard a moment later, with those that come meanwhile
            app._check_resize()
        app.screen._on_timer_update()
        if not ready:
            return


async def until(pilot: Pilot[Any], holds: Callable[[], Any], patience: float = PATIENCE) -> None:
    """Let the application go on until something holds."""
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, "\n".join((f"waited for: {words_of(holds)}", *lines(pilot.app)))
        await pilot.pause(0.01)
    await pilot.pause()


async def until_text(pilot: Pilot[Any], text: str, patience: float = PATIENCE) -> None:
    """Let the application go on until the screen shows a text."""
    await until(pilot, lambda: text in "\n".join(lines(pilot.app)), patience)


async def choose(pilot: Pilot[Any], key: str) -> None:
    """Put the cursor on a row of the table, as soon as the table has it."""

    def chosen() -> bool:
        table = next(iter(pilot.app.screen.query("#rows").results(RowTable)), None)
        if table is None:
            return False
        table.select(key)
        return table.row is not None and table.row.key == key

    await until(pilot, chosen)


def lines(app: App[Any]) -> list[str]:
    """Return what the screen shows, every line without the blanks at its end."""
    for field in app.screen.query(Input):
        field.cursor_blink = False
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def text(app: App[Any]) -> str:
    """Return what the screen shows."""
    return "\n".join(lines(app)) + "\n"


async def resize(pilot: Pilot[Any], width: int, height: int) -> None:
    """Give the terminal another size."""
    await pilot.resize_terminal(width, height)
    await pilot.pause()


async def comes_to_match(pilot: Pilot[Any], name: str) -> None:
    """Let the application go on until it shows the picture of that name: a screen may draw once more after a resize."""
    path = SNAPSHOTS / f"{name}.txt"
    if path.exists() and os.environ.get("MUSTER_SNAPSHOTS") != "write":
        with suppress(AssertionError):
            await until(pilot, lambda: text(pilot.app) == path.read_text(encoding="utf-8"), PATIENCE / 6)
    matches(name, pilot.app)


def matches(name: str, app: App[Any]) -> None:
    """Compare what the screen shows with the picture of that name."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("MUSTER_SNAPSHOTS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(app), encoding="utf-8")
        return
    assert path.exists(), f"no picture {path}: MUSTER_SNAPSHOTS=write makes it"
    shown = text(app)
    assert shown == path.read_text(encoding="utf-8"), f"not {path.name}:\n{shown}"
