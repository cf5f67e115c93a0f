"""What a screen says is whole: no sentence is cut, and what qualifies a figure stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.wizard.plain.plain_words import strategy_lines
from app.wizard.state.state import Step, TaskKind
from tests.screens.pilot import fixed_clock, run, text
from tests.screens.states import STRATEGY, Still, at

DOUBT = "measured while b was busy (other programs used 62 % of its processors)"


def shown(steering: Still, keys: Sequence[str] = (), size: tuple[int, int] = (80, 24)) -> str:
    """Return what a screen shows after some keys, in one line."""
    screens: list[str] = []

    async def drive(pilot: Pilot[Any]) -> None:
        await pilot.press(*keys)
        await pilot.pause()
        screens.append(" ".join(text(pilot.app).split()))

    run(WizardApp(steering, clock=fixed_clock), drive, size)
    return screens[0]


def test_times_from_a_busy_machine_are_marked() -> None:
    steering = at(Step.STRATEGY)
    doubtful = replace(STRATEGY, in_use=(DOUBT,))
    steering.state = steering.state.putting(TaskKind.FORECAST, value=doubtful)
    assert f"▲ {DOUBT}: press r to measure again" in shown(steering)
    assert f"  warning: {DOUBT}: m measures again" in list(strategy_lines(steering.state))
