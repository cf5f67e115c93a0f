"""The folder that is being filled: held by one process, the same source every time; what was measured; its tables."""

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
from training.recordings.checks import Measures
from training.recordings.recording import ExclusionReason, Fault, Recording
from training.run_files import explain, write_whole
from training.tasks.language_codes import code_of
from training.tasks.speech_clips import SILENCE, SPLITS
from training.tasks.tables import write_table

_ELSEWHERE = "choose another folder with --out"
FORMS = {"flac": ("flac", "FLAC", "PCM_16"), "opus": ("opus", "OGG", "OPUS"), "wav": ("wav", "WAV", "PCM_16")}
"""Ending, container and coding by the name of the option."""
LEFT_OUT = "left_out.csv"
_COLUMNS = ("id", "audio_path", "text", "duration", "speaker", "language")
_LEFT_OUT_COLUMNS = ("id", "reason", "detail", "where", "source", "text")


@dataclass(frozen=True)
class DatasetOrigin:
    """What a folder is made from; another run with the same goes on with it."""

    source: str
    kind: str
    form: str


class Workplace:
    """Paths inside the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.audio = folder / "audio"
        self.own = folder / ".prepare"
        self.journal = self.own / "journal.jsonl"
        self.partial = self.own / "partial"

    def file_of(self, identity: str, key: str, form: str) -> Path:
        """Return where the sound of a recording lies: its name can be read, and holds nothing that a path means."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(identity).stem).strip("-.")[:48]
        return self.audio / f"{readable}{'-' if readable else ''}{key[:12]}.{FORMS[form][0]}"


@contextlib.contextmanager
def open_workplace(folder: Path, origin: DatasetOrigin) -> Iterator[Workplace]:
    """Hold a folder: a new or empty one, or one that was prepared from the same source before.

    Raises:
        BadInput: it holds something else, another process works on it, or it cannot be written.
    """
    place = Workplace(folder)
    try:
        if folder.is_dir() and not place.own.is_dir() and os.listdir(folder):
            raise BadInput(f"{folder}: holds something that 'prepare' has not made", _ELSEWHERE)
        for path in (place.own, place.audio):
            path.mkdir(parents=True, exist_ok=True)
        with FileLock(place.own / "lock", timeout=0):
            _keep_to_origin(place, origin)
            shutil.rmtree(place.partial, ignore_errors=True)  # left by a process that was killed: the lock is ours
            place.partial.mkdir()
            try:
                yield place
            finally:
                shutil.rmtree(place.partial, ignore_errors=True)
    except Timeout as error:
        hint = "wait until it has ended, or stop it with Ctrl-C"
        raise BadInput(f"{folder}: another process is preparing recordings there", hint) from error
    except OSError as error:
        message, _ = explain(error, folder)
        raise BadInput(message, _ELSEWHERE) from error


def _keep_to_origin(place: Workplace, origin: DatasetOrigin) -> None:
    path = place.own / "origin.json"
    wanted = asdict(origin)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        write_whole(path, json.dumps(wanted).encode())
        return
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: damaged", _ELSEWHERE) from error
    if found != wanted:
        known = found if isinstance(found, dict) else {}
        was = " ".join(str(known.get(name, "?")) for name in ("source", "kind", "form"))
        raise BadInput(f"{place.folder}: was prepared from another source or in another form: {was}", _ELSEWHERE)


class Journal:
    """What an earlier run has measured, so that the next one goes on: lines of JSON that are only added. One thread's.

    Measures by key, and languages heard by model and key. A line is written after the sound file that it tells of. One
    that was cut short, or that no version of this program wrote, counts as not written.
    """

    def __init__(self, path: Path) -> None:
        self.measures: dict[str, Measures] = {}
        self.heard: dict[tuple[str, str], str] = {}
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    self._take(json.loads(line))
        self._file = path.open("ab")
        if path.stat().st_size:
            self._file.write(b"\n")  # ends a line that was cut short

    def _take(self, entry: dict[str, object]) -> None:
        key = str(entry["key"])
        if "heard" in entry:
            self.heard[str(entry["model"]), key] = str(entry["heard"])
            return
        values = {field.name: entry[field.name] for field in fields(Measures)}
        found = Measures(**values)  # type: ignore[arg-type]  # looked at below
        if math.isfinite(found.seconds + found.loudest + found.clipped + found.fetched):
            self.measures[key] = found

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def add(self, key: str, measures: Measures) -> None:
        """Remember what was measured."""
        self.measures[key] = measures
        self._write({"key": key, **asdict(measures)})

    def add_language(self, model: str, key: str, heard: str) -> None:
        """Remember the language that a model heard."""
        self.heard[model, key] = heard
        self._write({"key": key, "model": model, "heard": heard})

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    @property
    def fetched(self) -> int:
        """Bytes that came over the network for all of them."""
        return sum(measures.fetched for measures in self.measures.values())


@dataclass(frozen=True)
class SplitSize:
    """What one split holds."""

    clips: int
    hours: float
    speakers: int
    """0 if none is known."""


@dataclass(frozen=True)
class Result:
    """What became of a source."""

    folder: Path
    kind: str
    splits: dict[str, SplitSize]
    left_out: dict[str, int]
    """Recordings by reason."""
    examples: dict[str, str]
    """One recording of every reason, with its detail."""
    may_pass: int
    """Of those left out: how many the same command may get the next time."""
    notes: list[str]


class KeptRecording(NamedTuple):
    """A recording that is in the data set."""

    recording: Recording
    file: Path
    seconds: float


def write_result(
    place: Workplace,
    kind: str,
    kept: Sequence[KeptRecording],
    left_out: Sequence[tuple[Recording, Fault]],
    notes: Sequence[str],
) -> Result:
    """Write the tables and remove the sound files that none of them names.

    Raises:
        BadInput: nothing is kept.
    """
    rows = [(one.id, why.reason.value, why.detail, one.where, one.shown_source, one.text) for one, why in left_out]
    write_table(place.folder / LEFT_OUT, [_LEFT_OUT_COLUMNS, *rows], option="--out")
    reasons = Counter(fault.reason.value for _, fault in left_out)
    examples: dict[str, str] = {}
    for recording, fault in left_out:
        examples.setdefault(fault.reason.value, f"{recording.id}: {fault.detail}")
    if not kept:
        reason, count = reasons.most_common(1)[0]
        message = f"none of {counted(len(left_out), 'recording')} is left; {count}: {reason} ({examples[reason]})"
        raise BadInput(message, f"all reasons are in {place.folder / LEFT_OUT}")
    sizes = {split: size for split in SPLITS if (size := _write_split(place, split, kept))}
    used = {one.file for one in kept}
    for path in place.audio.iterdir():
        if path not in used:
            path.unlink(missing_ok=True)
    may_pass = sum(fault.may_pass for _, fault in left_out)
    told = [*notes, *_advice(kept, reasons)]
    return Result(place.folder, kind, sizes, dict(reasons.most_common()), examples, may_pass, told)


def _write_split(place: Workplace, split: str, kept: Sequence[KeptRecording]) -> SplitSize | None:
    found = [one for one in kept if one.recording.split == split]
    if not found:
        (place.folder / f"{split}.csv").unlink(missing_ok=True)
        return None
    silence = [SILENCE] if any(one.recording.silence for one in found) else []
    rows = [[*_COLUMNS, *silence]]
    for one, file, seconds in found:
        cells = [one.id, file.relative_to(place.folder).as_posix(), one.text, f"{seconds:.3f}"]
        rows.append([*cells, one.speaker, one.language, *("yes" if one.silence else "" for _ in silence)])
    write_table(place.folder / f"{split}.csv", rows, option="--out")
    speakers = {one.recording.speaker for one in found} - {""}
    return SplitSize(len(found), sum(one.seconds for one in found) / 3600, len(speakers))


def _advice(kept: Sequence[KeptRecording], reasons: Counter[str]) -> list[str]:
    notes = []
    if reasons[ExclusionReason.TOO_LONG.value]:
        notes.append("long recordings become clips with the command 'segment', at their pauses and with their text")
    texts = [one.recording.text for one in kept]
    if all(text == text.upper() != text.lower() for text in texts):
        notes.append("all transcripts are in capitals, and so would be what a model writes; --lowercase changes them")
    languages = {one.recording.language for one in kept}
    if unknown := sorted(name for name in languages if name and not code_of(name)):
        notes.append(f"Whisper knows no language {', '.join(map(repr, unknown))}: correct the column before you train")
    return notes
