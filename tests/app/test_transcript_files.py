"""Transcripts in files, and a microphone that is not real."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from profiles.errors import BadInput
from speech.commands.transcribe import FORMATS, TranscriptFolder, chosen_formats, clock, transcribe
from speech.whisper.decoding import TimedText
from speech.whisper.transcription import TranscriptionResult

SEGMENTS = (TimedText(0.0, 2.5, "a <b> --> c"), TimedText(3661.0, 3661.25, "two\nlines"))
HEARD = TranscriptionResult(Path("talk.wav"), "a <b> --> c two lines", 3662.0, "", SEGMENTS, "en")


def test_subtitles_and_text() -> None:
    assert FORMATS["txt"](HEARD) == "a <b> --> c\ntwo lines\n"
    assert FORMATS["srt"](HEARD) == (
        "1\n00:00:00,000 --> 00:00:02,500\na <b> -> c\n\n2\n01:01:01,000 --> 01:01:01,250\ntwo lines\n\n"
    )
    assert FORMATS["vtt"](HEARD) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\na &lt;b&gt; -&gt; c\n\n01:01:01.000 --> 01:01:01.250\ntwo lines\n\n"
    )
    assert json.loads(FORMATS["json"](HEARD))["segments"][1] == {"start": 3661.0, "end": 3661.25, "text": "two\nlines"}
    assert clock(0.9996) == "00:00:01.000"


def test_what_was_heard_before_the_damage_is_written_and_marked() -> None:
    heard = replace(HEARD, segments=SEGMENTS[:1], seconds=9.0, error="broken off")
    assert FORMATS["txt"](heard) == "a <b> --> c\n[cannot be read further: broken off]\n"
    mark = "\n00:00:02{0}500 --> 00:00:09{0}000\n[cannot be read further: broken off]\n\n"
    assert FORMATS["srt"](heard).endswith("c\n\n2" + mark.format(","))
    assert FORMATS["vtt"](heard).endswith("c\n" + mark.format("."))
    document = json.loads(FORMATS["json"](heard))
    assert (document["error"], len(document["segments"])) == ("broken off", 1)


def test_formats_are_checked() -> None:
    assert chosen_formats(["srt, VTT", "srt"], True) == ["srt", "vtt"]
    assert (chosen_formats([], True), chosen_formats([], False)) == (["txt"], [])
    for said in (["doc"], ["srt,vtt"]):
        with pytest.raises(BadInput):
            chosen_formats(said, False)


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    files = [Path("talk.wav"), Path("other/talk.mp3")]
    folder = TranscriptFolder(tmp_path / "new", files, ["txt", "srt"], False)
    assert [path.name for path in folder.write(HEARD)] == ["talk.wav.txt", "talk.wav.srt"]
    with pytest.raises(BadInput, match="is there already"):
        TranscriptFolder(tmp_path / "new", files, ["srt"], False)
    TranscriptFolder(tmp_path / "new", files, ["srt"], True).write(HEARD)
    with pytest.raises(BadInput, match="same name"):
        TranscriptFolder(tmp_path, [Path("a/x.wav"), Path("b/x.wav")], ["txt"], False)


def test_a_folder_that_takes_no_file_is_refused_before_anything_is_heard(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput) as refused:
        TranscriptFolder(tmp_path / "file" / "new", [HEARD.file], ["txt"], False)
    assert "--out" in refused.value.hint.split()[-1:]


def test_others_may_read_the_transcripts(tmp_path: Path) -> None:
    [path] = TranscriptFolder(tmp_path, [HEARD.file], ["txt"], False).write(HEARD)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_damaged_recording_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speech.commands.transcribe.find_usable_model", lambda *_: tmp_path / "no-model")
    damaged, sound = tmp_path / "memo.m4a", tmp_path / "memo.wav"
    damaged.write_bytes(b"no sound")
    soundfile.write(sound, np.zeros(1600, np.float32), 16000)
    with pytest.raises(BadInput, match="memo.m4a: not a readable sound file"):
        transcribe("no-model", [damaged])
    with pytest.raises(BadInput, match="no-model"):
        transcribe("no-model", [damaged, sound])
