"""The tables of a prepared data set, and what was left out of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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


def write_result(
    place: Workplace,
    kind: str,
    kept: Sequence[tuple[Recording, Path, float]],
    left_out: Sequence[tuple[Recording, Fault]],
    notes: Sequence[str],
) -> Result:
    """Write the tables and remove the sound files that none of them names.

    Args:
        kept: recordings with file and seconds.

    Raises:
        BadInput: nothing is kept.
    """
    rows = [(one.id, why.reason.value, why.detail, one.where, one.shown_source, one.text) for one, why in left_out]
    place.write(LEFT_OUT, csv_lines([_LEFT_OUT_COLUMNS, *rows]))
    result = _summed_up(place, kind, kept, left_out, notes)
    if not kept:
        reason, count = max(result.left_out.items(), key=lambda pair: pair[1])
        message = (
            f"none of {counted(len(left_out), 'recording')} is left; {count}: {reason} ({result.examples[reason]})"
        )
        raise BadInput(message, f"all reasons are in {place.folder / LEFT_OUT}")
    for split in SPLITS:
        of_split = [entry for entry in kept if entry[0].split == split]
        if of_split:
            place.write(f"{split}.csv", csv_lines([_COLUMNS, *(_row(entry, place) for entry in of_split)]))
        else:
            (place.folder / f"{split}.csv").unlink(missing_ok=True)
    used = {file for _, file, _ in kept}
    for path in place.audio.iterdir():
        if path not in used:
            path.unlink(missing_ok=True)
    return result


def _row(entry: tuple[Recording, Path, float], place: Workplace) -> tuple[str, ...]:
    recording, file, seconds = entry
    path = file.relative_to(place.folder).as_posix()
    return (recording.id, path, recording.text, f"{seconds:.3f}", recording.speaker, recording.language)


def _summed_up(
    place: Workplace,
    kind: str,
    kept: Sequence[tuple[Recording, Path, float]],
    left_out: Sequence[tuple[Recording, Fault]],
    notes: Sequence[str],
) -> Result:
    by_split: dict[str, list[tuple[Recording, float]]] = defaultdict(list)
    for recording, _, seconds in kept:
        by_split[recording.split].append((recording, seconds))
    sizes = {
        split: SplitSize(
            len(entries),
            sum(seconds for _, seconds in entries) / 3600,
            len({recording.speaker for recording, _ in entries} - {""}),
        )
        for split in SPLITS
        if (entries := by_split.get(split))
    }
    reasons = Counter(fault.reason.value for _, fault in left_out)
    examples: dict[str, str] = {}
    for recording, fault in left_out:
        examples.setdefault(fault.reason.value, f"{recording.id}: {fault.detail}")
    may_pass = sum(fault.may_pass for _, fault in left_out)
    return Result(
        place.folder, kind, sizes, dict(reasons.most_common()), examples, may_pass, [*notes, *_advice(kept, reasons)]
    )


def _advice(kept: Sequence[tuple[Recording, Path, float]], reasons: Counter[str]) -> list[str]:
    notes = []
    if reasons[Reason.TOO_LONG.value]:
        notes.append("long recordings become clips with the command 'segment', at their pauses and with their text")
    if kept and all(recording.text == recording.text.upper() != recording.text.lower() for recording, _, _ in kept):
        notes.append("all transcripts are in capitals, and so would be what a model writes; --lowercase changes them")
    return notes
