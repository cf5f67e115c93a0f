"""Nothing is decided by a key that was meant for another screen: host keys above all."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.shell.dialogs import TextDialog, TrustDialog
from app.wizard.state import actions as do
from app.wizard.state.state import Step
from tests.screens.pilot import fixed_clock, run, text, until_text
from tests.screens.states import FINGERPRINT, at

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


def test_a_screen_that_has_just_opened_takes_no_key() -> None:
    steering = at(Step.ACCESS)
    app = WizardApp(steering, clock=fixed_clock)
    now = 1000.0
    app.opening_pause, app.monotonic = 0.5, lambda: now

    async def drive(pilot: Pilot[Any]) -> None:
        nonlocal now
        await pilot.press("s")
        assert steering.done == []
        now += 0.6
        await pilot.press(*TO_THE_NEW_ONE, "enter", "a", "a")
        assert isinstance(app.screen, TrustDialog) and steering.done == []
        now += 0.6
        await pilot.press("a")
        assert steering.done == [do.trust_key("SHA256:studio", FINGERPRINT)]

    run(app, drive)


def test_what_is_typed_into_a_field_at_once_is_not_lost_and_decides_nothing_yet() -> None:
    steering = at(Step.MACHINES)
    app = WizardApp(steering, clock=fixed_clock)
    now = 1000.0
    app.opening_pause, app.monotonic = 0.5, lambda: now

    async def drive(pilot: Pilot[Any]) -> None:
        nonlocal now
        now += 0.6
        await pilot.press("a", *"pi", "enter")
        assert isinstance(app.screen, TextDialog) and steering.done == []
        now += 0.6
        await pilot.press("enter")
        assert steering.done == [do.add_machine("pi")]

    run(app, drive)


def test_a_fingerprint_is_shown_once() -> None:
    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*TO_THE_NEW_ONE)
        assert text(pilot.app).count(FINGERPRINT) == 1

    run(WizardApp(at(Step.ACCESS), clock=fixed_clock), drive, size=(120, 32))
