"""Divides recordings into training, validation and test splits.

A speaker is in one split only, unless there are too few speakers. The order of a draw is the hash of a name, so the
same source is always divided in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from profiles.errors import counted
from speech.recordings.recording import Recording
from training.tasks.data_files.splits import SPLITS

_LARGEST_EXCESS = 2.0  # times its share that a split may have after one more speaker
_ENOUGH_HELD_OUT = 20  # clips for validation, from which on a note asks for no more
_LARGEST_PROPOSED = 0.3  # share for validation that a note proposes at most
_FEW_TRAINING_CLIPS = 0.5  # share of the clips left to train on, below which a note says so


@dataclass(frozen=True)
class HeldOutShares:
    """HeldOutShares of the clips that are held out."""

    validation: float = 0.1
    test: float = 0.1


@dataclass(frozen=True)
class Division:
    """Recordings with their splits, and notes on how they were divided."""

    recordings: list[Recording]
    notes: list[str]


def divide(recordings: Sequence[Recording], shares: HeldOutShares) -> Division:
    """Assign a split to every recording; splits of the source are preserved.

    A source with one split, or none, is divided into three. If the source has training and test clips only, the
    validation split is drawn from the training clips.
    """
    source_splits = {recording.split for recording in recordings} - {""}
    if len(source_splits) < 2:
        return _draw(recordings, {"test": shares.test, "validation": shares.validation})
    notes = [f"the splits are the source's own: {', '.join(split for split in SPLITS if split in source_splits)}"]
    assigned = [dataclasses.replace(recording, split=recording.split or "train") for recording in recordings]
    if "validation" not in source_splits:
        train = [recording for recording in assigned if recording.split == "train"]
        drawn = _draw(train, {"validation": shares.validation})
        validation_or_train = iter(drawn.recordings)
        assigned = [next(validation_or_train) if recording.split == "train" else recording for recording in assigned]
        notes += ["validation is drawn from its training clips", *drawn.notes]
    return Division(assigned, notes + _shared_speakers(assigned))


def _draw(recordings: Sequence[Recording], shares: dict[str, float]) -> Division:
    counts = {split: round(share * len(recordings)) or 1 for split, share in shares.items() if share > 0}
    units: dict[str, Callable[[Recording], str]] = {"speaker": _speaker_or_file, "file": _file, "clip": _clip}
    for unit, group_of in units.items():
        groups: dict[str, list[int]] = defaultdict(list)
        for index, recording in enumerate(recordings):
            groups[group_of(recording)].append(index)
        if len(groups) > len(counts) and not (unit == "file" and len(groups) == len(recordings)):
            break
    splits = ["train"] * len(recordings)
    for name, split in (_fill(groups, counts) if len(groups) > len(counts) else {}).items():
        for index in groups[name]:
            splits[index] = split
    assigned = [dataclasses.replace(recording, split=split) for recording, split in zip(recordings, splits)]
    notes = _division_notes(assigned, unit, counts)
    if unit != "speaker" or not any(recording.speaker for recording in recordings):
        notes += _few_held_out(assigned, shares["validation"])
    return Division(assigned, notes)


def _speaker_or_file(recording: Recording) -> str:
    """Return the unit that is in one split only: the speaker, or else the sound file that clips are cut from."""
    return f"speaker {recording.speaker}" if recording.speaker else _file(recording)


def _file(recording: Recording) -> str:
    return f"file {recording.audio.stamp()}"


def _clip(recording: Recording) -> str:
    return f"clip {recording.id} {recording.location}"


def _fill(groups: dict[str, list[int]], counts: dict[str, int]) -> dict[str, str]:
    """Assign whole groups to the splits until each has its number of clips; return the split by group.

    Args:
        groups: indices of recordings by group; more groups than splits: one is reserved for each later split, and
            one for training.
        counts: clips that each split is to get.
    """
    ranked = sorted(groups, key=lambda name: hashlib.blake2b(name.encode(), digest_size=16).digest())
    chosen: dict[str, str] = {}
    for later, (split, count) in zip(range(len(counts), 0, -1), counts.items()):
        remaining = [name for name in ranked if name not in chosen]
        assigned, spare = 0, len(remaining) - later
        for name in remaining[:-1]:
            if spare and assigned < count and assigned + len(groups[name]) <= _LARGEST_EXCESS * count:
                chosen[name] = split
                assigned += len(groups[name])
                spare -= 1
        if not assigned:
            smallest = min(remaining, key=lambda name: len(groups[name]))
            chosen[smallest] = split
    return chosen


def _division_notes(recordings: Sequence[Recording], unit: str, counts: dict[str, int]) -> list[str]:
    """Describe how the recordings were divided, and how many are left to train on."""
    speakers = Counter(recording.speaker for recording in recordings)
    unknown = speakers.pop("", 0)
    if not counts:
        return ["nothing is held out"]
    if len(recordings) <= len(counts):
        return [f"{counted(len(recordings), 'clip is', 'clips are')} too few to hold any out: all are for training"]
    if not speakers:
        files = len({_file(recording) for recording in recordings})
        unit = "file" if unit == "speaker" and files < len(recordings) else "clip"
        return [f"divided by {unit}: the source names no speakers, so the same voice may be in all splits"]
    if unit != "speaker":
        too_few = counted(len(speakers), "speaker is", "speakers are")
        voices = "voice is" if len(speakers) == 1 else "voices are"
        return [f"divided by {unit}: {too_few} too few, so the same {voices} in all splits"]
    unknown_note = (
        f"; {counted(unknown, 'clip')} without one divided by file" if unknown else ": no speaker is in two splits"
    )
    train_clips = sum(recording.split == "train" for recording in recordings)
    notes = [f"divided by speaker ({len(speakers)}){unknown_note}"]
    if train_clips < _FEW_TRAINING_CLIPS * len(recordings):
        remedy = "--test 0 or more speakers help" if len(counts) > 1 else "more speakers help"
        reason = "since whole speakers are held out"
        notes.append(f"only {train_clips} of {len(recordings)} clips are left to train on, {reason}; {remedy}")
    return notes


def _few_held_out(recordings: Sequence[Recording], held_out: float) -> list[str]:
    """Name the option that holds more clips out, if a tenth of few recordings can hardly show what was learned."""
    count = sum(recording.split == "validation" for recording in recordings)
    needed = math.ceil(10 * _ENOUGH_HELD_OUT / max(1, len(recordings))) / 10
    share = min(_LARGEST_PROPOSED, needed)
    more = round(share * len(recordings))
    if not 0 < count < _ENOUGH_HELD_OUT or share <= held_out or more < _ENOUGH_HELD_OUT / 2:
        return []
    few = f"{counted(count, 'clip is', 'clips are')} held out for validation"
    return [f"only {few}, too few to show small gains; --validation {share} holds out about {more}"]


def _shared_speakers(recordings: Iterable[Recording]) -> list[str]:
    splits: dict[str, set[str]] = defaultdict(set)
    for recording in recordings:
        if recording.speaker:
            splits[recording.speaker].add(recording.split)
    shared = sum("train" in speaker_splits and len(speaker_splits) > 1 for speaker_splits in splits.values())
    return (
        [f"{counted(shared, 'speaker is', 'speakers are')} in training and in another split, as the source has them"]
        if shared
        else []
    )
