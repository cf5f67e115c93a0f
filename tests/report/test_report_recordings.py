"""What a report tells of recordings."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import soundfile

from app.html_report.evidence import read_evidence
from speech.data.audio import MP3_RATE
from speech.report import recordings
from tests.report.report_runs import write_run
from training.tasks.outputs.predictions import BEFORE, FOLDER, NAME, Prediction, write_predictions

HOSTILE = "<script>alert(1)</script>"


def heard(text: str, edits: int, audio: Path | str = "", name: str = "c") -> Prediction:
    said = "open the door"
    return Prediction(name, str(audio), said, text, said, text, edits, 3, edits, 13, speaker=HOSTILE)


def section(tmp_path: Path, before: list[Prediction], after: list[Prediction]) -> str:
    run = write_run(tmp_path, [])
    write_predictions(run / FOLDER / BEFORE, before)
    write_predictions(run / FOLDER / NAME, after)
    return recordings.recordings(run, read_evidence(run).plan)


def test_differing_words_are_marked_and_mended_ones_too() -> None:
    before, after = heard("over a", 3), heard("open a door", 1)
    assert (
        recordings.marked(before) == "<del>open</del> <mark>over</mark> <del>the</del> <mark>a</mark> <del>door</del>"
    )
    assert recordings.marked(after, before) == "<ins>open</ins> <del>the</del> <mark>a</mark> <ins>door</ins>"


def test_the_worst_have_their_sound_in_the_page(tmp_path: Path) -> None:
    sound = tmp_path / "c.wav"
    soundfile.write(sound, np.sin(np.arange(8000 * 40) / 9).astype(np.float32), 8000)
    page = section(tmp_path, [heard("over", 3, sound)], [heard("open a door", 1, sound)])
    data = base64.b64decode(page.split("data:audio/mpeg;base64,")[1].split('"')[0])
    samples, rate = soundfile.read(io.BytesIO(data))
    assert rate == MP3_RATE
    assert len(samples) / rate == pytest.approx(recordings.LONGEST, abs=0.2)
    assert HOSTILE not in page and "&lt;script&gt;" in page


def test_why_there_is_no_sound(tmp_path: Path) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_text("no sound")
    page = section(tmp_path, [], [heard("x", 3, "/nowhere.wav", "a"), heard("x", 3, broken, "b")])
    assert "the recording is not on this machine" in page and "not a readable sound file" in page
    sound = tmp_path / "c.wav"
    soundfile.write(sound, np.zeros(800, np.float32), 8000)
    assert recordings.players([heard("x", 3, sound)], None, max_bytes=100) == ["too much sound for this page"]


def test_a_run_without_texts_has_no_such_section(tmp_path: Path) -> None:
    assert recordings.recordings(write_run(tmp_path, []), None) == ""
