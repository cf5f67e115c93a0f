"""Who is trained on and who is only evaluated on: speakers are never in two splits.

The order of a draw is the hash of a name, so the same source is always divided in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from profiles.counts import counted
from training.recordings.recording import Recording

_FEWEST_GROUPS = 3  # one for each split
_CROWD = 2.0  # times its share that a split may get with one speaker more


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
        drawn = _draw(recordings, {"test": shares.test, "validation": shares.validation})
        return Division(drawn.recordings, drawn.notes)
    notes = [f"the splits are the source's own: {', '.join(split for split in _ORDER if split in named)}"]
    kept = [dataclasses.replace(one, split=one.split or "train") for one in recordings]
    if "validation" not in named:
        train = [one for one in kept if one.split == "train"]
        drawn = _draw(train, {"validation": shares.validation})
        held = iter(drawn.recordings)
        kept = [next(held) if one.split == "train" else one for one in kept]
        notes += ["validation is drawn from its training clips", *drawn.notes]
    return Division(kept, notes + _shared_speakers(kept))


_ORDER = ("train", "validation", "test")


def _draw(recordings: Sequence[Recording], shares: dict[str, float]) -> Division:
    groups = _grouped(recordings, _group)
    enough = len(groups) >= _FEWEST_GROUPS
    if not enough:
        groups = _grouped(recordings, lambda one: f"clip {one.id} {one.where}")
    wanted = {split: round(share * len(recordings)) or 1 for split, share in shares.items() if share > 0}
    chosen = _fill(groups, wanted) if len(groups) > len(wanted) else {}
    splits = ["train"] * len(recordings)
    for name, split in chosen.items():
        for index in groups[name]:
            splits[index] = split
    found = [dataclasses.replace(one, split=split) for one, split in zip(recordings, splits)]
    return Division(found, [_how(recordings, enough)])


def _grouped(recordings: Sequence[Recording], name_of: Callable[[Recording], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, recording in enumerate(recordings):
        groups[name_of(recording)].append(index)
    return groups


def _group(recording: Recording) -> str:
    """What must not be torn apart: a speaker, or else the sound file that several clips are cut from."""
    return f"speaker {recording.speaker}" if recording.speaker else f"file {recording.audio.stamp()}"


def _fill(groups: dict[str, list[int]], wanted: dict[str, int]) -> dict[str, str]:
    """Give whole groups to the splits until they have what is wanted; return the split by group."""
    ranked = sorted(groups, key=lambda name: hashlib.blake2b(name.encode(), digest_size=16).digest())
    chosen: dict[str, str] = {}
    for split, count in wanted.items():
        left = [name for name in ranked if name not in chosen]
        got = 0
        for name in left[:-1]:
            if got < count and got + len(groups[name]) <= _CROWD * count:
                chosen[name] = split
                got += len(groups[name])
        if not got:
            smallest = min(left, key=lambda name: len(groups[name]))
            chosen[smallest] = split
    return chosen


def _how(recordings: Iterable[Recording], enough: bool) -> str:
    speakers = Counter(recording.speaker for recording in recordings)
    unknown = speakers.pop("", 0)
    if not speakers:
        return "divided by clip: the source names no speakers, so the same voice may be in all splits"
    if not enough:
        few = counted(len(speakers), "speaker is", "speakers are")
        return f"divided by clip: {few} too few, so the same voices are in all splits"
    rest = f"; {counted(unknown, 'clip')} without one divided by file" if unknown else ": no speaker is in two splits"
    return f"divided by speaker ({len(speakers)}){rest}"


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
