"""Long recordings with known words: how much of their transcript `segment` brings into clips, and how exactly.

    sudo apt-get install espeak-ng flite
    python benchmarks/segment.py --model MODEL_FOLDER --minutes 5 --folder /tmp/talk

Sentences of several synthetic voices follow one another with pauses and noise. espeak-ng tells when each word begins,
so every clip can be compared with the words that are really in it. Some sentences are said but not in the transcript,
and some are in the transcript but never said.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from speech.recordings.segments.matching import word_keys
from training.tasks.data_files.tables import read_table

RATE = 22_050
ESPEAK, FLITE = ("en-us", "en-gb", "en-us+f3", "en-gb+m3"), ("slt", "rms", "awb", "kal16")
WHO = "The old teacher|My neighbour Peter|A young doctor|The woman next door|Our friend Maria|The bus driver".split("|")
WHAT = (
    "bought 3 apples and a loaf of bread|found a letter from 1987 in the kitchen|walked through the garden|"
    "told us a long story about the river|lost the keys to the house|paid 25 dollars for a red umbrella|"
    "wrote down every word of the speech|opened the window and looked outside|waited 40 minutes at the station"
).split("|")
WHEN = (
    "on Monday morning|before the rain began|while the children were asleep|at half past seven|"
    "after the long winter|because nobody else wanted to|and then went home|with a smile"
).split("|")


class _Event(ctypes.Structure):
    """``espeak_EVENT`` of speak_lib.h."""

    _fields_ = [
        ("kind", ctypes.c_int), ("identifier", ctypes.c_uint), ("position", ctypes.c_int), ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int), ("sample", ctypes.c_int), ("user", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    ]  # fmt: skip


class Espeak:
    """The synthesizer as a library: sound, and when each word begins."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libespeak-ng.so.1")
        self._rate = self._library.espeak_Initialize(1, 500, None, 0)
        self._sound: list[np.ndarray] = []
        self._begins: dict[int, float] = {}
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))
        self._callback = kind(self._take)
        self._library.espeak_SetSynthCallback(self._callback)

    def _take(self, sound: Any, count: int, events: Any) -> int:
        if count > 0:
            self._sound.append(np.ctypeslib.as_array(sound, (count,)).copy())
        for event in itertools.takewhile(lambda event: event.kind, (events[number] for number in itertools.count())):
            if event.kind == 1 and event.length:
                self._begins.setdefault(event.position - 1, event.milliseconds / 1000)
        return 0

    def say(self, text: str, voice: str) -> tuple[np.ndarray, list[float]]:
        """Return samples at :data:`RATE`, and the second at which each word begins."""
        self._sound.clear()
        self._begins.clear()
        self._library.espeak_SetVoiceByName(voice.encode())
        self._library.espeak_Synth(text.encode(), len(text) + 1, 0, 1, 0, 1, None, None)
        self._library.espeak_Synchronize()
        sound = np.concatenate(self._sound).astype(np.float32) / 32768
        places = [place for place in range(len(text)) if text[place] != " " and (not place or text[place - 1] == " ")]
        return soxr.resample(sound, self._rate, RATE), [self._begins.get(place, np.nan) for place in places]


def flite(text: str, voice: str) -> np.ndarray:
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(["flite", "-voice", voice, "-t", text, "-o", file.name], check=True)
        sound, rate = soundfile.read(file.name, dtype="float32")
    return np.asarray(soxr.resample(sound, rate, RATE), dtype=np.float32)


@dataclass
class Said:
    """A sentence in the recording, in seconds."""

    words: list[str]
    start: float
    end: float
    begins: list[float]
    """Of each word; not numbers where the synthesizer does not tell."""


def make(folder: Path, minutes: float, seed: int) -> list[Said]:
    """Write ``talk.flac`` and ``talk.txt``; return what is said."""
    dice, espeak = random.Random(seed), Espeak()
    parts, said, transcript, at = [], list[Said](), list[str](), 0.0
    while at < minutes * 60:
        text = f"{dice.choice(WHO)} {dice.choice(WHAT)} {dice.choice(WHEN)}."
        pause = dice.choice((0.3, 0.4, 0.6, 0.9, 1.4, 2.5))
        voice = dice.choice((*ESPEAK, *FLITE))
        sound, begins = espeak.say(text, voice) if voice in ESPEAK else (flite(text, voice), [])
        loud = np.flatnonzero(np.abs(sound) > 0.01)
        parts += [np.zeros(round(pause * RATE), np.float32), sound * 0.2 / np.sqrt(np.mean(sound**2) * 4)]
        start = at + pause
        words = text.split()
        times = [start + begin for begin in begins] or [np.nan] * len(words)
        said.append(Said(words, start + float(loud[0]) / RATE, start + float(loud[-1]) / RATE, times))
        fate = dice.random()
        transcript += (
            [] if fate < 0.05 else [text, "This one was never said by anybody there."] if fate > 0.95 else [text]
        )
        at = start + len(sound) / RATE
    whole = np.concatenate(parts)
    whole += np.random.default_rng(seed).normal(0, 0.003, len(whole)).astype(np.float32)
    soundfile.write(str(folder / "talk.flac"), whole, RATE)
    (folder / "talk.txt").write_text("\n".join(transcript))
    return said


def judge(folder: Path, said: list[Said]) -> dict[str, float]:
    """Compare clips with what is said in them."""
    rows = read_table(folder / "made" / "train.csv").rows
    exact = words_cut = 0
    brought = wrong = 0
    for row in rows:
        start, end = float(row.cells["start"]), float(row.cells["end"])
        inside = [one for one in said if start - 0.05 < one.start and one.end < end + 0.05]
        words_cut += sum(bool(one.start < edge < one.end) for one in said for edge in (start, end))
        wanted, text = (
            word_keys(words) for words in ([w for one in inside for w in one.words], row.cells["text"].split())
        )
        exact += wanted == text
        brought += len(text)
        wrong += 0 if wanted == text else abs(len(wanted) - len(text)) or 1
    return {
        "clips": len(rows),
        "clips whose text is exactly what is said": exact,
        "sentences cut": words_cut,
        "words in clips": brought,
        "words said": sum(len(one.words) for one in said),
        "words too many or too few": wrong,
        **errors_of_times(folder, said),
    }


def errors_of_times(folder: Path, said: list[Said]) -> dict[str, float]:
    """Differences between the times of words and those of the synthesizer, in seconds."""
    truth = list(_known(said))
    found = [(row.cells["word"], float(row.cells["start"])) for row in read_table(folder / "made" / "words.csv").rows]
    errors = []
    for word, begin in truth:
        near = [abs(time - begin) for other, time in found if other == word and abs(time - begin) < 1.0]
        errors += [min(near)] if near else []
    if not errors:
        return {}
    half, most = np.percentile(errors, [50, 90])
    return {"words timed": len(errors), "median error": round(float(half), 3), "90 %": round(float(most), 3)}


def _known(said: list[Said]) -> Iterator[tuple[str, float]]:
    for one in said:
        yield from ((word, begin) for word, begin in zip(one.words, one.begins) if not np.isnan(begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", default="30")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    said = make(given.folder, given.minutes, given.seed)
    script = str(Path(__file__).resolve().parents[1] / "cli_typer.py")
    words = ["segment", str(given.folder / "talk.flac"), "--model", given.model, "--out", str(given.folder / "made")]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, script, *words, "--longest", given.longest, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - begin
    (outcome,) = json.loads(done.stdout)["recordings"]
    print(json.dumps({"command took": round(seconds, 1), **outcome, **judge(given.folder, said)}, indent=2))


if __name__ == "__main__":
    main()
