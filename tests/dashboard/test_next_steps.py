"""What can be done with a model once its run has ended."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from textual.pilot import Pilot

from app.screens.app import WizardApp
from app.wizard.state.state import Step
from profiles.errors import BadInput
from speech.report.hearing import HearingDialog
from tests.screens.pilot import fixed_clock, run, text, until_text
from tests.screens.states import at
from training.tasks.outputs.showcase import Sample

CLIP = Sample(
    id="c1",
    reference="close the kitchen blind",
    before="close the kitten blend",
    after="close the kitchen blind",
    sound=base64.b64encode(b"a clip").decode(),
)
MODEL = Path("/runs/one/model")


def hear(model: str, file: Path, is_normalised: bool) -> str:
    assert file.read_bytes() == b"a clip"
    text = {"base": "close the kitten", str(MODEL): "close the kitchen blind"}[model]
    return text if is_normalised else f"{text.capitalize()}."


@contextlib.contextmanager
def microphone(seconds: float, path: Path) -> Iterator[Path]:
    assert seconds == 5
    path.write_bytes(b"a clip")
    yield path


def dialog(tmp_path: Path, model: Path | None = MODEL, **more: Any) -> HearingDialog:
    reports: list[str] = more.pop("reports", [])
    settings = {"ask": hear, "record": lambda seconds: microphone(seconds, tmp_path / "voice.wav"), **more}
    return HearingDialog(["muster runs show one"], model, "base", [CLIP], lambda: reports.append("open"), **settings)


def show(shown: HearingDialog, *keys: str, until: str) -> str:
    """Press keys in a dialog, and return the screen on which the words stand."""
    screens: list[str] = []

    async def drive(pilot: Pilot[Any]) -> None:
        pilot.app.push_screen(shown)
        await until_text(pilot, "What next?")
        await pilot.press(*keys)
        await until_text(pilot, until)
        screens.append(text(pilot.app))

    run(WizardApp(cast(Any, at(Step.LINKS)), clock=fixed_clock), drive, (120, 32))
    return screens[0]


def in_order(screen: str, *words: str) -> bool:
    places = [screen.index(word) for word in words]
    return places == sorted(places)


@pytest.mark.slow
def test_enter_lets_both_models_hear_a_held_out_clip(tmp_path: Path) -> None:
    screen = show(dialog(tmp_path), "enter", until="said")
    assert in_order(screen, "said", "before", "after") and "blind." not in screen  # compared as error rates compare


@pytest.mark.slow
def test_a_model_from_nothing_is_not_compared_as_if_it_spoke(tmp_path: Path) -> None:
    untrained = HearingDialog(
        [], MODEL, "", [CLIP], lambda: None, ask=hear, record=lambda seconds: contextlib.nullcontext()
    )
    screen = show(untrained, "enter", until="(untrained)")
    assert f"({CLIP.reference.split()[0]})" not in screen


@pytest.mark.slow
def test_m_shows_the_old_and_the_new_model_side_by_side(tmp_path: Path) -> None:
    screen = show(dialog(tmp_path), "m", until="before")
    assert "Speak now, for 5 seconds" in screen and in_order(screen, "before", "after") and "blind." in screen


@pytest.mark.slow
def test_without_a_microphone_it_says_so(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def none(seconds: float) -> Iterator[Path]:
        raise BadInput("no microphone", "connect one")
        yield Path()

    show(dialog(tmp_path, record=none), "m", until="no microphone (connect one)")


@pytest.mark.slow
def test_r_opens_the_report_and_t_tells_how_a_friend_opens_the_model(tmp_path: Path) -> None:
    reports: list[str] = []
    show(dialog(tmp_path), "t", until="muster transcribe model recording.wav")
    show(dialog(tmp_path, reports=reports), "r", until="How fast")
    assert reports == ["open"]


@pytest.mark.slow
def test_a_run_without_a_model_shows_what_was_kept_of_its_clips(tmp_path: Path) -> None:
    screen = show(dialog(tmp_path, model=None), "enter", until="kitten")
    assert in_order(screen, "said", "before", "after")
