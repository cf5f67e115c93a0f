"""The tables of a prepared data set, and what was left out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from profiles.counts import counted
from profiles.errors import BadInput
from training.recordings.recording import Fault, Reason, Recording
from training.recordings.workplace import Workplace
from training.tasks.speech_clips import SPLITS
from training.tasks.tables import csv_lines

LEFT_OUT = "left_out.csv"
_COLUMNS = ("id", "audio_path", "text", "duration", "speaker", "language")
_LEFT_OUT_COLUMNS = ("id", "reason", "detail", "where", "source", "text")


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


class Kept(NamedTuple):
    """A recording that is in the data set."""

    recording: Recording
    file: Path
    seconds: float


def write_result(
    place: Workplace,
    kind: str,
    kept: Sequence[Kept],
    left_out: Sequence[tuple[Recording, Fault]],
    notes: Sequence[str],
) -> Result:
    """Write the tables and remove the sound files that none of them names.

    Raises:
        BadInput: nothing is kept.
    """
    rows = [(one.id, why.reason.value, why.detail, one.where, one.shown_source, one.text) for one, why in left_out]
    place.write(LEFT_OUT, csv_lines([_LEFT_OUT_COLUMNS, *rows]))
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


def _write_split(place: Workplace, split: str, kept: Sequence[Kept]) -> SplitSize | None:
    found = [one for one in kept if one.recording.split == split]
    if not found:
        (place.folder / f"{split}.csv").unlink(missing_ok=True)
        return None
    rows = [
        (one.id, file.relative_to(place.folder).as_posix(), one.text, f"{seconds:.3f}", one.speaker, one.language)
        for one, file, seconds in found
    ]
    place.write(f"{split}.csv", csv_lines([_COLUMNS, *rows]))
    speakers = {one.recording.speaker for one in found} - {""}
    return SplitSize(len(found), sum(one.seconds for one in found) / 3600, len(speakers))


def _advice(kept: Sequence[Kept], reasons: Counter[str]) -> list[str]:
    notes = []
    if reasons[Reason.TOO_LONG.value]:
        notes.append("long recordings become clips with the command 'segment', at their pauses and with their text")
    texts = [one.recording.text for one in kept]
    if all(text == text.upper() != text.lower() for text in texts):
        notes.append("all transcripts are in capitals, and so would be what a model writes; --lowercase changes them")
    return notes
