"""Make ``examples/spoken_commands``: short spoken clips of numbers and commands by many synthetic voices.

    sudo apt-get install espeak-ng flite festival festvox-kallpc16k festvox-kdlpc16k festvox-us-slt-hts
    pip install ttspico==0.3.2
    python examples/make_spoken_commands.py --output examples/spoken_commands

Who speaks in which split, and how: ``synthetic_voices.py``.
"""

from __future__ import annotations

import argparse
import csv
import zlib
from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import soundfile
from synthetic_voices import RATE, Clip, Room, draw_speakers, espeak_voices, record, speak, speaker_of

LONGEST = 1.85
"""Seconds of speech: with the margins it fits the small model's window of 2 s."""
ROOM = Room(noisy=0.35, snr=(18, 38))

WORDS = (
    "zero one two three four five six seven eight nine "
    "yes no on off up down left right start stop open close light door"
).split()

WORD_GAP = 6
"""Pause between espeak-ng's words in units of 10 ms: commands are spoken one by one, not run together."""

CLIPS = {"train": 3_880, "validation": 240, "test": 480}

TRAINING_SHARE = 0.35
"""Share of the training clips spoken by recorded people; in the test split every voice has the same share."""


def plan_split(split: str, count: int) -> list[Clip]:
    """Choose voice, words, pace and pitch of every clip of a split; words and voices are balanced."""
    rng = np.random.default_rng(zlib.crc32(split.encode()))
    speakers, variants = draw_speakers()[split], espeak_voices(split)
    share = {"train": TRAINING_SHARE, "validation": 0.0, "test": 1 / (len(variants) + 1)}[split]
    voices = list(islice(cycle(speakers), round(count * share)))
    voices += [(voice, 1.0) for voice in islice(cycle(variants), count - len(voices))]
    words = word_stream(rng)
    clips = []
    for number, (voice, warp) in enumerate(voices):
        text = " ".join(islice(words, int(rng.choice([1, 2, 3], p=[0.3, 0.4, 0.3]))))
        pace, pitch = rng.uniform(0.75, 1.15), rng.uniform(-1, 1)
        name = voice if voice.startswith("espeak") else f"{voice}-{warp:.2f}"
        clips.append(Clip(f"{split}-{number:04d}", split, name, text, warp, pace, pitch, WORD_GAP))
    return clips


def word_stream(rng: np.random.Generator) -> Iterable[str]:
    """All words again and again, each time in another order."""
    while True:
        yield from rng.permutation(WORDS).tolist()


def write_split(split: str, clips: Sequence[Clip], output: Path) -> None:
    """Write a split's clips (Ogg Opus, about 11 kbit/s) and its CSV."""
    rows = []
    for clip in clips:
        samples = record(clip, clips, ROOM).samples
        path = Path("audio", split, clip.voice, f"{clip.id}.opus")
        (output / path).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(output / path, samples, RATE, format="OGG", subtype="OPUS", compression_level=1.0)
        rows.append(
            [clip.id, path.as_posix(), clip.text, f"{len(samples) / RATE:.2f}", clip.voice, speaker_of(clip.voice)]
        )
    with (output / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "audio_path", "text", "duration", "voice", "speaker"])
        writer.writerows(rows)


def main() -> None:
    """Make all splits."""
    parser = argparse.ArgumentParser(description="Make the spoken-commands data set.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    output: Path = parser.parse_args().output
    for split, count in CLIPS.items():
        clips = speak(plan_split(split, count), LONGEST)
        write_split(split, clips, output)
        print(f"{split}: {len(clips)} clips of {len({clip.voice for clip in clips})} voices")


if __name__ == "__main__":
    main()
