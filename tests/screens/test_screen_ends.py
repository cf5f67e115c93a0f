"""A screen that is being taken down draws nothing: news that come meanwhile find no widgets, and that is no fault."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.shell.base_screen import BaseScreen, TitleBar
from app.shell.keys import KeyBar
from app.wizard.state.state import ServiceTask, Step, TaskKind
from tests.screens.pilot import fixed_clock, run
from tests.screens.states import at

pytestmark = pytest.mark.slow

TURNS = 100
"""Of the event loop, in which everything that was posted is heard."""


@pytest.mark.parametrize("step", Step)
def test_a_screen_that_is_gone_draws_nothing(step: Step) -> None:
    screens: list[Any] = []

    async def drive(pilot: Pilot[Any]) -> None:
        screens.append(pilot.app.screen)
        assert screens[0].ready

    run(WizardApp(at(step), clock=fixed_clock), drive)
    assert isinstance(screens[0], BaseScreen) and not screens[0].ready
    screens[0].refresh_frame()


@pytest.mark.parametrize("step", [Step.HOME, Step.PLAN])
def test_news_in_the_middle_of_the_end_are_no_fault(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """The application hears the set-up's threads until its very end, when the first widgets are gone already."""
    steering = at(Step.HOME)
    app = WizardApp(steering, clock=fixed_clock)
    titles: list[int] = []

    async def last_widget(self: KeyBar) -> None:
        """The application takes one more message in before it waits for its screen."""
        for _ in range(TURNS):
            if not self.screen.query(TitleBar):
                break
            await asyncio.sleep(0)
        titles.append(len(self.screen.query(TitleBar)))
        steering.state = replace(steering.state, step=step, under_way=((ServiceTask(TaskKind.LINKS), "measuring"),))
        app.changed()
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def drive(pilot: Pilot[Any]) -> None:
        monkeypatch.setattr(KeyBar, "on_unmount", last_widget, raising=False)

    run(app, drive)
    assert titles == [0]
