"""Make a data set of spoken sentences: 3 to 12 words with numbers and names, several synthesizers, noise, 8 to 48 kHz.

    sudo apt-get install espeak-ng flite festival
    .venv/bin/python examples/make_sentences.py sentences --clips 600

What ``spoken_commands`` is not: open vocabulary, running speech, files as different devices write them. Sentences are
put together from word lists of our own, so they are free of any licence. The same people and voices are in the test
split as there (``synthetic_voices.py``), so that nobody is heard in training and tested on the other data set. The same
seed, size and packages give the same files; a synthesizer that is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import soundfile
import soxr
from synthetic_voices import (
    RATE,
    SPEAKERS,
    Clip,
    Recording,
    Room,
    draw_speakers,
    espeak_voices,
    installed_voices,
    record,
    speak,
    speaker_of,
)

SHARES = {"train": 0.7, "validation": 0.1, "test": 0.2}
PEOPLE = 0.5
"""Share of the clips spoken by recorded people, in splits that have some."""
LONGEST = 10.0
"""Seconds of speech."""
ROOM = Room(noisy=0.6, snr=(5, 30), echoing=0.2)
RATES = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
"""Sampling rates of the files in Hz."""
FORMATS = ("flac", "wav", "mp3")
COLUMNS = ["id", "audio_path", "text", "speaker", "voice", "snr", "rate", "duration"]
NAMES = (
    "Alice Anna Arthur Ben Carla Clara Daniel David Diana Edgar Emma Eva Felix Frank Grace Hannah Harry Helen Ida Jack "
    "James Julia Karl Kate Laura Leo Linda Lucas Maria Martin Max Mia Nina Oliver Oscar Paula Peter Rachel Robert Rosa "
    "Ruth Samuel Sarah Simon Sophie Thomas Tim Victor Walter William"
).split()
PLACES = (
    "Berlin Boston Bristol Cairo Chicago Dallas Denver Dublin Geneva Glasgow Hamburg Lisbon London Madrid Melbourne "
    "Milan Montreal Munich Naples Oslo Oxford Paris Prague Rome Seattle Sydney Tokyo Toronto Vienna Warsaw"
).split()
THINGS = (
    "apples bags bicycles books bottles boxes cameras candles chairs clocks coats cups doors eggs flowers gloves hats "
    "keys lamps letters maps mirrors paintings pencils pictures plates radios rings shirts shoes spoons stamps tables "
    "tickets towels trees umbrellas watches windows"
).split()
KINDS = (
    "black blue broken brown cheap clean cold empty expensive golden green grey heavy large little long new old plain "
    "red round short silver simple small soft strange strong thin white wide yellow"
).split()
DID = (
    "bought borrowed brought carried counted found gave lost made ordered painted sold sent stored took washed".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SHAPES = (
    "Please call {name}",
    "{name} lives in {place}",
    "{name} {did} {count} {things}",
    "Where are the {kind} {things}",
    "{name} and {name} live in {place}",
    "The {things} cost {count} dollars",
    "Turn left after {count} {kind} houses",
    "{name} {did} the {kind} {things} on {day}",
    "{name} will be {age} in {month}",
    "The train to {place} leaves at {hour} {minute}",
    "{name} {did} {count} {kind} {things} in {place}",
    "Tell {name} that room {count} is not free today",
    "On {day} {name} met {count} friends from {place}",
    "There are {count} {kind} {things} and {age} {kind} {things} here",
    "{name} {did} {age} {things} for {name} on {day} in {place}",
    "We need {count} {kind} {things} before the end of {month} says {name}",
    "It was {day} the {date} of {month} when {name} left {place}",
)
"""Patterns of sentences; each name in braces is a draw of its own."""


def a_part(kind: str, rng: random.Random) -> str:
    """Draw what stands for a name in braces."""
    lists = {"name": NAMES, "place": PLACES, "things": THINGS, "kind": KINDS, "did": DID, "day": DAYS, "month": MONTHS}
    if kind in lists:
        return rng.choice(lists[kind])
    if kind == "count":
        least, most, unit = rng.choice([(2, 20, 1), (21, 99, 1), (100, 999, 1), (1, 9, 1000)])
        return str(rng.randint(least, most) * unit)
    if kind == "date":
        number = rng.randint(1, 31)
        return f"{number}{'th' if 10 < number < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
    least, most = {"age": (2, 90), "hour": (1, 12), "minute": (10, 59)}[kind]
    return str(rng.randint(least, most))


def sentences(rng: random.Random) -> Iterator[str]:
    """All patterns again and again, each time in another order and with other words."""
    while True:
        for shape in rng.sample(SHAPES, len(SHAPES)):
            yield re.sub(r"\{(\w+)\}", lambda found: a_part(found[1], rng), shape) + "."


def plan_split(split: str, total: int, seed: int, installed: set[str]) -> list[Clip]:
    """Choose voice, sentence, pace and pitch of every clip of a split (``total``: of all splits together); voices that
    are not installed are left out."""
    rng = random.Random(f"{seed} {split}")
    people = [(voice, warp) for voice, warp in draw_speakers()[split] if voice in installed]
    synthetic = [(voice, 1.0) for voice in espeak_voices(split)] if "espeak" in installed else []
    count = max(1, round(total * SHARES[split]))
    spoken = [*islice(cycle(people), round(count * PEOPLE) if synthetic else count)] if people else []
    spoken += [*islice(cycle(synthetic), count - len(spoken))]
    texts = sentences(rng)
    clips = []
    for number, (voice, warp) in enumerate(spoken):
        name = voice if voice.startswith("espeak") else f"{voice}-{warp:.2f}"
        identity = f"{split}-{seed}-{number:04d}"
        clips.append(Clip(identity, split, name, next(texts), warp, rng.uniform(0.85, 1.1), rng.uniform(-1, 1)))
    return clips


def left_out(installed: set[str]) -> list[str]:
    """Return the voices that are wanted and not installed."""
    wanted = {"espeak", *(voice for voices in SPEAKERS.values() for voice in voices)}
    return sorted(wanted - installed)


def write_clip(clip: Clip, recording: Recording, folder: Path) -> list[str]:
    """Write one file at one of the rates, in one of the formats, and return its row of the table."""
    rng = random.Random(zlib.crc32(clip.id.encode()))
    rate, suffix = rng.choice(RATES), rng.choice(FORMATS)
    path = Path("audio", clip.split, f"{clip.id}.{suffix}")
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    samples = soxr.resample(recording.samples, RATE, rate)
    soundfile.write(folder / path, samples.clip(-1, 1), rate)
    snr = "" if recording.snr is None else f"{recording.snr:.1f}"
    duration = f"{len(samples) / rate:.2f}"
    return [clip.id, path.as_posix(), clip.text, speaker_of(clip.voice), clip.voice, snr, str(rate), duration]


def write_split(split: str, clips: Sequence[Clip], folder: Path) -> None:
    """Write the files of a split, and its table."""
    rows = [write_clip(clip, record(clip, clips, ROOM), folder) for clip in clips]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])


def make(folder: Path, total: int, seed: int = 0, tell: bool = True) -> None:
    """Make all splits, ``total`` clips in all, that somebody installed can speak.

    Raises:
        SystemExit: no synthesizer is installed.
    """
    installed = installed_voices()
    if not installed:
        raise SystemExit("error: no synthesizer is installed (apt-get install espeak-ng)")
    if tell and left_out(installed):
        print(f"not installed and left out: {', '.join(left_out(installed))}")
    for split in SHARES:
        clips = speak(plan_split(split, total, seed, installed), LONGEST)
        if not clips:
            continue
        write_split(split, clips, folder)
        if tell:
            print(f"{split}: {len(clips)} clips of {len({speaker_of(clip.voice) for clip in clips})} speakers")


def main() -> None:
    """Make the data set."""
    parser = argparse.ArgumentParser(description="Make a data set of spoken sentences.")
    parser.add_argument("folder", type=Path, help="to write to: new, or empty")
    parser.add_argument("--clips", type=int, default=600, help="of all splits together (600)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.clips < 1:
        parser.error("--clips must be at least 1")
    if arguments.folder.exists() and (not arguments.folder.is_dir() or any(arguments.folder.iterdir())):
        parser.error(f"{arguments.folder} is there already: give a new folder")
    make(arguments.folder, arguments.clips, arguments.seed)


if __name__ == "__main__":
    main()
