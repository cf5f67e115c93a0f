"""A long recording with known words: shipped clips of one voice, one after another with pauses."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile

from speech.data.audio import decode
from speech.data.sound_file import Samples
from speech.recordings.segments.transcribing import TimedWord

CLIPS = Path(__file__).parents[3] / "examples" / "spoken_commands"
RATE = 16_000


@dataclass(frozen=True)
class Talk:
    path: Path
    words: list[TimedWord]
    """What is said, and between which seconds the clip with it lies."""

    @property
    def text(self) -> str:
        return " ".join(word.text for word in self.words)


def make_talk(path: Path, pauses: Sequence[float]) -> Talk:
    """Write a recording: a pause, a clip, a pause ... and half a second of silence."""
    with open(CLIPS / "train.csv", newline="", encoding="utf-8") as table:
        rows = [row for row in csv.DictReader(table) if "festival-slt-1.00" in row["audio_path"]][: len(pauses)]
    sounds: list[Samples] = []
    words, second = [], 0.0
    for row, pause in zip(rows, pauses):
        sound = decode(CLIPS / row["audio_path"], RATE).samples
        sounds += [np.zeros(round(pause * RATE), np.float32), sound]
        begin, word_seconds = second + pause, len(sound) / RATE / len(row["text"].split())
        for number, word in enumerate(row["text"].split()):
            words.append(TimedWord(word, begin + number * word_seconds, begin + (number + 1) * word_seconds))
        second = begin + len(sound) / RATE
    sound = np.concatenate([*sounds, np.zeros(RATE // 2, np.float32)])
    soundfile.write(str(path), sound, RATE)
    return Talk(path, words)


@dataclass
class Listening:
    """Transcribes the spoken words of each piece exactly, except for those in ``otherwise``."""

    talk: Talk
    otherwise: dict[int, str] = field(default_factory=dict)
    language: str = "en"
    seconds: float = 30.0
    heard: int = 0
    """Number of transcribed pieces."""

    def transcribe(self, pieces: Sequence[Samples], starts: Sequence[float]) -> list[list[TimedWord]]:
        self.heard += len(pieces)
        return [self._words(start, start + len(piece) / RATE) for piece, start in zip(pieces, starts)]

    def _words(self, start: float, end: float) -> list[TimedWord]:
        return [
            TimedWord(self.otherwise.get(number, word.text), word.start, word.end)
            for number, word in enumerate(self.talk.words)
            if start <= (word.start + word.end) / 2 < end
        ]
