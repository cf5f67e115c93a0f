"""The real set-up and real machines on its network: in a terminal of one host, and beside all of them."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.shell.row_table import RowTable
from app.wizard.engine import Wizard
from app.wizard.services.services import Services
from tests.distributed.test_discovery_lab import announce, end, finish, second_cable, serve
from tests.lab.host import REPOSITORY
from tests.lab.lab import Lab
from tests.screens.pilot import fixed_clock, lines, run, text, until
from tests.screens.terminal import Terminal
from tests.waiting import PATIENCE

pytestmark = pytest.mark.lab
SET_UP = """
import sys
from app.screens.app import run_wizard
from app.wizard.services.services import Services
sys.exit(run_wizard(Services(), "", False))
"""
START = PATIENCE
"""Seconds for a Python process to start on a busy machine."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("desk", "studio", "twin1", "twin2") as built:
        yield built


def test_a_machine_shows_when_it_announces_itself_and_is_offline_when_it_is_killed(lab: Lab) -> None:
    words = lab["desk"].command([sys.executable, "-c", SET_UP], str(REPOSITORY))
    with Terminal(*words, width=100, height=30) as terminal:
        terminal.until("New set-up", START)
        terminal.press("n")
        terminal.until("desk (here)", START)
        mark = len(terminal.written)
        announcer = announce(lab["studio"])
        terminal.written_since("studio", mark)
        terminal.written_since("online", mark)
        mark = len(terminal.written)
        finish(lab["studio"], announcer, signal.SIGKILL)
        lab["studio"].stop_sshd()
        terminal.written_since("offline", mark)
        lab["studio"].start_sshd()
        terminal.press("\x03")
        assert terminal.end() == 130


async def selected_one_by_one(pilot: Pilot[Any], app: WizardApp) -> list[tuple[str, str]]:
    """Select every machine that is listed; return its line, and what the screen says meanwhile."""
    seen = []

    def chosen_or_gone(key: str) -> bool:
        """Two rows become one when both show the same host key."""
        for table in app.screen.query("#rows").results(RowTable):
            table.select(key)
            if table.cursor == key:
                return True
        return key not in {row.key for row in app.wizard.state.machines.rows}

    for row in app.wizard.state.machines.rows:
        await until(pilot, partial(chosen_or_gone, row.key))
        shown = lines(app)
        seen.append((next((line for line in shown if "▌" in line), ""), "\n".join(shown)))
    return seen


def test_a_machine_on_two_cables_is_one_row_and_two_of_one_name_are_two_rows(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name, twins = f"pair{lab.slot}", (lab["twin1"], lab["twin2"])
    wizard = Wizard(Services(tmp_path / "config.ini"))
    app = WizardApp(wizard, clock=fixed_clock)
    wizard.subscribe(app.changed)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("n")
        await until(pilot, lambda: app.wizard.state.machines.rows)
        deadline = time.monotonic() + 2 * START
        while True:
            seen = await selected_one_by_one(pilot, app)
            cabled = [line for line, said in seen if lab["studio"].address in said or direct in said]
            both = [line for line, said in seen if lab["studio"].address in said and direct in said]
            pair = {host.name for host in twins for line, said in seen if host.address in said and name in line}
            named = [line for line, _ in seen if name in line]
            if len(cabled) == len(both) == 1 and len(named) == len(pair) == 2:
                return
            assert time.monotonic() < deadline, text(app)

    with second_cable(lab, lab["studio"]) as (_, direct), contextlib.ExitStack() as stack:
        stack.callback(finish, lab["studio"], announce(lab["studio"]))
        for host in twins:
            stack.callback(end, serve(host, name))
        try:
            run(app, drive, size=(160, 45))
        finally:
            wizard.close()
