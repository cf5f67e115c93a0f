"""The terminal changes its size: focus and selection stay; too small is said, and no key acts unseen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.shell.row_table import RowTable
from app.wizard.state.state import Step
from tests.screens.pilot import fixed_clock, lines, resize, run, text, until_text
from tests.screens.states import at

pytestmark = pytest.mark.slow

ROUND = ((160, 45), (80, 24), (60, 16), (160, 45))


@pytest.mark.parametrize("step", [Step.CHECKS, Step.PLAN])
def test_many_resizes_keep_focus_and_selection(step: Step) -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        table = pilot.app.screen.query_one("#rows", RowTable)
        await pilot.press("down", "down")
        selected = table.cursor
        for width, height in ROUND * 2:
            await resize(pilot, width, height)
        assert table.cursor == selected and pilot.app.focused is table
        assert any("▌" in line for line in lines(pilot.app))

    run(WizardApp(at(step), clock=fixed_clock), drive)


def test_too_small_is_one_line_and_no_key_acts_unseen() -> None:
    steering = at(Step.PLAN)

    async def drive(pilot: Pilot[Any]) -> None:
        await resize(pilot, 60, 16)
        said = [line.strip() for line in lines(pilot.app) if line.strip()]
        assert said == ["Too small: 60x16, needs 72x20. Or: python3 wizard.py --plain"]
        await resize(pilot, 50, 16)  # the command is whole there, too
        assert [line.strip() for line in lines(pilot.app) if line.strip()] == [
            "Too small: 50x16, needs 72x20.",
            "Or: python3 wizard.py --plain",
        ]
        await pilot.press("enter", "escape")
        assert steering.done == []
        await resize(pilot, 80, 24)
        assert "Review and start" in text(pilot.app)
        await pilot.press("enter")
        assert len(steering.done) == 1

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_a_dialog_follows_too() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("f1")  # as in most programs; as a key that nothing has, it would let esc leave the screen
        for width, height in ROUND:
            await resize(pilot, width, height)
        assert "On every screen" in text(pilot.app)
        await pilot.press("escape")
        assert "Which machines take part?" in text(pilot.app)

    run(WizardApp(at(Step.MACHINES), clock=fixed_clock), drive)


def test_a_screen_that_was_not_shown_meanwhile_fits_too() -> None:
    steering = at(Step.STRATEGY)

    async def drive(pilot: Pilot[Any]) -> None:
        app = pilot.app
        assert isinstance(app, WizardApp)

        async def go(step: Step) -> None:
            steering.state = replace(steering.state, step=step)
            app.follow()
            await pilot.pause()

        await go(Step.PLAN)
        await resize(pilot, 80, 24)
        await go(Step.STRATEGY)
        await until_text(pilot, "How should they train together?")
        assert "1:53 ━━━━────" in text(app)

    run(WizardApp(steering, clock=fixed_clock), drive, (160, 45))


@pytest.mark.parametrize("size", [(80, 24), (100, 30), (120, 32), (139, 40), (160, 45)])
def test_a_way_to_train_keeps_its_name_and_what_it_costs_at_every_width(size: tuple[int, int]) -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.pause()
        (way,) = [line for line in lines(pilot.app) if "Fast 2 machines recommended" in line]
        assert all(figure in way for figure in (" 1:53", "+0.3 %")), way
        await pilot.press("x")
        await pilot.pause()
        shown = lines(pilot.app)
        (way,) = [line for line in shown if "diloco mxfp4" in line]
        assert all(figure in way for figure in (" 1:53", " 2:13", " 10 ", " 5 %", "+0.3 %"))
        assert any(" recommended" in line for line in shown) and any("alone desk" in line for line in shown)
        words = " ".join(shown)
        assert all(f" {label} " in words for label in ("way", "merge", "waits"))

    run(WizardApp(at(Step.STRATEGY), clock=fixed_clock), drive, size)


def test_facts_are_folded_anew_whenever_their_room_changes() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.pause()
        assert f"{'│':14}this run\n" in text(pilot.app)
        pilot.app.screen.query_one("#about").styles.width = 40
        await pilot.pause()
        assert f"{'│':14}certificates of this run\n" in text(pilot.app)

    run(WizardApp(at(Step.PLAN), clock=fixed_clock), drive, (160, 45))
