"""Long recordings to a data set folder: clips, ``train.csv``, ``words.csv``, and ``left_out.csv`` with the reasons.

The folder appears whole or not at all. It is built beside its place, recording by recording; a second start goes on
after the last recording that is whole there, if nothing it depends on has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from filelock import FileLock, Timeout

from profiles.errors import BadInput
from training.recordings.segments.cutting import SegmentOptions
from training.recordings.segments.hearing import Hearer
from training.recordings.segments.recording import Segments, batches, segment_recording
from training.recordings.segments.transcript import ENDINGS, read_transcript
from training.run_files import write_whole
from training.tasks.audio import RATE
from training.tasks.base import Progress
from training.tasks.sound_containers import SOUND_ENDINGS
from training.tasks.sound_file import AudioError
from training.tasks.speech_clips import FileSource
from training.tasks.stored_files import without_hidden
from training.tasks.tables import csv_lines

COLUMNS = ("id", "audio_path", "text", "duration", "speaker", "source", "start", "end", "agreement")
LEFT_OUT = ("source", "start", "end", "reason", "agreement", "text", "heard")
WORDS = ("id", "word", "start", "end")
Hear = Callable[[], Hearer]


@dataclass(frozen=True)
class Source:
    """A recording, and its transcript where there is one."""

    name: str
    """What its clips and its speaker are called by."""
    path: Path
    transcript: Path | None


@dataclass(frozen=True)
class RecordingResult:
    """What became of one recording."""

    name: str
    seconds: float = 0.0
    clips: int = 0
    clip_seconds: float = 0.0
    reasons: dict[str, int] | None = None
    """Segments left out by reason."""
    transcript_words: int = 0
    given_words: int = 0
    error: str = ""
    """Why the recording could not be used at all."""
    damage: str = ""
    """Why it could not be read to its end; what comes before is used."""


def sources_of(recording: Path, transcript: Path | None) -> list[Source]:
    """Return a recording, or all of a folder, with their transcripts: the one given, or files beside of the same name.

    Raises:
        BadInput: not there, or no recording in the folder.
    """
    if not recording.is_dir():
        if not recording.exists():
            raise BadInput(f"recording {recording}: not there", "name a sound file or a folder of them")
        return [Source(_plain(recording.stem), recording, transcript or _beside(recording))]
    if transcript is not None:
        raise BadInput(f"{recording} is a folder", "put each transcript beside its recording: name.wav, name.txt")
    found = sorted(
        path for path in without_hidden(recording.iterdir()) if path.suffix.lower() in SOUND_ENDINGS and path.is_file()
    )
    if not found:
        raise BadInput(f"{recording}: no recordings in this folder", f"known endings: {', '.join(SOUND_ENDINGS)}")
    often = Counter(_plain(path.stem).casefold() for path in found)
    names = [path.stem if often[_plain(path.stem).casefold()] == 1 else path.name for path in found]
    return [Source(_plain(name), path, _beside(path)) for name, path in zip(names, found)]


def _plain(name: str) -> str:
    """A name that any file system takes and no spreadsheet changes."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._-")[:80] or "recording"


def _beside(recording: Path) -> Path | None:
    """Return ``talk.txt`` beside ``talk.wav``, or ``talk.en.vtt``, ``talk.wav.srt`` as downloaders and Whisper write.

    Raises:
        BadInput: there are several of those.
    """
    if (exact := next((path for end in ENDINGS if (path := recording.with_suffix(end)).is_file()), None)) is not None:
        return exact
    name_pattern = re.compile(
        rf"{re.escape(recording.stem)}(\.([a-z]{{2,3}}(-\w+)?|{re.escape(recording.suffix[1:])}))?", re.I
    )
    candidates = [
        path
        for path in sorted(without_hidden(recording.parent.iterdir()))
        if path.suffix.lower() in ENDINGS and name_pattern.fullmatch(path.stem)
    ]
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates)
        raise BadInput(f"recording {recording}: which is its transcript? There are {names}", "keep or name one of them")
    return candidates[0] if candidates else None


def segment_all(
    sources: Sequence[Source],
    folder: Path,
    model: str,
    hear: Hear,
    language: str,
    options: SegmentOptions,
    progress: Callable[[str], Progress],
) -> list[RecordingResult]:
    """Make a data set folder of recordings.

    Args:
        model: names the model, so that a second start knows whether it is the same.
        hear: loads the model, when it is needed for the first time.
        language: code of the language, for where a word ends in a transcript; empty: one that sets words apart.
        progress: gives for a recording's name who is told how far it is.

    Raises:
        BadInput: the folder is there already or cannot be written, or a transcript cannot be used.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is there already", "name a new folder, or remove it")
    aside = folder.with_name(folder.name + ".partial")
    try:
        aside.mkdir(parents=True, exist_ok=True)
        with FileLock(aside / "lock", timeout=0):
            outcomes = [
                once(source, aside, [model, language, asdict(options)],
                      partial(_segment, source, aside, hear, language, options, progress(source.name)))
                for source in sources
            ]  # fmt: skip
            _write_tables(aside, sources)
        _into_place(aside, folder)
    except Timeout:
        raise BadInput(f"{folder}: another process is making it", "wait until it is done") from None
    except OSError as error:
        raise BadInput(f"{folder}: {error.strerror or error}", "choose another folder, or free some space") from error
    return outcomes


_NOTED = ("key", "outcome", "train", "left_out", "words")
"""What a note of a recording holds."""


def once(source: Source, aside: Path, settings: Sequence[Any], make: Callable[[], dict[str, Any]]) -> RecordingResult:
    """Return what became of a recording: from an earlier start, or made now."""
    stamps = [FileSource(path).stamp() for path in (source.path, source.transcript) if path is not None]
    key = hashlib.sha256(json.dumps([*settings, *stamps]).encode()).hexdigest()
    note = aside / "done" / f"{source.name}.json"
    known = _noted(note)
    if known.get("key") != key:
        note.unlink(missing_ok=True)  # of another model, transcript or recording
        known = {**make(), "key": key}
        if not known["outcome"]["error"]:
            note.parent.mkdir(exist_ok=True)
            write_whole(note, json.dumps(known).encode())
    return RecordingResult(**known["outcome"])


def _noted(note: Path) -> dict[str, Any]:
    """Return what an earlier start noted of a recording; nothing where that is damaged, so that it is made anew."""
    if not note.is_file():
        return {}
    try:
        known = json.loads(note.read_bytes())
        return known if {*_NOTED} <= known.keys() else {}
    except (ValueError, RecursionError, AttributeError):
        return {}


def _segment(
    source: Source, aside: Path, hear: Hear, language: str, options: SegmentOptions, progress: Progress
) -> dict[str, Any]:
    """Segment one recording and write its clips; return what the tables and the report need."""
    transcript = read_transcript(source.transcript, language) if source.transcript else None
    try:
        listener = hear() if transcript or options.draft else None
        found = segment_recording(source.path, transcript, listener, options, progress)
        rows = _write_clips(source, found, aside, progress)
    except AudioError as error:
        return {"outcome": asdict(RecordingResult(source.name, error=str(error)))}
    outcome = RecordingResult(
        source.name,
        found.seconds,
        len(found.kept),
        sum(segment.stretch.seconds for segment in found.kept),
        dict(Counter(segment.reason for segment in found.left_out)),
        found.transcript_words,
        found.given_words,
        damage=found.damage,
    )
    left_out = [
        [source.path.name, *_times(*one.stretch), one.reason, f"{one.agreement:.3f}", one.text, one.heard]
        for one in found.left_out
    ]
    words = [
        [row[0], word.text, *_times(word.start, word.end)]
        for row, segment in zip(rows, found.kept)
        for word in segment.words
    ]
    return {"outcome": asdict(outcome), "train": rows, "left_out": left_out, "words": words}


def _times(*seconds: float) -> list[str]:
    return [f"{second:.3f}" for second in seconds]


def _write_clips(source: Source, found: Segments, aside: Path, progress: Progress) -> list[list[str]]:
    """Write the clips of what is kept, as FLAC of 16 bits, and return their rows."""
    rows: list[list[str]] = []
    folder = aside / "clips" / source.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kept = found.kept
    sounds = (samples for _, some in batches(source.path, [one.stretch for one in kept]) for samples in some)
    for number, (segment, samples) in enumerate(zip(kept, sounds), 1):
        identity = f"{source.name}-{number:05d}"
        path = folder / f"{identity}.flac"
        soundfile.write(str(path), np.clip(samples, -1, 1), RATE, subtype="PCM_16")
        times = _times(len(samples) / RATE, *segment.stretch)
        agreement = f"{segment.agreement:.3f}" if found.transcript_words else ""
        rows.append([identity, str(path.relative_to(aside)), segment.text, times[0], source.name, source.path.name,
                     *times[1:], agreement])  # fmt: skip
        progress("writing clips", number, len(kept))
    return rows


def _write_tables(aside: Path, sources: Sequence[Source]) -> None:
    notes = [aside / "done" / f"{source.name}.json" for source in sources]
    done = [found for note in notes if (found := _noted(note))]
    for name, columns in (("train", COLUMNS), ("left_out", LEFT_OUT), ("words", WORDS)):
        rows = (row for one in done for row in one[name])
        (aside / f"{name}.csv").write_bytes(csv_lines([columns, *rows], end="\r\n"))


def _into_place(aside: Path, folder: Path) -> None:
    """Let the folder appear; what only a second start would need goes."""
    kept = {path.name for path in (aside / "done").glob("*.json")} if (aside / "done").is_dir() else set()
    for clips in (aside / "clips").glob("*") if (aside / "clips").is_dir() else ():
        if f"{clips.name}.json" not in kept:
            shutil.rmtree(clips)
    shutil.rmtree(aside / "done", ignore_errors=True)
    (aside / "lock").unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()
    os.replace(aside, folder)
