"""Captions that scroll, as video sites make them by themselves: a line grows, is held, and moves up when the next one
comes, so it stands in several cues. Here each is told once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_HELD = 0.1
"""Seconds that a cue lasts at most which only holds what is there."""
_ENOUGH = 2
"""Cues that must show what is there already, and half of all: people repeat themselves too."""


class Cue(NamedTuple):
    """What is shown at a time."""

    begin: float
    """Seconds."""
    end: float
    lines: tuple[str, ...]
    """Without markup; none is empty."""

    @property
    def words(self) -> list[str]:
        return " ".join(self.lines).split()


def told_once(cues: Sequence[Cue]) -> list[tuple[float, float, str]]:
    """Return begin, end and text of cues; of captions that scroll only what is new in each."""
    shown = [cue for cue in cues if cue.lines]
    if not _scroll(shown):
        return [(cue.begin, cue.end, " ".join(cue.lines)) for cue in shown]
    before: list[str] = []
    told = []
    for cue in shown:
        new = cue.words[_repeated(before, cue.words) :]
        before = cue.words
        if new:
            told.append((cue.begin, cue.end, " ".join(new)))
    return told


def _repeated(before: Sequence[str], words: Sequence[str]) -> int:
    """Return how many words end what was shown and begin what is shown, the most."""
    most = min(len(before), len(words))
    return next((count for count in range(most, 0, -1) if before[-count:] == words[:count]), 0)


def _scroll(cues: Sequence[Cue]) -> bool:
    repeating = sum(_shows_again(*pair) for pair in pairwise(cues))
    return repeating >= _ENOUGH and 2 * repeating >= len(cues) - 1


def _shows_again(before: Cue, cue: Cue) -> bool:
    """Whether a cue shows whole lines of the last one again and more below, lets its line grow, or only holds it."""
    count = _repeated(before.words, cue.words)
    if count == len(cue.words):
        return cue.end - cue.begin <= _HELD or cue.begin < before.end
    return count > 0 and (count == len(before.words) or count in _ends(cue.lines))


def _ends(lines: Sequence[str]) -> set[int]:
    """Return the words up to the end of each line but the last."""
    return {len(" ".join(lines[:number]).split()) for number in range(1, len(lines))}
