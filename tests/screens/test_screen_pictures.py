"""Every screen of the set-up as plain text, at three sizes; and what no picture may lack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.wizard.services.launching import STEPS
from app.wizard.state.launch_records import LaunchProgress, LaunchRow
from app.wizard.state.records import ItemStatus
from app.wizard.state.state import StatePart, Step
from tests.screens.pilot import SIZES, comes_to_match, fixed_clock, lines, resize, run, text
from tests.screens.states import EVIL, MAIN_KEYS, at, hostile

pytestmark = pytest.mark.slow

FIRST_COLUMN = {
    Step.HOME: ("talk", "nanogpt", "Doctor"),
    Step.MACHINES: ("[x] desk (here)", "[x] studio"),
    Step.ACCESS: ("attic", "studio", "tower"),
    Step.CHECKS: ("desk", "studio", "torch"),
    Step.LINKS: ("desk > studio", "studio > air"),
    Step.JOB: ("batch size", "learning rate"),
    Step.STRATEGY: ("Fast 2 machines recommended", "Exact 2 machines", "One machine desk"),
    Step.PLAN: ("desk", "studio"),
    Step.LAUNCH: ("desk", "studio"),
}


def app_at(step: Step, **options: Any) -> WizardApp:
    return WizardApp(at(step), clock=fixed_clock, **options)


@pytest.mark.parametrize("step", Step)
def test_screen_at_three_sizes(step: Step) -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        for width, height in SIZES:
            await resize(pilot, width, height)
            await comes_to_match(pilot, f"{step.value}-{width}x{height}")
        await resize(pilot, 80, 24)
        whole_at_80x24(step, lines(pilot.app))
        words = pilot.app.screen.HELP.split()[:3]  # type: ignore[attr-defined]  # every step has it
        await pilot.press("question_mark")
        await pilot.pause()
        assert " ".join(words) in text(pilot.app)

    run(app_at(step), drive)


def whole_at_80x24(step: Step, shown: list[str]) -> None:
    """Nothing of the first column and of the keys that lead on is cut."""
    for key in (MAIN_KEYS[step], "esc Leave" if step is Step.HOME else "esc Back", "? Help", "^p Palette"):
        assert key in shown[-1]
    for cell in FIRST_COLUMN[step]:
        assert any(cell in line for line in shown), cell


@pytest.mark.parametrize("step", Step)
def test_pure_ascii(step: Step) -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        assert text(pilot.app).isascii()
        for key in ("question_mark", "escape", "ctrl+p")[: 3 if step is Step.HOME else 0]:
            await pilot.press(key)
            await pilot.pause()
            assert text(pilot.app).isascii()

    run(app_at(step, ascii_only=True), drive)


@pytest.mark.parametrize("step", Step)
def test_hostile_text_is_shown_and_never_obeyed(step: Step) -> None:
    steering = at(step)
    steering.state = replace(hostile(steering.state), step=step)

    async def drive(pilot: Pilot[Any]) -> None:
        assert not {character for character in text(pilot.app) if not character.isprintable()} - {"\n"}
        if step is not Step.STRATEGY:  # whose names are cut before
            assert "[bold red]" in text(pilot.app)
        for _ in range(3):
            await pilot.press("down")
        await pilot.press("e", "escape", "g", "escape", "y")

    run(WizardApp(steering, clock=fixed_clock), drive, size=(120, 32))


def test_a_hostile_name_is_shown_as_it_is() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        assert "evil\\x1b[31m[bold red]mac\\" in text(pilot.app)
        assert EVIL not in text(pilot.app)

    run(app_at(Step.MACHINES), drive, size=(160, 45))


def test_the_columns_of_a_launch_stay_where_they_are_when_a_state_changes() -> None:
    def heading(status: ItemStatus) -> str:
        row = LaunchRow("demo-workstation", "demo-workstation", (status,) * len(STEPS), status=status)
        found: list[str] = []

        async def drive(pilot: Pilot[Any]) -> None:
            found.extend(line for line in lines(pilot.app) if "joined" in line)

        launch = StatePart(LaunchProgress(STEPS, (row,)), status=ItemStatus.WORKING)
        run(WizardApp(at(Step.LAUNCH, launch), clock=fixed_clock), drive, size=(72, 24))
        return found[0]

    assert len({heading(status) for status in (ItemStatus.WORKING, ItemStatus.OK, ItemStatus.FAILED)}) == 1
