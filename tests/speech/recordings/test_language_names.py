"""The language check: who is left out, and that no clip is heard twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from sounds import read_rows, write_rows, write_tone

from profiles.errors import BadInput
from speech.recordings.preparing import PreparationJob, prepare
from speech.recordings.recording import ReadRequest


class ByLength:
    """Hears German in clips of more than half a second."""

    name = "by length"

    def __init__(self) -> None:
        self.asked = 0

    def languages(self, files: Sequence[Path]) -> list[str]:
        self.asked += len(files)
        return ["de" if file.stat().st_size > 12_000 else "en" for file in files]

    def code(self, language: str) -> str:
        return {"english": "en", "en": "en", "de": "de"}.get(language, "")


def source(folder: Path) -> Path:
    languages = ["en", "de", "en-GB", "klingon", ""]
    seconds = [0.3, 0.9, 0.8, 0.7, 0.6]
    rows = [
        (write_tone(folder / f"{i}.wav", i, seconds[i]).name, f"number {i}", language)
        for i, language in enumerate(languages)
    ]
    return write_rows(folder / "all.csv", "audio_path,text,language", rows)


def test_what_sounds_like_another_language_is_left_out(tmp_path: Path) -> None:
    ear = ByLength()
    job = PreparationJob(ReadRequest(str(source(tmp_path))), tmp_path / "out", form="wav")
    for _ in range(2):
        result = prepare(job, lambda phase, done, total: None, ear)
    assert [(row["id"], row["detail"]) for row in read_rows(tmp_path / "out/left_out.csv")] == [
        ("2.wav", "sounds like de, not en")
    ]
    assert (result.left_out, ear.asked) == ({"language": 1}, 5)


@pytest.mark.slow
def test_a_multilingual_whisper_tells_languages_and_another_is_refused(tmp_path: Path) -> None:
    from speech.whisper.samples import LanguageDetector
    from tests.speech.tiny_speech import tiny_whisper

    ear = LanguageDetector(str(tiny_whisper(tmp_path / "two", ("en", "de"))), tmp_path, "cpu")
    files = [write_tone(tmp_path / f"{i}.wav", i) for i in range(3)]
    heard = ear.languages(files)
    assert len(heard) == 3 and set(heard) <= {"en", "de"}
    assert (ear.code("German"), ear.code("fr"), ear.code(""), ear.code("klingon")) == ("de", "", "", "")
    with pytest.raises(BadInput, match="knows one language only"):
        LanguageDetector(str(tiny_whisper(tmp_path / "one")), tmp_path)
