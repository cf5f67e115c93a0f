"""The folder of a data set in preparation: its lock, its source, the journal of measurements, and its tables."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from profiles.errors import BadInput, counted
from speech.data.language_codes import code_of
from speech.data.speech_clips import SILENCE, too_few
from speech.recordings.checks import Measures
from speech.recordings.recording import Exclusion, ExclusionReason, Recording
from training.records.run_files import explain, write_atomically
from training.tasks.data_files.splits import SPLITS
from training.tasks.data_files.tables import write_table

_OTHER_FOLDER_HINT = "choose another folder with --out"
FORMS = {"flac": ("flac", "FLAC", "PCM_16"), "opus": ("opus", "OGG", "OPUS"), "wav": ("wav", "WAV", "PCM_16")}
"""File ending, container and encoding by the value of the option."""
LEFT_OUT = "left_out.csv"
_IN_THE_REASON = ("no such file", "no transcript")
"""Details of an exclusion that its reason says already."""
_COLUMNS = ("id", "audio_path", "text", "duration", "speaker", "language")
_LEFT_OUT_COLUMNS = ("id", "reason", "detail", "where", "source", "text")


@dataclass(frozen=True)
class DatasetOrigin:
    """What a folder is made from; a run with the same origin resumes it."""

    source: str
    kind: str
    form: str


class DatasetFolder:
    """Paths inside the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.audio = folder / "audio"
        self.state = folder / ".prepare"
        self.journal = self.state / "journal.jsonl"
        self.partial = self.state / "partial"

    def file_of(self, identity: str, key: str, form: str) -> Path:
        """Return the path of a recording's sound; its name is readable and free of separators."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(identity).stem).strip("-.")[:48]
        return self.audio / f"{readable}{'-' if readable else ''}{key[:12]}.{FORMS[form][0]}"


@contextlib.contextmanager
def open_dataset_folder(folder: Path, origin: DatasetOrigin) -> Iterator[DatasetFolder]:
    """Lock a folder that is new, empty, or prepared from the same source before.

    Raises:
        BadInput: it holds other files, another process works on it, or it cannot be written.
    """
    dataset_folder = DatasetFolder(folder)
    try:
        if folder.is_dir() and not dataset_folder.state.is_dir() and os.listdir(folder):
            raise BadInput(f"{folder}: holds something that 'data prepare' has not made", _OTHER_FOLDER_HINT)
        for path in (dataset_folder.state, dataset_folder.audio):
            path.mkdir(parents=True, exist_ok=True)
        with FileLock(dataset_folder.state / "lock", timeout=0):
            _check_origin(dataset_folder, origin)
            shutil.rmtree(
                dataset_folder.partial, ignore_errors=True
            )  # left by a process that was killed: the lock is ours
            dataset_folder.partial.mkdir()
            try:
                yield dataset_folder
            finally:
                shutil.rmtree(dataset_folder.partial, ignore_errors=True)
    except Timeout as error:
        hint = "wait until it has ended, or stop it with Ctrl-C"
        raise BadInput(f"{folder}: another process is preparing recordings there", hint) from error
    except OSError as error:
        message, _ = explain(error, folder)
        raise BadInput(message, _OTHER_FOLDER_HINT) from error


def _check_origin(dataset_folder: DatasetFolder, origin: DatasetOrigin) -> None:
    path = dataset_folder.state / "origin.json"
    expected = asdict(origin)
    try:
        stored = json.loads(path.read_bytes())
    except FileNotFoundError:
        write_atomically(path, json.dumps(expected).encode())
        return
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: damaged", _OTHER_FOLDER_HINT) from error
    if stored != expected:
        previous = stored if isinstance(stored, dict) else {}
        described = " ".join(str(previous.get(name, "?")) for name in ("source", "kind", "form"))
        raise BadInput(
            f"{dataset_folder.folder}: was prepared from another source or in another form: {described}",
            _OTHER_FOLDER_HINT,
        )


class Journal:
    """Measurements of earlier runs, so that the next one resumes: an append-only file of JSON lines. Not thread-safe.

    Holds measures by key, and detected languages by model and key. A line is written after the sound file that it
    describes. Truncated or invalid lines are ignored.
    """

    def __init__(self, path: Path) -> None:
        self.measures: dict[str, Measures] = {}
        self.languages: dict[tuple[str, str], str] = {}
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    self._load(json.loads(line))
        self._file = path.open("ab")
        if path.stat().st_size:
            self._file.write(b"\n")  # ends a truncated line

    def _load(self, entry: dict[str, object]) -> None:
        key = str(entry["key"])
        if "heard" in entry:
            self.languages[str(entry["model"]), key] = str(entry["heard"])
            return
        values = {field.name: entry[field.name] for field in fields(Measures)}
        measures = Measures(**values)  # type: ignore[arg-type]  # checked below
        if math.isfinite(measures.seconds + measures.loudest + measures.clipped + measures.fetched):
            self.measures[key] = measures

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, key: str, measures: Measures) -> None:
        """Record measurements."""
        self.measures[key] = measures
        self._write({"key": key, **asdict(measures)})

    def add_language(self, model: str, key: str, language: str) -> None:
        """Record the language that a model detected."""
        self.languages[model, key] = language
        self._write({"key": key, "model": model, "heard": language})

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    @property
    def fetched(self) -> int:
        """Bytes that were downloaded for all recordings."""
        return sum(measures.fetched for measures in self.measures.values())


@dataclass(frozen=True)
class SplitSize:
    """Size of one split."""

    clips: int
    hours: float
    speakers: int
    """0 if the source names none."""


@dataclass(frozen=True)
class Result:
    """Result of ``prepare``."""

    folder: Path
    kind: str
    splits: dict[str, SplitSize]
    left_out: dict[str, int]
    """Number of recordings by reason."""
    examples: dict[str, str]
    """One recording for each reason, with its detail."""
    may_pass: int
    """Number of those left out for a transient reason: the same command may get them the next time."""
    notes: list[str]


class AcceptedRecording(NamedTuple):
    """A recording that is in the data set."""

    recording: Recording
    file: Path
    seconds: float


def write_result(
    dataset_folder: DatasetFolder,
    kind: str,
    accepted: Sequence[AcceptedRecording],
    left_out: Sequence[tuple[Recording, Exclusion]],
    notes: Sequence[str],
) -> Result:
    """Write the tables, and remove the sound files that none of them names.

    Raises:
        BadInput: every recording is left out.
    """
    rows = [_left_out_row(recording, exclusion) for recording, exclusion in left_out]
    write_table(dataset_folder.folder / LEFT_OUT, [_LEFT_OUT_COLUMNS, *rows], option="--out")
    reasons = Counter(exclusion.reason.value for _, exclusion in left_out)
    examples: dict[str, str] = {}
    for recording, exclusion in left_out:
        detail = "" if exclusion.detail in _IN_THE_REASON else f": {exclusion.detail}"
        examples.setdefault(exclusion.reason.value, f"{recording.id}{detail}")
    if not accepted:
        each = "; ".join(f"{count} {reason}, such as {examples[reason]}" for reason, count in reasons.most_common())
        message = f"none of {counted(len(left_out), 'recording')} can be used: {each}"
        raise BadInput(message, f"each is in {dataset_folder.folder / LEFT_OUT}, with its reason")
    sizes = {split: size for split in SPLITS if (size := _write_split(dataset_folder, split, accepted))}
    used = {clip.file for clip in accepted}
    for path in dataset_folder.audio.iterdir():
        if path not in used:
            path.unlink(missing_ok=True)
    transient = sum(exclusion.is_transient for _, exclusion in left_out)
    all_notes = [*notes, *_advice(accepted, reasons)]
    return Result(dataset_folder.folder, kind, sizes, dict(reasons.most_common()), examples, transient, all_notes)


def _left_out_row(recording: Recording, exclusion: Exclusion) -> Sequence[str]:
    origin = (recording.location, recording.shown_source)
    return (recording.id, exclusion.reason.value, exclusion.detail, *origin, recording.text)


def _write_split(dataset_folder: DatasetFolder, split: str, accepted: Sequence[AcceptedRecording]) -> SplitSize | None:
    clips = [clip for clip in accepted if clip.recording.split == split]
    if not clips:
        (dataset_folder.folder / f"{split}.csv").unlink(missing_ok=True)
        return None
    silence = [SILENCE] if any(clip.recording.silence for clip in clips) else []
    rows = [[*_COLUMNS, *silence]]
    for recording, file, seconds in clips:
        cells = [recording.id, file.relative_to(dataset_folder.folder).as_posix(), recording.text, f"{seconds:.3f}"]
        cells += [recording.speaker, recording.language, *("yes" if recording.silence else "" for _ in silence)]
        rows.append(cells)
    write_table(dataset_folder.folder / f"{split}.csv", rows, option="--out")
    speakers = {clip.recording.speaker for clip in clips} - {""}
    return SplitSize(len(clips), sum(clip.seconds for clip in clips) / 3600, len(speakers))


def _advice(accepted: Sequence[AcceptedRecording], reasons: Counter[str]) -> list[str]:
    remark = too_few(sum(clip.recording.split == "train" for clip in accepted))
    notes = [remark] if remark else []
    if reasons[ExclusionReason.TOO_LONG.value]:
        notes.append(
            "long recordings become clips with the command 'data segment', at their pauses and with their text"
        )
    texts = [clip.recording.text for clip in accepted]
    if all(text == text.upper() != text.lower() for text in texts):
        notes.append("all transcripts are in capitals, and so would be what a model writes; --lowercase changes them")
    languages = {clip.recording.language for clip in accepted}
    if unknown := sorted(name for name in languages if name and not code_of(name)):
        notes.append(f"Whisper knows no language {', '.join(map(repr, unknown))}: correct the column before you train")
    return notes
