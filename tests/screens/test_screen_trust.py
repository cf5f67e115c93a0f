"""Nothing is decided by a key that was meant for another screen: host keys above all."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from textual import events
from textual.pilot import Pilot

from app.screens.access import TrustDialog
from app.screens.app import WizardApp
from app.shell.dialogs import ChoiceDialog, QuestionDialog
from app.shell.row_table import RowTable
from app.wizard.state import actions as do
from app.wizard.state.state import Step, TaskKind
from tests.screens.pilot import fixed_clock, run, text, until, until_text
from tests.screens.states import FINGERPRINT, HOSTILE, STUDIO, at
from tests.wizard.fake_services import refused

pytestmark = pytest.mark.slow

TO_THE_NEW_ONE = ["down", "down", "down"]


def test_enter_again_and_again_trusts_nobody_and_a_key_of_its_own_does() -> None:
    steering = at(Step.ACCESS)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*TO_THE_NEW_ONE, *["enter"] * 11)
        assert isinstance(pilot.app.screen, TrustDialog)
        await until_text(pilot, f"up to the end, {FINGERPRINT[-8:]}.")
        assert not any(done.rule.__name__ == "trust_key" for done in steering.done)
        await pilot.press("a")
        assert steering.done[-1] == do.trust_key("SHA256:studio", FINGERPRINT)

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_an_ssh_configuration_is_used_after_its_commands_were_shown_and_accepted() -> None:
    steering, runs = at(Step.ACCESS), "that configuration runs: ProxyCommand evil"
    report = replace(refused(STUDIO, "ssh_config"), demands=(runs,))
    steering.state = steering.state.putting(TaskKind.ACCESS, STUDIO.key, value=report)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*TO_THE_NEW_ONE, "enter")
        await until_text(pilot, runs)
        await pilot.press("enter", "enter", "a")
        assert steering.done == [do.approve(STUDIO.key)]

    run(WizardApp(steering, clock=fixed_clock), drive)


def test_two_keys_at_once_close_a_dialog_and_not_the_screen_under_it() -> None:
    steering = at(Step.ACCESS)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*TO_THE_NEW_ONE)
        under = pilot.app.screen
        await pilot.press("enter")
        dialog = pilot.app.screen
        assert isinstance(dialog, TrustDialog)
        for _ in range(2):  # keys that were both on their way to it before it closed
            dialog.action_close()
        await pilot.pause()
        assert pilot.app.screen is under
        await pilot.press("enter", "a")
        assert steering.done == [do.trust_key("SHA256:studio", FINGERPRINT)]

    run(WizardApp(steering, clock=fixed_clock), drive)


def hasty(steering: Any) -> WizardApp:
    """The application as a person uses it whose clock stands still: every key comes right after the one before."""
    app = WizardApp(steering, clock=fixed_clock)
    app.opening_pause, app.monotonic = 0.5, lambda: 1000.0
    return app


async def typed_at_once(pilot: Pilot[Any], *keys: str) -> None:
    """Send keys as a terminal does, none of which waits for the one before, and wait for all."""
    characters = {"slash": "/", "enter": "\r", "backspace": "\x7f", "question_mark": "?"}
    for key in keys:
        pilot.app.post_message(events.Key(key, characters.get(key, key if len(key) == 1 else None)))
    await pilot.pause()
    await until(pilot, lambda: not cast(WizardApp, pilot.app)._keys)


def test_a_host_key_is_not_accepted_before_it_can_be_read() -> None:
    steering = at(Step.ACCESS)
    app = hasty(steering)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*TO_THE_NEW_ONE, "enter", "a", "a")
        assert isinstance(app.screen, TrustDialog) and steering.done == []
        app.monotonic = lambda: 1100.0  # from which the time is taken that the key is on its way
        await pilot.press("a")
        assert steering.done == [do.trust_key("SHA256:studio", FINGERPRINT)]

    run(app, drive)


def test_the_first_screen_takes_the_first_key() -> None:
    steering = at(Step.ACCESS)

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("s")
        assert len(steering.done) == 1

    run(hasty(steering), drive)


def test_keys_typed_at_once_reach_the_dialog_that_the_first_of_them_opens() -> None:
    steering = at(Step.MACHINES)
    app = hasty(steering)

    async def drive(pilot: Pilot[Any]) -> None:
        await typed_at_once(pilot, "a", "p", "i", "enter")
        assert steering.done == [do.add_machine("pi")]

    run(app, drive)


def test_keys_typed_at_once_reach_the_filter_and_the_letters_that_the_first_of_them_opens() -> None:
    app = hasty(at(Step.MACHINES))

    async def drive(pilot: Pilot[Any]) -> None:
        table = app.screen.query_one(RowTable)
        await typed_at_once(pilot, "slash", "s", "t", "enter")
        assert table.filter_text == "st" and app.focused is table
        await typed_at_once(pilot, "slash", "backspace", "backspace", "enter", "J", "d")
        assert (table.filter_text, table.cursor) == ("", HOSTILE.key)

    run(app, drive)


def test_a_key_that_opened_a_screen_is_taken_there_when_it_is_typed_again() -> None:
    app = hasty(at(Step.JOB))

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("down", "down", "down")
        await typed_at_once(pilot, "enter", "enter", "enter")
        assert isinstance(app.screen, ChoiceDialog)
        await typed_at_once(pilot, "enter")
        assert not isinstance(app.screen, ChoiceDialog)

    run(app, drive)


def test_a_held_key_opens_one_screen_and_it_is_said() -> None:
    app = hasty(at(Step.JOB))

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("down", "down", "down")
        pressed = time.monotonic() - 1
        for later in (0.0, 0.5, 0.53, 0.56, 0.59):
            key = events.Key("enter", "\r")
            key.time = pressed + later
            app.post_message(key)
        await typed_at_once(pilot, "up")
        assert isinstance(app.screen, ChoiceDialog)
        assert [notice.message for notice in app._notifications] == ["enter is held down: it counts once\nhere"]

    run(app, drive)


@pytest.mark.parametrize("seed", range(4))
def test_keys_typed_at_once_do_what_they_do_when_each_is_awaited(seed: int) -> None:
    keys = random.Random(seed).choices(["enter", "down", "up", "a", "p", "slash", "escape", "n", "question_mark"], k=14)

    def outcome(is_awaited: bool) -> tuple[Any, ...]:
        steering = at(Step.MACHINES)
        app, seen = hasty(steering), list[Any]()
        app.opening_pause = 0.0 if is_awaited else 0.5  # a busy computer may type as a keyboard repeats

        async def drive(pilot: Pilot[Any]) -> None:
            await (pilot.press(*keys) if is_awaited else typed_at_once(pilot, *keys))
            seen.extend([type(app.screen), text(app)])

        run(app, drive)
        return (*seen, steering.done)

    assert outcome(is_awaited=False) == outcome(is_awaited=True)


def test_a_screen_that_opens_by_itself_takes_no_key_at_once() -> None:
    app = hasty(at(Step.LINKS))

    async def drive(pilot: Pilot[Any]) -> None:
        answers: list[bool | None] = []
        app.push_screen(QuestionDialog("Leave?", "Leave", "Stay"), answers.append)
        await pilot.press("enter")
        assert isinstance(app.screen, QuestionDialog) and not answers

    run(app, drive)


def test_a_fingerprint_is_shown_once() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*TO_THE_NEW_ONE)
        assert text(pilot.app).count(FINGERPRINT) == 1

    run(WizardApp(at(Step.ACCESS), clock=fixed_clock), drive, size=(120, 32))
