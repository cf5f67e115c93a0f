"""What can be done with a model once its run has ended."""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from textual.pilot import Pilot

from app.dashboard.dialogs.model_process import ModelProcess
from app.run_view.tables.showcase import plain, rows
from app.screens.app import WizardApp
from app.wizard.state.state import Step
from profiles.errors import BadInput
from speech.report.hearing import HearingDialog
from tests.screens.pilot import fixed_clock, run, text, until_text
from tests.screens.states import at
from training.tasks.outputs.predictions import FOLDER, NAME, Prediction, write_predictions
from training.tasks.outputs.showcase import Sample

CLIP = Sample(
    id="c1",
    reference="close the kitchen blind",
    before="close the kitten blend",
    after="close the kitchen blind",
    sound=base64.b64encode(b"a clip").decode(),
)
MODEL = Path("/runs/one/model")


class Models(ModelProcess):
    """A process that has heard every recording already; ``problem`` is what it answers instead."""

    problem = ""
    heard = b""

    def ask(self, *words: str) -> dict[str, Any]:
        assert words[0] == "transcribe" and Path(words[1]).name == "model"
        if words[2] == "--microphone":
            assert words[3] == "5.0"
        else:
            Models.heard = Path(words[2]).read_bytes()
        if self.problem:
            raise BadInput(self.problem, "connect one")
        base = {"base": self._heard("close the kitten")} if "--compare" in words else {}
        return {**self._heard("close the kitchen blind"), **base}

    def file(self, name: str, content: bytes) -> Path:
        path = Path(tempfile.mkdtemp(), name)
        path.write_bytes(content)
        return path

    def _heard(self, text: str) -> dict[str, Any]:
        return {"transcripts": [{"normalised": text, "text": f"{text.capitalize()}."}]}


class NoMicrophone(Models):
    problem = "no microphone"


def dialog(model: Path | None = MODEL, base: str = "base", **more: Any) -> HearingDialog:
    reports: list[str] = more.pop("reports", [])
    settings = {"process": Models, **more}
    return HearingDialog(["muster runs show one"], model, base, [CLIP], lambda: reports.append("open"), **settings)


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


def test_of_what_the_user_says_no_word_is_called_wrong() -> None:
    recorded = Sample(id="", before="Open it", after="")
    assert rows("speech", recorded) == [("before", [("Open it", "")]), ("after", [("(nothing)", "")])]


def in_order(screen: str, *words: str) -> bool:
    places = [screen.index(word) for word in words]
    return places == sorted(places)


@pytest.mark.slow
def test_enter_lets_both_models_hear_a_held_out_clip() -> None:
    screen = show(dialog(), "enter", until="said")
    assert in_order(screen, "said", "before", "after", "Close the kitchen blind.")  # as "transcribe" writes it
    assert Models.heard == b"a clip"


def test_capitals_and_punctuation_are_no_wrong_words() -> None:
    clip = CLIP.model_copy(update={"after": "Close the kitten, blind."})
    assert plain(dict(rows("speech", clip))["after"]) == "Close the (kitchen) *kitten,* blind."


@pytest.mark.slow
def test_the_recording_of_a_clip_is_heard_where_it_is_on_this_computer(tmp_path: Path) -> None:
    recording = tmp_path / "c1.wav"
    recording.write_bytes(b"the recording")
    heard = Prediction("c1", str(recording), "Close the kitchen blind!", *[""] * 3, 0, 4, 0, 22)
    write_predictions(tmp_path / FOLDER / NAME, [heard])
    screen = show(dialog(tmp_path / "model"), "enter", until="said")
    assert "Close the kitchen blind!" in screen and Models.heard == b"the recording"


@pytest.mark.slow
def test_a_model_from_nothing_is_not_compared_as_if_it_spoke() -> None:
    screen = show(dialog(base=""), "enter", until="(untrained)")
    assert f"({CLIP.reference.split()[0]})" not in screen


@pytest.mark.slow
def test_m_shows_the_old_and_the_new_model_side_by_side() -> None:
    screen = show(dialog(), "m", until="before")
    assert "Your voice" in screen and in_order(screen, "before", "after") and "blind." in screen


@pytest.mark.slow
def test_m_works_while_a_clip_is_shown() -> None:
    screen = show(dialog(), "enter", "m", until="Your voice")
    assert "A held-out clip" not in screen and "m Microphone" in screen


@pytest.mark.slow
def test_without_a_microphone_it_says_so() -> None:
    show(dialog(process=NoMicrophone), "m", until="no microphone (connect one)")


@pytest.mark.slow
def test_r_opens_the_report_and_t_tells_how_a_friend_opens_the_model() -> None:
    reports: list[str] = []
    show(dialog(reports=reports), "r", "t", until="muster model transcribe model recording.wav")
    assert reports == ["open"]


@pytest.mark.slow
def test_a_run_without_a_model_shows_what_was_kept_of_its_clips() -> None:
    screen = show(dialog(model=None), "enter", until="kitten")
    assert in_order(screen, "said", "before", "after")
