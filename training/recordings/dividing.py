"""Who is trained on and who is only evaluated on: speakers are in two splits only where they are fewer than splits.

The order of a draw is the hash of a name, so the same source is always divided in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from profiles.errors import counted
from training.recordings.recording import Recording
from training.tasks.speech_clips import SPLITS

_CROWD = 2.0  # times its share that a split may get with one speaker more
_LITTLE = 0.5  # share of the clips left to train on, below which it is said


@dataclass(frozen=True)
class Shares:
    """Parts of the clips that are held out."""

    validation: float = 0.1
    test: float = 0.1


@dataclass(frozen=True)
class Division:
    """Recordings with their splits, and how they got them."""

    recordings: list[Recording]
    notes: list[str]


def divide(recordings: Sequence[Recording], shares: Shares) -> Division:
    """Give every recording a split; splits of the source are kept.

    A source with one split, or none, is divided anew into three. One that has training and test clips only gets its
    validation split out of the training clips.
    """
    named = {recording.split for recording in recordings} - {""}
    if len(named) < 2:
        return _draw(recordings, {"test": shares.test, "validation": shares.validation})
    notes = [f"the splits are the source's own: {', '.join(split for split in SPLITS if split in named)}"]
    kept = [dataclasses.replace(one, split=one.split or "train") for one in recordings]
    if "validation" not in named:
        train = [one for one in kept if one.split == "train"]
        drawn = _draw(train, {"validation": shares.validation})
        held = iter(drawn.recordings)
        kept = [next(held) if one.split == "train" else one for one in kept]
        notes += ["validation is drawn from its training clips", *drawn.notes]
    return Division(kept, notes + _shared_speakers(kept))


def _draw(recordings: Sequence[Recording], shares: dict[str, float]) -> Division:
    wanted = {split: round(share * len(recordings)) or 1 for split, share in shares.items() if share > 0}
    ways: dict[str, Callable[[Recording], str]] = {"speaker": _group, "file": _file, "clip": _clip}
    for way, name_of in ways.items():
        groups: dict[str, list[int]] = defaultdict(list)
        for index, recording in enumerate(recordings):
            groups[name_of(recording)].append(index)
        if len(groups) > len(wanted) and not (way == "file" and len(groups) == len(recordings)):
            break
    splits = ["train"] * len(recordings)
    for name, split in (_fill(groups, wanted) if len(groups) > len(wanted) else {}).items():
        for index in groups[name]:
            splits[index] = split
    found = [dataclasses.replace(one, split=split) for one, split in zip(recordings, splits)]
    return Division(found, _how(found, way, wanted))


def _group(recording: Recording) -> str:
    """What must not be torn apart: a speaker, or else the sound file that several clips are cut from."""
    return f"speaker {recording.speaker}" if recording.speaker else _file(recording)


def _file(recording: Recording) -> str:
    return f"file {recording.audio.stamp()}"


def _clip(recording: Recording) -> str:
    return f"clip {recording.id} {recording.where}"


def _fill(groups: dict[str, list[int]], wanted: dict[str, int]) -> dict[str, str]:
    """Give whole groups to the splits until they have what is wanted; return the split by group.

    Args:
        groups: more of them than ``wanted`` splits: one is left for each split that comes later, and for training.
    """
    ranked = sorted(groups, key=lambda name: hashlib.blake2b(name.encode(), digest_size=16).digest())
    chosen: dict[str, str] = {}
    for later, (split, count) in zip(range(len(wanted), 0, -1), wanted.items()):
        left = [name for name in ranked if name not in chosen]
        got, free = 0, len(left) - later
        for name in left[:-1]:
            if free and got < count and got + len(groups[name]) <= _CROWD * count:
                chosen[name] = split
                got += len(groups[name])
                free -= 1
        if not got:
            smallest = min(left, key=lambda name: len(groups[name]))
            chosen[smallest] = split
    return chosen


def _how(found: Sequence[Recording], way: str, wanted: dict[str, int]) -> list[str]:
    """Say how it was divided, and what that leaves to train on."""
    speakers = Counter(recording.speaker for recording in found)
    unknown = speakers.pop("", 0)
    if not wanted:
        return ["nothing is held out"]
    if len(found) <= len(wanted):
        return [f"{counted(len(found), 'clip is', 'clips are')} too few to hold any out: all are for training"]
    if not speakers:
        way = "file" if way == "speaker" and len({_file(one) for one in found}) < len(found) else "clip"
        return [f"divided by {way}: the source names no speakers, so the same voice may be in all splits"]
    if way != "speaker":
        few = counted(len(speakers), "speaker is", "speakers are")
        voices = "voice is" if len(speakers) == 1 else "voices are"
        return [f"divided by {way}: {few} too few, so the same {voices} in all splits"]
    rest = f"; {counted(unknown, 'clip')} without one divided by file" if unknown else ": no speaker is in two splits"
    left = sum(one.split == "train" for one in found)
    notes = [f"divided by speaker ({len(speakers)}){rest}"]
    if left < _LITTLE * len(found):
        help = "--test 0 or more speakers help" if len(wanted) > 1 else "more speakers help"
        why = "since whole speakers are held out"
        notes.append(f"only {left} of {len(found)} clips are left to train on, {why}; {help}")
    return notes


def _shared_speakers(recordings: Iterable[Recording]) -> list[str]:
    splits: dict[str, set[str]] = defaultdict(set)
    for recording in recordings:
        if recording.speaker:
            splits[recording.speaker].add(recording.split)
    shared = sum("train" in found and len(found) > 1 for found in splits.values())
    return (
        [f"{counted(shared, 'speaker is', 'speakers are')} in training and in another split, as the source has them"]
        if shared
        else []
    )
