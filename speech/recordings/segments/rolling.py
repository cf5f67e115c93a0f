"""Rolling captions, as video sites generate them: a line grows, is held, and moves up when the next one comes, so it
appears in several cues. :func:`unroll_captions` keeps each line once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_LONGEST_HOLD = 0.1
"""Seconds that a cue which only repeats the text shown lasts at most."""
_FEWEST_REPEATS = 2
"""Cues that must repeat the text shown, and half of all cues: speakers repeat themselves too."""


class Cue(NamedTuple):
    """The text shown during one interval."""

    begin: float
    """Seconds."""
    end: float
    lines: tuple[str, ...]
    """Lines without markup; none is empty."""

    @property
    def words(self) -> list[str]:
        return " ".join(self.lines).split()


def unroll_captions(cues: Sequence[Cue]) -> list[tuple[float, float, str]]:
    """Return begin, end and text of the cues; of rolling captions only the new text of each."""
    shown = [cue for cue in cues if cue.lines]
    if not _are_rolling(shown):
        return [(cue.begin, cue.end, " ".join(cue.lines)) for cue in shown]
    previous_words: list[str] = []
    captions = []
    for cue in shown:
        new = cue.words[_repeated(previous_words, cue.words) :]
        previous_words = cue.words
        if new:
            captions.append((cue.begin, cue.end, " ".join(new)))
    return captions


def _repeated(before: Sequence[str], words: Sequence[str]) -> int:
    """Return the length of the longest run of words that ends the previous cue and begins this one."""
    longest = min(len(before), len(words))
    return next((count for count in range(longest, 0, -1) if before[-count:] == words[:count]), 0)


def _are_rolling(cues: Sequence[Cue]) -> bool:
    repeating = sum(_repeats(*pair) for pair in pairwise(cues))
    return repeating >= _FEWEST_REPEATS and 2 * repeating >= len(cues) - 1


def _repeats(before: Cue, cue: Cue) -> bool:
    """Whether a cue repeats whole lines of the previous one with more below, extends its line, or only holds it."""
    count = _repeated(before.words, cue.words)
    if count == len(cue.words):
        return cue.end - cue.begin <= _LONGEST_HOLD or cue.begin < before.end
    return count > 0 and (count == len(before.words) or count in _line_ends(cue.lines))


def _line_ends(lines: Sequence[str]) -> set[int]:
    """Return the number of words up to the end of each line but the last."""
    return {len(" ".join(lines[:number]).split()) for number in range(1, len(lines))}
