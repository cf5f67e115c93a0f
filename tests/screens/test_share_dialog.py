"""The dialog with a code: what it shows, who asks, and what becomes of the machine that has joined."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.access import AcceptDialog
from app.screens.app import WizardApp
from app.screens.dialogs.share_dialog import ShareDialog
from app.wizard.state import actions as do
from app.wizard.state.state import Step
from distributed.joining.pairing.exchange import Introduction
from distributed.joining.share_client import Applicant, Joined, ShareClosed, ShareEvent, WrongTry
from profiles.errors import MachinesNotReady
from tests.screens.pilot import comes_to_match, fixed_clock, run, text, until, until_text
from tests.screens.states import Still, at

pytestmark = pytest.mark.slow
STUDIO = Introduction(
    name="studio",
    key="AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43,
    user="ada",
    system="Apple M3",
    devices="mps",
    memory=2**34,
)


class ScriptedOffer:
    """A code of which a test says what happens."""

    code = "17-amber-comet-lizard"
    addresses = ("192.168.7.20", "10.0.0.2", "fd00::20")
    port = 7799

    def __init__(self) -> None:
        self.tries_left = 3
        self.answers: list[bool] = []
        self.is_closed = False
        self._events: queue.SimpleQueue[ShareEvent] = queue.SimpleQueue()

    def happens(self, event: ShareEvent) -> None:
        self._events.put(event)

    def seconds_left(self) -> float:
        return 540.0

    def events(self) -> Iterator[ShareEvent]:
        event: ShareEvent | None = None
        while not isinstance(event, Joined | ShareClosed):
            event = self._events.get()
            if isinstance(event, WrongTry):
                self.tries_left = event.tries_left
            yield event

    def answer(self, admitted: bool) -> None:
        self.answers.append(admitted)

    def close(self) -> None:
        self.is_closed = True
        self.happens(ShareClosed("it was withdrawn"))


def sharing() -> tuple[Still, ScriptedOffer]:
    """Return a set-up at Machines whose computer shares a code."""
    steering = at(Step.MACHINES)
    steering.offer = ScriptedOffer()
    return steering, steering.offer


def app_of(steering: Still) -> WizardApp:
    app = WizardApp(steering, clock=fixed_clock)
    app.opening_pause = 0.0
    return app


def test_the_code_and_who_asks_are_whole_at_80x24() -> None:
    steering, offer = sharing()

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("c")
        await until_text(pilot, "Waiting for the other machine")
        await comes_to_match(pilot, "share-80x24")
        offer.happens(Applicant(STUDIO, "192.168.7.31"))
        await until_text(pilot, "Admit it")
        await comes_to_match(pilot, "share-asked-80x24")

    run(app_of(steering), drive)


def test_a_machine_that_is_admitted_is_listed_and_picked() -> None:
    steering, offer = sharing()

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("c")
        offer.happens(Applicant(STUDIO, "192.168.7.31"))
        await until(pilot, lambda: isinstance(pilot.app.screen, AcceptDialog))
        await pilot.press("a")
        await until_text(pilot, "Waiting until the person at studio agrees")
        assert offer.answers == [True]
        offer.happens(Joined("studio-2"))
        await until(pilot, lambda: steering.done)
        assert steering.done == [do.add_machine("studio-2.joined")] and offer.is_closed

    run(app_of(steering), drive)


def test_enter_admits_nobody_and_the_code_is_closed() -> None:
    steering, offer = sharing()

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("c")
        offer.happens(WrongTry("192.168.7.66", 2))
        await until_text(pilot, "A wrong code came from 192.168.7.66")
        assert "2 tries left" in text(pilot.app)
        offer.happens(Applicant(STUDIO, "192.168.7.31"))
        await until(pilot, lambda: isinstance(pilot.app.screen, AcceptDialog))
        await pilot.press("enter")
        assert offer.answers == [False]
        offer.happens(ShareClosed("studio was not admitted"))
        await until_text(pilot, "No machine has joined: studio was not admitted")
        assert steering.done == [] and offer.code not in text(pilot.app)

    run(app_of(steering), drive)


def test_the_question_goes_with_the_machine_that_asked() -> None:
    steering, offer = sharing()

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("c")
        offer.happens(Applicant(STUDIO, "192.168.7.31"))
        await until(pilot, lambda: isinstance(pilot.app.screen, AcceptDialog))
        offer.happens(ShareClosed("studio has gone before it had joined"))
        await until(pilot, lambda: isinstance(pilot.app.screen, ShareDialog))
        await until_text(pilot, "studio has gone before it had joined")
        assert True not in offer.answers

    run(app_of(steering), drive)


def test_a_code_is_withdrawn_when_its_dialog_closes() -> None:
    steering, offer = sharing()

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("c")
        await until_text(pilot, offer.code)
        await pilot.press("escape")
        await until(pilot, lambda: offer.is_closed)

    run(app_of(steering), drive)


def test_why_no_code_can_be_opened_is_shown() -> None:
    steering, _ = sharing()

    def refuse() -> None:
        raise MachinesNotReady("8 codes are open already", "end one of the other shares")

    steering.share = refuse  # type: ignore[method-assign]  # of the fake

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press("c")
        await until_text(pilot, "8 codes are open already")

    run(app_of(steering), drive)
