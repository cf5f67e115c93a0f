"""The same sound twice: a copy is left out, and so are all whose transcripts contradict each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from training.recordings.recording import Fault, Reason, Recording

_PRECEDENCE = ("test", "validation", "train")
"""The split that keeps a clip which is in several: what is evaluated on must not be trained on."""


def doubles(clips: Sequence[tuple[Recording, str]]) -> list[Fault | None]:
    """Say of every clip whether it is left out.

    Args:
        clips: recordings with the hash of their samples.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, (_, digest) in enumerate(clips):
        groups[digest].append(index)
    faults: list[Fault | None] = [None] * len(clips)
    for indices in groups.values():
        if len(indices) > 1:
            _judge_group([clips[index][0] for index in indices], indices, faults)
    return faults


def _judge_group(recordings: Sequence[Recording], indices: Sequence[int], faults: list[Fault | None]) -> None:
    first = min(range(len(indices)), key=lambda i: (_PRECEDENCE.index(recordings[i].split), i))
    one_text = len({_letters(recording.text) for recording in recordings}) == 1
    for position, index in enumerate(indices):
        if not one_text:
            other = recordings[first if position != first else (first + 1) % len(indices)]
            faults[index] = Fault(Reason.CONTRADICTION, f"the same sound as {other.id}, another text somewhere")
        elif position != first:
            faults[index] = Fault(Reason.DUPLICATE, f"the same sound and text as {recordings[first].id}")


def _letters(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())
