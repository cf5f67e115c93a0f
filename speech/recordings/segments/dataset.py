"""``segment``: long recordings become a data set folder with clips, ``train.csv``, ``words.csv`` and ``left_out.csv``.

The folder appears complete or not at all. It is built under a name of its own, recording by recording; a second start
resumes after the last complete recording, if nothing that it depends on has changed.
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
from speech.data.audio import RATE
from speech.data.sound_containers import SOUND_ENDINGS
from speech.data.sound_file import AudioError
from speech.data.speech_clips import FileSource
from speech.recordings.segments.cutting import SegmentOptions
from speech.recordings.segments.recording import Segment, SegmentedRecording, batches, segment_recording
from speech.recordings.segments.transcribing import TimedTranscriber
from speech.recordings.segments.transcript import ENDINGS, read_transcript
from training.records.run_files import write_atomically
from training.tasks.base import Progress
from training.tasks.data_files.splits import without_hidden
from training.tasks.data_files.tables import csv_lines

COLUMNS = ("id", "audio_path", "text", "duration", "speaker", "source", "start", "end", "agreement")
LEFT_OUT = ("source", "start", "end", "reason", "agreement", "text", "heard")
WORDS = ("id", "word", "start", "end")
LoadTranscriber = Callable[[], TimedTranscriber]


@dataclass(frozen=True)
class RecordingSource:
    """A long recording and its transcript, if it has one."""

    name: str
    """Prefix of its clips' names, and its speaker."""
    path: Path
    transcript: Path | None


@dataclass(frozen=True)
class RecordingResult:
    """What one recording became."""

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
    """Why it could not be read to its end; the sound before that is used."""


def find_sources(recording: Path, transcript: Path | None) -> list[RecordingSource]:
    """Return a recording, or all of a folder, with their transcripts: the one given, or files of the same name.

    Raises:
        BadInput: the recording does not exist, or the folder holds none.
    """
    if not recording.is_dir():
        if not recording.exists():
            raise BadInput(f"recording {recording}: not there", "name a sound file or a folder of them")
        return [RecordingSource(_safe_name(recording.stem), recording, transcript or _find_transcript(recording))]
    if transcript is not None:
        raise BadInput(f"{recording} is a folder", "put each transcript beside its recording: name.wav, name.txt")
    paths = sorted(
        path for path in without_hidden(recording.iterdir()) if path.suffix.lower() in SOUND_ENDINGS and path.is_file()
    )
    if not paths:
        raise BadInput(f"{recording}: no recordings in this folder", f"known endings: {', '.join(SOUND_ENDINGS)}")
    counts_by_name = Counter(_safe_name(path.stem).casefold() for path in paths)
    names = [path.stem if counts_by_name[_safe_name(path.stem).casefold()] == 1 else path.name for path in paths]
    return [RecordingSource(_safe_name(name), path, _find_transcript(path)) for name, path in zip(names, paths)]


def _safe_name(name: str) -> str:
    """Return a name that is valid in any file system and that no spreadsheet changes."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._-")[:80] or "recording"


def _find_transcript(recording: Path) -> Path | None:
    """Return ``talk.txt`` next to ``talk.wav``, or ``talk.en.vtt``, ``talk.wav.srt`` as downloaders and Whisper write.

    Raises:
        BadInput: several files match.
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
    sources: Sequence[RecordingSource],
    folder: Path,
    model: str,
    load_transcriber: LoadTranscriber,
    language: str,
    options: SegmentOptions,
    progress: Callable[[str], Progress],
) -> list[RecordingResult]:
    """Make a data set folder of recordings.

    Args:
        model: identifies the model, so that a second start sees whether it is the same.
        load_transcriber: loads the model; called when it is needed for the first time.
        language: code of the language, for how words are divided; empty: one with spaces between words.
        progress: returns the progress callback for a recording's name.

    Raises:
        BadInput: the folder exists and is not empty, or cannot be written, or a transcript cannot be used.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is there already", "name a new folder, or remove it")
    partial_folder = folder.with_name(folder.name + ".partial")
    try:
        partial_folder.mkdir(parents=True, exist_ok=True)
        with FileLock(partial_folder / "lock", timeout=0):
            outcomes = [
                segment_once(source, partial_folder, [model, language, asdict(options)],
                             partial(_segment, source, partial_folder, load_transcriber, language, options,
                                     progress(source.name)))
                for source in sources
            ]  # fmt: skip
            _write_tables(partial_folder, sources)
        _publish(partial_folder, folder)
    except Timeout:
        raise BadInput(f"{folder}: another process is making it", "wait until it is done") from None
    except OSError as error:
        raise BadInput(f"{folder}: {error.strerror or error}", "choose another folder, or free some space") from error
    return outcomes


_NOTE_KEYS = ("key", "outcome", "train", "left_out", "words")
"""Keys of the note that is kept of a finished recording."""


def segment_once(
    source: RecordingSource, partial_folder: Path, settings: Sequence[Any], make: Callable[[], dict[str, Any]]
) -> RecordingResult:
    """Return the result of a recording: that of an earlier start, or that of ``make``."""
    stamps = [FileSource(path).stamp() for path in (source.path, source.transcript) if path is not None]
    key = hashlib.sha256(json.dumps([*settings, *stamps]).encode()).hexdigest()
    note_path = partial_folder / "done" / f"{source.name}.json"
    note = _read_note(note_path)
    if note.get("key") != key:
        note_path.unlink(missing_ok=True)  # of another model, transcript or recording
        note = {**make(), "key": key}
        if not note["outcome"]["error"]:
            note_path.parent.mkdir(exist_ok=True)
            write_atomically(note_path, json.dumps(note).encode())
    return RecordingResult(**note["outcome"])


def _read_note(note_path: Path) -> dict[str, Any]:
    """Return the note of an earlier start; empty if it is missing or damaged, so that the recording is made anew."""
    if not note_path.is_file():
        return {}
    try:
        note = json.loads(note_path.read_bytes())
        return note if {*_NOTE_KEYS} <= note.keys() else {}
    except (ValueError, RecursionError, AttributeError):
        return {}


def _segment(
    source: RecordingSource,
    partial_folder: Path,
    load_transcriber: LoadTranscriber,
    language: str,
    options: SegmentOptions,
    progress: Progress,
) -> dict[str, Any]:
    """Segment one recording and write its clips; return its note: rows of the tables and the result."""
    transcript = read_transcript(source.transcript, language) if source.transcript else None
    try:
        transcriber = load_transcriber() if transcript or options.draft else None
        segmented = segment_recording(source.path, transcript, transcriber, options, progress)
        rows = _write_clips(source, segmented, partial_folder, progress)
    except AudioError as error:
        return {"outcome": asdict(RecordingResult(source.name, error=str(error)))}
    outcome = RecordingResult(
        source.name,
        segmented.seconds,
        len(segmented.accepted),
        sum(segment.span.seconds for segment in segmented.accepted),
        dict(Counter(segment.reason for segment in segmented.left_out)),
        segmented.transcript_words,
        segmented.matched_words,
        damage=segmented.damage,
    )
    left_out = [[source.path.name, *_left_out_cells(segment)] for segment in segmented.left_out]
    words = [
        [row[0], word.text, *_times(word.start, word.end)]
        for row, segment in zip(rows, segmented.accepted)
        for word in segment.words
    ]
    return {"outcome": asdict(outcome), "train": rows, "left_out": left_out, "words": words}


def _left_out_cells(segment: Segment) -> list[str]:
    return [*_times(*segment.span), segment.reason, f"{segment.agreement:.3f}", segment.text, segment.heard]


def _times(*seconds: float) -> list[str]:
    return [f"{second:.3f}" for second in seconds]


def _write_clips(
    source: RecordingSource, segmented: SegmentedRecording, partial_folder: Path, progress: Progress
) -> list[list[str]]:
    """Write the clips of the accepted segments as 16-bit FLAC, and return their rows of ``train.csv``."""
    rows: list[list[str]] = []
    folder = partial_folder / "clips" / source.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    accepted = segmented.accepted
    spans = [segment.span for segment in accepted]
    sounds = (samples for _, batch in batches(source.path, spans) for samples in batch)
    for number, (segment, samples) in enumerate(zip(accepted, sounds), 1):
        identity = f"{source.name}-{number:05d}"
        path = folder / f"{identity}.flac"
        soundfile.write(str(path), np.clip(samples, -1, 1), RATE, subtype="PCM_16")
        times = _times(len(samples) / RATE, *segment.span)
        agreement = f"{segment.agreement:.3f}" if segmented.transcript_words else ""
        rows.append([identity, str(path.relative_to(partial_folder)), segment.text, times[0], source.name,
                     source.path.name, *times[1:], agreement])  # fmt: skip
        progress("writing clips", number, len(accepted))
    return rows


def _write_tables(partial_folder: Path, sources: Sequence[RecordingSource]) -> None:
    note_paths = [partial_folder / "done" / f"{source.name}.json" for source in sources]
    notes = [note for note_path in note_paths if (note := _read_note(note_path))]
    for name, columns in (("train", COLUMNS), ("left_out", LEFT_OUT), ("words", WORDS)):
        rows = (row for note in notes for row in note[name])
        (partial_folder / f"{name}.csv").write_bytes(csv_lines([columns, *rows], end="\r\n"))


def _publish(partial_folder: Path, folder: Path) -> None:
    """Rename the finished folder to its final name, without the files that only a second start would need."""
    noted_names = (
        {path.name for path in (partial_folder / "done").glob("*.json")}
        if (partial_folder / "done").is_dir()
        else set()
    )
    for clips in (partial_folder / "clips").glob("*") if (partial_folder / "clips").is_dir() else ():
        if f"{clips.name}.json" not in noted_names:
            shutil.rmtree(clips)
    shutil.rmtree(partial_folder / "done", ignore_errors=True)
    (partial_folder / "lock").unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()
    os.replace(partial_folder, folder)
