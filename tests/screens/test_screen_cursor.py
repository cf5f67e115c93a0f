"""Where the cursor is: on the machine that was added, at the first problem, and where it was when rows come and go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.shell.row_table import RowTable
from app.wizard.state.dependencies import apply, inputs
from app.wizard.state.observations import begun, failed, log_line
from app.wizard.state.records import ItemStatus, MachineRow
from app.wizard.state.state import Action, Step, TaskKind
from distributed.checks.findings import Finding
from distributed.hosts.file import Machine
from distributed.preparation.wheels import InstallProgress
from tests.screens.pilot import fixed_clock, run, text, until_text
from tests.screens.states import DESK, EXAMINED, MACHINES, STUDIO, Still, at
from tests.wizard.fake_services import FINE

pytestmark = pytest.mark.slow


class Moving(Still):
    """A set-up that does what it is told, without machines."""

    def do(self, action: Action) -> None:
        super().do(action)
        self.state = apply(self.state, action)


def cursor(pilot: Pilot[Any]) -> str:
    return pilot.app.screen.query_one("#rows", RowTable).cursor


def test_the_cursor_stays_on_a_machine_that_was_added() -> None:
    steering = Moving(at(Step.MACHINES).state)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("a", *"pi", "enter")
        await pilot.pause()
        assert cursor(pilot) == "typed:pi"
        found = MachineRow("SHA256:pi", "pi", entry=Machine(name="pi"), aliases=("typed:pi",))
        steering.state = replace(steering.state, machines=replace(MACHINES, rows=(found, *MACHINES.rows)))
        pilot.app.changed()
        await pilot.pause()
        assert cursor(pilot) == "SHA256:pi"

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_checks_opens_at_the_first_problem_and_skipping_twice_changes_nothing() -> None:
    state = at(Step.CHECKS).state
    # they are of these machines
    steering = Moving(state.putting(TaskKind.CHECKS, inputs=inputs(state, TaskKind.CHECKS)))

    async def drive(pilot: Pilot[Any]) -> None:
        assert cursor(pilot) == "SHA256:studio|torch"
        before = text(pilot.app)
        for skipped in (("SHA256:studio",), ()):
            await pilot.press("s")
            await pilot.pause()
            assert steering.state.answers.skipped == skipped
            assert cursor(pilot) == "SHA256:studio"
        await pilot.press("down")
        await pilot.pause()
        assert text(pilot.app) == before

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_after_a_failed_installation_the_cursor_stays_and_its_row_says_why() -> None:
    state = at(Step.CHECKS).state
    lacking = {DESK.key: EXAMINED[STUDIO.key], STUDIO.key: EXAMINED[STUDIO.key]}
    steering = Moving(state.putting(TaskKind.CHECKS, value=lacking, inputs=inputs(state, TaskKind.CHECKS)))

    async def drive(pilot: Pilot[Any]) -> None:
        assert cursor(pilot) == f"{DESK.key}|torch"
        await pilot.press("f")
        await until_text(pilot, "Install on studio, too?")
        await pilot.press("escape")
        (task,) = steering.state.orders
        for news in (
            begun(task),
            log_line(task, InstallProgress("no six==1.17", 0.0, DESK.name)),
            failed(task, "no", ""),
        ):
            steering.state = apply(steering.state, news)
            pilot.app.changed()
            await pilot.pause()
        assert cursor(pilot) == DESK.key
        steering.state = steering.state.putting(TaskKind.CHECKS, value=lacking, status=ItemStatus.OK)
        pilot.app.changed()
        await pilot.pause()
        assert cursor(pilot) == f"{DESK.key}|torch"
        words = " ".join(text(pilot.app).split())
        assert "✗ install failed no six==1.17" in words and "tried and failed: no six==1.17" in words
        await pilot.press("f", "enter")
        await pilot.pause()
        assert steering.state.under_repair == {DESK.key, STUDIO.key}

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_a_machine_with_nothing_installed_is_one_row_without_counts() -> None:
    state = at(Step.CHECKS).state
    missing = Finding("ready", "problem", "nothing is installed there yet", "ready to train", "x", True, "about 1.6 GB")
    findings = {DESK.key: (FINE[0],), STUDIO.key: (FINE[0], missing)}
    steering = Moving(state.putting(TaskKind.CHECKS, value=findings, inputs=inputs(state, TaskKind.CHECKS)))

    async def drive(pilot: Pilot[Any]) -> None:
        rows = [" ".join(line.split()) for line in text(pilot.app).splitlines()]
        assert "desk ✓ ready" in rows
        assert "▌ studio ✗ not installed nothing is installed there yet" in rows
        assert cursor(pilot) == STUDIO.key
        assert any(row.startswith("fix: f installs what is missing on this machine") for row in rows)
        await pilot.press("o")
        assert "torch ✓ ok 2.8.0" in " ".join(text(pilot.app).split())

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_a_letter_leads_to_the_row_that_shows_it() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("J")
        await pilot.pause()
        shown = text(pilot.app).splitlines()
        place = next(line for line in shown if "desk" in line and "[" in line)
        other = next(line for line in shown if "studio" in line and "[" in line)
        assert [line.split()[0] for line in (place, other)] == ["a", "s"]
        await pilot.press("s")
        await pilot.pause()
        assert cursor(pilot) == "SHA256:studio"
        await pilot.press("J", "escape")
        await pilot.pause()
        assert cursor(pilot) == "SHA256:studio"

    run(WizardApp(at(Step.MACHINES), clock=fixed_clock), drive)
