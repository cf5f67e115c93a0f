"""What opens over a screen, and what becomes of the screen meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from rich.style import Style
from textual.notifications import Notification
from textual.pilot import Pilot
from textual.widgets import Input

from app.screens.app import WizardApp
from app.shell.dialogs import TextDialog
from app.shell.terminal_app import LatestNotifications
from app.wizard.state import actions as do
from app.wizard.state.state import Step, TaskKind
from tests.screens.pilot import choose, fixed_clock, run, text, until_text
from tests.screens.states import EXAMINED, STUDIO, at


def style_of(pilot: Pilot[Any], text: str) -> Style:
    """How a text looks on the screen."""
    strips = pilot.app.screen._compositor.render_strips()
    return next(one.style for strip in strips for one in strip if one.style and text in one.text)


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["muster-dark", "muster-light", "muster-contrast", "ansi-dark", "none"])
def test_a_dialog_dims_what_is_behind_it(colours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if colours == "none":
        monkeypatch.setenv("NO_COLOR", "1")

    async def drive(pilot: Pilot[Any]) -> None:
        if colours != "none":
            pilot.app.theme = colours
        await pilot.pause()
        before = style_of(pilot, "How fast")
        await pilot.press("question_mark")
        await until_text(pilot, "On every screen")
        behind = style_of(pilot, "How fast")
        assert behind.dim or behind.color != before.color
        await pilot.press("escape")
        await pilot.pause()
        assert style_of(pilot, "How fast") == before

    run(WizardApp(at(Step.LINKS), clock=fixed_clock), drive, (120, 32))


@pytest.mark.slow
def test_the_end_of_a_long_value_is_seen_while_it_is_typed() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await choose(pilot, "dataset")
        await pilot.press("enter")
        field = pilot.app.screen.query_one("#field", Input)
        field.value = f"/{'long/' * 30}recordings"
        field.action_end()
        await until_text(pilot, "long/recordings")

    run(WizardApp(at(Step.JOB), clock=fixed_clock), drive, (80, 24))


@pytest.mark.slow
def test_a_value_that_an_option_cannot_have_is_refused_where_it_is_typed() -> None:
    steering = at(Step.JOB)

    async def drive(pilot: Pilot[Any]) -> None:
        await choose(pilot, "option:batch_size")
        await pilot.press("enter", *"abc", "enter")
        await until_text(pilot, "'abc': not a whole number")
        assert isinstance(pilot.app.screen, TextDialog) and steering.done == []
        await pilot.press(*["backspace"] * 3, "4", "enter")
        assert steering.done == [do.set_option("batch_size", "4")]

    run(WizardApp(steering, clock=fixed_clock), drive)


@pytest.mark.slow
def test_the_palette_lists_each_action_once() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        titles = [command.title for command in pilot.app.get_system_commands(pilot.app.screen)]
        assert "Command (e)" in titles and len(titles) == len(set(titles))

    run(WizardApp(at(Step.PLAN), clock=fixed_clock), drive)


def test_a_notification_replaces_what_it_repeats_and_keeps_other_warnings() -> None:
    shown = LatestNotifications()
    for message, severity in (
        ("pause: requested", "information"),
        ("pause: requested", "information"),
        ("pause refused: it is over", "warning"),
        ("no such machine", "warning"),
        ("pause: requested", "information"),
        ("pause refused: it is over", "warning"),
    ):
        shown.add(Notification(message, severity=severity))
    assert [one.message for one in shown] == ["no such machine", "pause refused: it is over"]


@pytest.mark.slow
def test_esc_after_the_doctor_puts_its_findings_away_and_leaves_only_then() -> None:
    steering = at(Step.HOME)
    steering.state = steering.state.putting(TaskKind.DOCTOR, value=EXAMINED[STUDIO.key])

    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, "esc Back")
        lines = text(pilot.app).splitlines()
        shown = [next(n for n, line in enumerate(lines) if word in line) for word in ("Doctor", "New set-up")]
        assert shown == sorted(shown)  # its findings are in view, above the profiles
        await pilot.press("escape")
        assert steering.done == [do.close_doctor()]
        steering.state = steering.done[0].on(steering.state)
        pilot.app.changed()
        await until_text(pilot, "esc Leave")
        assert "no torch" not in text(pilot.app)

    run(WizardApp(steering, clock=fixed_clock), drive, (120, 32))


@pytest.mark.slow
def test_the_command_of_a_plan_says_which_key_makes_it_work() -> None:
    steering = at(Step.PLAN)

    async def drive(pilot: Pilot[Any]) -> None:
        await until_text(pilot, "works once saved: enter saves and starts, w only saves")
        assert "w Save" in text(pilot.app)
        await pilot.press("e")
        await until_text(pilot, "It works once saved")
        await pilot.press("escape")
        steering.state = steering.state.putting(TaskKind.SAVE, inputs=steering.state.plan.inputs)
        pilot.app.changed()
        await until_text(pilot, "the command works now")
        assert "works once" not in text(pilot.app)

    run(WizardApp(steering, clock=fixed_clock), drive)


@pytest.mark.slow
def test_an_address_that_is_none_is_refused_where_it_is_typed() -> None:
    steering = at(Step.MACHINES)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("a", *"ada", "at", "enter")
        await until_text(pilot, "'ada@' is not a machine (write it as after ssh")
        await pilot.press("backspace", "enter")
        assert steering.done == [do.add_machine("ada")]

    run(WizardApp(steering, clock=fixed_clock), drive)
