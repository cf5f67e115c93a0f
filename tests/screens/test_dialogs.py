"""What opens over a screen, and what becomes of the screen meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from rich.style import Style
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.wizard.state.state import Step
from tests.screens.pilot import fixed_clock, run, until_text
from tests.screens.states import at


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
