"""Which words of a transcript lie opposite each segment, and how well the two agree.

Two sequences of words are aligned globally, in memory that grows with their lengths, not their product: Needleman and
Wunsch 1970 with linear gap costs, found by the divide and conquer of Hirschberg 1975: the best costs of the two halves
of one sequence against every prefix and suffix of the other say where to divide the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from training.recordings.segments.hearing import HeardWord
from training.recordings.segments.transcript import Transcript, joined, of_text
from training.tasks.normalising import normalised
from training.tasks.word_errors import count_errors

Normalizer = Callable[[str], str]
Numbers = npt.NDArray[np.int64]
_GAP, _OTHER, _ALONE = 4, 7, 1
"""Costs of a word without one opposite, of two different words, and of a match with no match at either side: of several
equal words the one in the same company is opposite. Two gaps are dearer than a pair of different words."""
SMALL = 1 << 18  # cells that are kept at once at the bottom of the recursion
_SLACK = 10.0  # seconds that the times of a transcript may be off
_JUMP = 12
"""So many more words of the transcript than were heard in between, and they are no longer of one segment."""
_AROUND = 3
"""Words by which an edge may move into what the alignment gave to a segment."""
MISSED = 6
"""Words in a row that a model may miss; more of them, and nobody says them. (A year is written in seven.)"""
_FEW = 0.3
"""A segment with less than this share of its words opposite others has none: they met by chance."""
_ENDS, _RESTS = 3.0, 1.0
"""What a border after a sentence, or after a part of one, is worth in characters: people pause there."""


@dataclass(frozen=True)
class Match:
    """The words of a transcript that were given to a segment: ``first`` up to ``end``; none where they are equal."""

    first: int
    end: int
    agreement: float = 0.0
    """1 less the share of characters that differ between text and what was heard, both normalised; at least 0."""
    missed: int = 0
    """The most words in a row, inside, that are only in the transcript or were only heard."""


def match(
    heard: Sequence[Sequence[HeardWord]],
    transcript: Transcript,
    normalize: Normalizer,
    spoken_words: Sequence[str],
    language: str = "",
) -> list[Match]:
    """Return what of a transcript lies opposite each segment, in order.

    The words of all segments together are aligned with the transcript as a whole. Where the alignment leaves words
    between two segments, both edges are put where text and what was heard agree best.

    Args:
        heard: words of each segment.
        spoken_words: the transcript's words, normalised one by one (:func:`keys_of`).
    """
    opposite = _opposite(heard, transcript, spoken_words)
    ranges = [_range(positions) for positions in opposite]
    texts = [normalize(joined((word.text for word in words), language)) for words in heard]
    scale = _Scale(transcript, normalize, texts)
    given = [number for number, (first, end) in enumerate(ranges) if first < end]
    found = [Match(*one, missed=_missed(places, *one)) for places, one in zip(opposite, ranges)]
    for number in given[:1]:
        found[number] = replace(found[number], first=scale.best_first(number, found[number], 0))
    for left, right in pairwise(given):
        found[left], found[right] = scale.divided(left, right, found[left], found[right])
    for number in given[-1:]:
        found[number] = replace(found[number], end=scale.best_end(number, found[number], len(transcript.words)))
    return [replace(one, agreement=scale.agreement(number, one)) for number, one in enumerate(found)]


def keys_of(words: Sequence[str]) -> list[str]:
    """Return words as they are compared: without case, accents' encoding and punctuation."""
    return [normalised(word) for word in words]


def _opposite(
    heard: Sequence[Sequence[HeardWord]], transcript: Transcript, spoken_words: Sequence[str]
) -> list[list[int]]:
    """Return the positions in the transcript opposite each segment's words, -1 where there is none."""
    numbers: dict[str, int] = {}
    words = [(segment, word) for segment, some in enumerate(heard) for word in some]
    keys = keys_of([word.text for _, word in words])
    mine = [place for place, key in enumerate(keys) if key]
    theirs = [place for place, key in enumerate(spoken_words) if key]
    found = align(
        np.array([numbers.setdefault(keys[place], len(numbers)) for place in mine], np.int64),
        np.array([numbers.setdefault(spoken_words[place], len(numbers)) for place in theirs], np.int64),
        None if transcript.times is None else np.array([words[place][1].start for place in mine]),
        None if transcript.times is None else transcript.times[theirs],
    )
    positions: list[list[int]] = [[] for _ in heard]
    for place, position in zip(mine, found):
        positions[words[place][0]].append(theirs[position] if position >= 0 else -1)
    return positions


def _range(positions: Sequence[int]) -> tuple[int, int]:
    """Return first and end of the largest group of positions that lie close together."""
    groups: list[list[int]] = []
    for position in (position for position in positions if position >= 0):
        if groups and position - groups[-1][-1] <= _JUMP:
            groups[-1].append(position)
        else:
            groups.append([position])
    largest = max(groups, key=len, default=[])
    return (largest[0], largest[-1] + 1) if len(largest) > _FEW * len(positions) else (0, 0)


def _missed(positions: Sequence[int], first: int, end: int) -> int:
    """Return the longest run of words without one opposite, on either side, from ``first`` to ``end``."""
    longest, alone, last = 0, 0, first - 1
    for position in positions:
        if first <= position < end:
            longest = max(longest, position - last - 1)
            alone, last = 0, position
        else:
            alone += 1
            longest = max(longest, alone)
    return longest


def timed(words: Sequence[HeardWord], text: str, language: str = "") -> list[HeardWord]:
    """Return the words of a text with the times of those that were heard opposite; the others lie between these."""
    said = of_text(text, language)
    numbers: dict[str, int] = {}
    heard_keys, said_keys = (
        np.array([numbers.setdefault(key, len(numbers)) for key in keys_of(some)], np.int64)
        for some in ([word.text for word in words], [said.word(number) for number in range(len(said.words))])
    )
    opposite = align(heard_keys, said_keys)
    known = {int(place): word for place, word in zip(opposite, words) if place >= 0}
    anchors = [(first, known[first].start) for first in known] + [(place + 1, known[place].end) for place in known]
    if not anchors:
        return []
    places, times = zip(*sorted(anchors, key=lambda anchor: (anchor[1], anchor[0])))
    edges = np.interp(np.arange(len(said.words) + 1), places, times)
    found = []
    for number in range(len(said.words)):
        start, end = float(edges[number]), float(edges[number + 1])
        if number in known:
            start, end = known[number].start, known[number].end
        found.append(HeardWord(said.word(number), start, end))
    return found


@dataclass(frozen=True)
class _Scale:
    """Weighs what a segment was given against what was heard in it."""

    transcript: Transcript
    normalize: Normalizer
    heard: Sequence[str]

    def edits(self, number: int, first: int, end: int) -> float:
        """Characters that differ if a segment gets the words ``first`` up to ``end``."""
        return self._counts(number, first, end)["char_edits"]

    def _counts(self, number: int, first: int, end: int) -> dict[str, float]:
        return count_errors([self.normalize(self.transcript.between(first, end))], [self.heard[number]])

    def border(self, cut: int) -> float:
        """What a border before word ``cut`` is worth."""
        last = self.transcript.word(cut - 1).rstrip("\"'»”’)") if cut else "."
        return (
            _ENDS if last.endswith((".", "!", "?", "…", "。", "！", "？")) else _RESTS * last.endswith((",", ";", ":"))
        )

    def agreement(self, number: int, one: Match) -> float:
        if one.first == one.end:
            return 0.0
        counts = self._counts(number, one.first, one.end)
        return max(0.0, 1 - counts["char_edits"] / max(counts["chars"], len(self.heard[number]), 1))

    def best_first(self, number: int, one: Match, least: int) -> int:
        tried = range(max(least, one.first - _JUMP), min(one.first + _AROUND, one.end - 1) + 1)
        return min(
            tried, key=lambda first: (self.edits(number, first, one.end) - self.border(first), abs(first - one.first))
        )

    def best_end(self, number: int, one: Match, most: int) -> int:
        tried = range(max(one.first + 1, one.end - _AROUND), min(one.end + _JUMP, most) + 1)
        return min(tried, key=lambda end: (self.edits(number, one.first, end) - self.border(end), abs(end - one.end)))

    def divided(self, left: int, right: int, one: Match, other: Match) -> tuple[Match, Match]:
        """Divide the words about the border of two segments; several that nobody was heard to say go to neither."""
        if other.first - one.end > MISSED:
            end = self.best_end(left, one, other.first)
            first = self.best_first(right, other, end)
            if first - end > MISSED:
                return replace(one, end=end), replace(other, first=first)
        tried = range(max(one.first + 1, one.end - _AROUND), min(other.first + _AROUND, other.end - 1) + 1)
        place = min(
            tried,
            key=lambda cut: self.edits(left, one.first, cut) + self.edits(right, cut, other.end) - self.border(cut),
            default=one.end,
        )
        return replace(one, end=place), replace(other, first=place)


@dataclass(frozen=True)
class _Pair:
    heard: Numbers
    said: Numbers
    heard_times: npt.NDArray[np.float64] | None
    said_times: npt.NDArray[np.float64] | None

    def costs(self, row: int, first: int, end: int) -> Numbers:
        """Costs of heard word ``row`` opposite each of ``said[first:end]``."""
        equal = self._equal(row, first, end)
        company = self._equal(row - 1, first - 1, end - 1) | self._equal(row + 1, first + 1, end + 1)
        return np.where(equal, np.where(company, 0, _ALONE), _OTHER).astype(np.int64)

    def _equal(self, row: int, first: int, end: int) -> npt.NDArray[np.bool_]:
        """Which of ``said[first:end]`` equal heard word ``row``; beyond the ends nothing does."""
        found = np.zeros(end - first, np.bool_)
        if not 0 <= row < len(self.heard):
            return found
        low, high = max(first, 0), min(end, len(self.said))
        found[low - first : high - first] = self.said[low:high] == self.heard[row]
        if self.heard_times is not None and self.said_times is not None:
            near = np.abs(self.said_times[low:high] - self.heard_times[row]) <= _SLACK
            found[low - first : high - first] &= near
        return found


def align(
    heard: Numbers,
    said: Numbers,
    heard_times: npt.NDArray[np.float64] | None = None,
    said_times: npt.NDArray[np.float64] | None = None,
    small: int = SMALL,
) -> Numbers:
    """Return for each heard word the position of the said word opposite, -1 where there is none; they only grow.

    Args:
        heard: [n] numbers that are equal where words are.
        said: [m] likewise.
        heard_times: [n] seconds; with ``said_times`` words far apart are never taken for the same.
        said_times: [m] seconds.
        small: cells that are kept at once at the bottom of the recursion.
    """
    pair = _Pair(heard, said, heard_times, said_times)
    opposite = np.full(len(heard), -1, np.int64)
    waiting = [(0, len(heard), 0, len(said))]
    while waiting:
        top, bottom, left, right = waiting.pop()
        if bottom == top or left == right:
            continue
        if bottom - top == 1 or (bottom - top + 1) * (right - left + 1) <= small:
            _trace(pair, opposite, top, bottom, left, right)
            continue
        middle = (top + bottom) // 2
        costs = _forwards(pair, top, middle, left, right)[-1] + _backwards(pair, middle, bottom, left, right)
        divide = left + int(costs.argmin())
        waiting += [(top, middle, left, divide), (middle, bottom, divide, right)]
    return opposite


def _forwards(pair: _Pair, top: int, bottom: int, left: int, right: int, keep: bool = False) -> list[Numbers]:
    """Least costs of the rows up to ``bottom`` against each prefix; all rows, or the last alone."""
    gaps = np.arange(right - left + 1, dtype=np.int64) * _GAP
    rows = [gaps]
    for row in range(top, bottom):
        rows.append(_next_row(rows[-1], pair.costs(row, left, right), gaps))
        if not keep:
            del rows[0]
    return rows


def _backwards(pair: _Pair, top: int, bottom: int, left: int, right: int) -> Numbers:
    """Least costs of the rows from ``top`` on against each suffix."""
    gaps = np.arange(right - left + 1, dtype=np.int64) * _GAP
    best = gaps
    for row in range(bottom - 1, top - 1, -1):
        best = _next_row(best, pair.costs(row, left, right)[::-1], gaps)
    return best[::-1]


def _next_row(best: Numbers, costs: Numbers, gaps: Numbers) -> Numbers:
    """One more word: opposite another, or alone; then any number of words of the other side alone."""
    row = best + _GAP
    np.minimum(row[1:], best[:-1] + costs, out=row[1:])
    return np.minimum.accumulate(row - gaps) + gaps


def _trace(pair: _Pair, opposite: Numbers, top: int, bottom: int, left: int, right: int) -> None:
    """Write the best alignment of a small block, from its end to its beginning."""
    rows = _forwards(pair, top, bottom, left, right, keep=True)
    row, column = bottom - top, right - left
    while row and column:
        here = rows[row][column]
        if here == rows[row][column - 1] + _GAP:
            column -= 1
        elif here == rows[row - 1][column] + _GAP:
            row -= 1
        else:
            row, column = row - 1, column - 1
            opposite[top + row] = left + column
