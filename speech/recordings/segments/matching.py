"""Assigns the words of a transcript to the segments of a recording, and measures how well text and sound agree.

Two sequences of words are aligned globally, in memory that grows with their lengths, not their product: the alignment
of Needleman and Wunsch 1970 with linear gap costs, found by the divide and conquer of Hirschberg 1975: the best costs
of the two halves of one sequence against every prefix and suffix of the other show where to divide the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from speech.recordings.segments.transcribing import TimedWord
from speech.recordings.segments.transcript import Transcript, join_words, parse_text
from speech.scoring.text_normalisation import normalise
from speech.scoring.word_errors import count_errors

Normalizer = Callable[[str], str]
Numbers = npt.NDArray[np.int64]
_GAP, _MISMATCH, _LONE_MATCH = 4, 7, 1
"""Costs of a gap (an unaligned word), of two different words, and of a match without a matching neighbour: of several
equal words the one with equal neighbours is chosen. Two gaps cost more than a pair of different words."""
LARGEST_BLOCK = 1 << 18  # cells held in memory at once at the bottom of the recursion
_SLACK = 10.0  # seconds by which the times of a transcript may be wrong
_LARGEST_GAP = 12
"""Largest gap in the transcript, in words, between two aligned words of one segment."""
_LARGEST_SHIFT = 3
"""Words by which a boundary may move into what the alignment assigned to a segment."""
LONGEST_MISSED_RUN = 6
"""Words in a row that a model may miss; a longer run is not spoken. (A year is written in seven.)"""
_LEAST_ALIGNED = 0.3
"""Share of a segment's words that must be aligned; below it the matches are taken for chance."""
_SENTENCE_END, _CLAUSE_END = 3.0, 1.0
"""Bonus of a boundary after a sentence or a clause, in characters: speakers pause there."""


@dataclass(frozen=True)
class Match:
    """The words of a transcript that belong to a segment: ``start`` up to, not including, ``end``."""

    start: int
    end: int
    agreement: float = 0.0
    """1 less the share of characters that differ between text and transcription, both normalised; at least 0."""
    missed: int = 0
    """The longest run of words inside that are only in the transcript or only in the transcription."""


def match_transcript(
    heard: Sequence[Sequence[TimedWord]],
    transcript: Transcript,
    normalize: Normalizer,
    transcript_keys: Sequence[str],
    language: str = "",
) -> list[Match]:
    """Return the words of a transcript that belong to each segment, in order.

    The words of all segments together are aligned with the whole transcript. Where the alignment leaves words between
    two segments, the boundaries are put where text and transcription agree best.

    Args:
        heard: transcribed words of each segment.
        transcript_keys: the transcript's words, normalised one by one (:func:`word_keys`).
    """
    aligned = _aligned_positions(heard, transcript, transcript_keys)
    ranges = [_range(positions) for positions in aligned]
    texts = [normalize(join_words((word.text for word in words), language)) for words in heard]
    scorer = _BoundaryScorer(transcript, normalize, texts)
    filled = [number for number, (start, end) in enumerate(ranges) if start < end]
    matches = [
        Match(start, end, missed=_missed(positions, start, end)) for positions, (start, end) in zip(aligned, ranges)
    ]
    for number in filled[:1]:
        matches[number] = replace(matches[number], start=scorer.best_start(number, matches[number], 0))
    for left, right in pairwise(filled):
        matches[left], matches[right] = scorer.place_boundary(left, right, matches[left], matches[right])
    for number in filled[-1:]:
        matches[number] = replace(matches[number], end=scorer.best_end(number, matches[number], len(transcript.words)))
    return [replace(match, agreement=scorer.agreement(number, match)) for number, match in enumerate(matches)]


def word_keys(words: Sequence[str]) -> list[str]:
    """Return the forms in which words are compared: without case and punctuation, in one Unicode normal form."""
    return [normalise(word) for word in words]


def _aligned_positions(
    heard: Sequence[Sequence[TimedWord]], transcript: Transcript, transcript_keys: Sequence[str]
) -> list[list[int]]:
    """Return the position in the transcript of each word of each segment, -1 where it is not aligned."""
    numbers: dict[str, int] = {}
    words = [(segment, word) for segment, segment_words in enumerate(heard) for word in segment_words]
    keys = word_keys([word.text for _, word in words])
    heard_indices = [index for index, key in enumerate(keys) if key]
    reference_positions = [index for index, key in enumerate(transcript_keys) if key]
    alignment = align(
        np.array([numbers.setdefault(keys[index], len(numbers)) for index in heard_indices], np.int64),
        np.array([numbers.setdefault(transcript_keys[index], len(numbers)) for index in reference_positions], np.int64),
        None if transcript.times is None else np.array([words[index][1].start for index in heard_indices]),
        None if transcript.times is None else transcript.times[reference_positions],
    )
    positions: list[list[int]] = [[] for _ in heard]
    for index, position in zip(heard_indices, alignment):
        positions[words[index][0]].append(reference_positions[position] if position >= 0 else -1)
    return positions


def _range(positions: Sequence[int]) -> tuple[int, int]:
    """Return start and end of the largest group of positions that lie close together."""
    groups: list[list[int]] = []
    for position in (position for position in positions if position >= 0):
        if groups and position - groups[-1][-1] <= _LARGEST_GAP:
            groups[-1].append(position)
        else:
            groups.append([position])
    largest = max(groups, key=len, default=[])
    return (largest[0], largest[-1] + 1) if len(largest) > _LEAST_ALIGNED * len(positions) else (0, 0)


def _missed(positions: Sequence[int], start: int, end: int) -> int:
    """Return the longest run of unaligned words on either side, from ``start`` to ``end``."""
    longest, run, previous = 0, 0, start - 1
    for position in positions:
        if start <= position < end:
            longest = max(longest, position - previous - 1)
            run, previous = 0, position
        else:
            run += 1
            longest = max(longest, run)
    return longest


def time_words(words: Sequence[TimedWord], text: str, language: str = "") -> list[TimedWord]:
    """Return the words of a text with the times of the aligned transcribed words; the times of others are interpolated.

    Args:
        words: transcribed words with times.
    """
    reference = parse_text(text, language)
    numbers: dict[str, int] = {}
    heard_keys, reference_keys = (
        np.array([numbers.setdefault(key, len(numbers)) for key in word_keys(texts)], np.int64)
        for texts in ([word.text for word in words], [reference.word(number) for number in range(len(reference.words))])
    )
    alignment = align(heard_keys, reference_keys)
    heard_by_position = {int(position): word for position, word in zip(alignment, words) if position >= 0}
    anchors = [(position, word.start) for position, word in heard_by_position.items()]
    anchors += [(position + 1, word.end) for position, word in heard_by_position.items()]
    if not anchors:
        return []
    positions, times = zip(*sorted(anchors, key=lambda anchor: (anchor[1], anchor[0])))
    edges = np.interp(np.arange(len(reference.words) + 1), positions, times)
    timed_words = []
    for number in range(len(reference.words)):
        start, end = float(edges[number]), float(edges[number + 1])
        if number in heard_by_position:
            start, end = heard_by_position[number].start, heard_by_position[number].end
        timed_words.append(TimedWord(reference.word(number), start, end))
    return timed_words


@dataclass(frozen=True)
class _BoundaryScorer:
    """Scores the words assigned to a segment against its transcription."""

    transcript: Transcript
    normalize: Normalizer
    heard: Sequence[str]

    def char_edits(self, number: int, start: int, end: int) -> float:
        """Return how many characters differ if a segment gets the words ``start`` up to ``end``."""
        return self._counts(number, start, end)["char_edits"]

    def _counts(self, number: int, start: int, end: int) -> dict[str, float]:
        return count_errors([self.normalize(self.transcript.text_between(start, end))], [self.heard[number]])

    def boundary_bonus(self, cut: int) -> float:
        """Return the bonus of a boundary before word ``cut``."""
        previous_word = self.transcript.word(cut - 1).rstrip("\"'»”’)") if cut else "."
        return (
            _SENTENCE_END
            if previous_word.endswith((".", "!", "?", "…", "。", "！", "？"))
            else _CLAUSE_END * previous_word.endswith((",", ";", ":"))
        )

    def agreement(self, number: int, match: Match) -> float:
        if match.start == match.end:
            return 0.0
        counts = self._counts(number, match.start, match.end)
        return max(0.0, 1 - counts["char_edits"] / max(counts["chars"], len(self.heard[number]), 1))

    def best_start(self, number: int, match: Match, earliest: int) -> int:
        candidates = range(
            max(earliest, match.start - _LARGEST_GAP), min(match.start + _LARGEST_SHIFT, match.end - 1) + 1
        )
        return min(
            candidates,
            key=lambda start: (
                self.char_edits(number, start, match.end) - self.boundary_bonus(start),
                abs(start - match.start),
            ),
        )

    def best_end(self, number: int, match: Match, latest: int) -> int:
        candidates = range(max(match.start + 1, match.end - _LARGEST_SHIFT), min(match.end + _LARGEST_GAP, latest) + 1)
        return min(
            candidates,
            key=lambda end: (
                self.char_edits(number, match.start, end) - self.boundary_bonus(end),
                abs(end - match.end),
            ),
        )

    def place_boundary(self, left_number: int, right_number: int, left: Match, right: Match) -> tuple[Match, Match]:
        """Divide the words around the boundary of two segments; a long run that was not spoken goes to neither."""
        if right.start - left.end > LONGEST_MISSED_RUN:
            end = self.best_end(left_number, left, right.start)
            start = self.best_start(right_number, right, end)
            if start - end > LONGEST_MISSED_RUN:
                return replace(left, end=end), replace(right, start=start)
        candidates = range(
            max(left.start + 1, left.end - _LARGEST_SHIFT), min(right.start + _LARGEST_SHIFT, right.end - 1) + 1
        )
        boundary = min(
            candidates,
            key=lambda cut: (
                self.char_edits(left_number, left.start, cut)
                + self.char_edits(right_number, cut, right.end)
                - self.boundary_bonus(cut)
            ),
            default=left.end,
        )
        return replace(left, end=boundary), replace(right, start=boundary)


@dataclass(frozen=True)
class _SequencePair:
    heard: Numbers
    reference: Numbers
    heard_times: npt.NDArray[np.float64] | None
    reference_times: npt.NDArray[np.float64] | None

    def costs(self, row: int, start: int, end: int) -> Numbers:
        """Return the costs of aligning heard word ``row`` with each of ``reference[start:end]``."""
        equal = self._equal(row, start, end)
        neighbour_equal = self._equal(row - 1, start - 1, end - 1) | self._equal(row + 1, start + 1, end + 1)
        return np.where(equal, np.where(neighbour_equal, 0, _LONE_MATCH), _MISMATCH).astype(np.int64)

    def _equal(self, row: int, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Return which of ``reference[start:end]`` equal heard word ``row``; beyond the ends none does."""
        equal = np.zeros(end - start, np.bool_)
        if not 0 <= row < len(self.heard):
            return equal
        low, high = max(start, 0), min(end, len(self.reference))
        equal[low - start : high - start] = self.reference[low:high] == self.heard[row]
        if self.heard_times is not None and self.reference_times is not None:
            near = np.abs(self.reference_times[low:high] - self.heard_times[row]) <= _SLACK
            equal[low - start : high - start] &= near
        return equal


def align(
    heard: Numbers,
    reference: Numbers,
    heard_times: npt.NDArray[np.float64] | None = None,
    reference_times: npt.NDArray[np.float64] | None = None,
    largest_block: int = LARGEST_BLOCK,
) -> Numbers:
    """Return for each heard word the position of the aligned reference word, -1 where there is none; they only grow.

    Args:
        heard: [n] numbers of words; equal words have equal numbers.
        reference: [m] likewise.
        heard_times: [n] seconds; with ``reference_times`` words far apart in time never match.
        reference_times: [m] seconds.
        small: cells held in memory at once at the bottom of the recursion.
    """
    pair = _SequencePair(heard, reference, heard_times, reference_times)
    alignment = np.full(len(heard), -1, np.int64)
    pending = [(0, len(heard), 0, len(reference))]
    while pending:
        top, bottom, left, right = pending.pop()
        if bottom == top or left == right:
            continue
        if bottom - top == 1 or (bottom - top + 1) * (right - left + 1) <= largest_block:
            _trace(pair, alignment, top, bottom, left, right)
            continue
        middle = (top + bottom) // 2
        costs = _forwards(pair, top, middle, left, right)[-1] + _backwards(pair, middle, bottom, left, right)
        divide = left + int(costs.argmin())
        pending += [(top, middle, left, divide), (middle, bottom, divide, right)]
    return alignment


def _forwards(pair: _SequencePair, top: int, bottom: int, left: int, right: int, keep: bool = False) -> list[Numbers]:
    """Return the least costs of the rows up to ``bottom`` against each prefix; all rows if ``keep``, or the last."""
    gaps = np.arange(right - left + 1, dtype=np.int64) * _GAP
    rows = [gaps]
    for row in range(top, bottom):
        rows.append(_next_row(rows[-1], pair.costs(row, left, right), gaps))
        if not keep:
            del rows[0]
    return rows


def _backwards(pair: _SequencePair, top: int, bottom: int, left: int, right: int) -> Numbers:
    """Return the least costs of the rows from ``top`` on against each suffix."""
    gaps = np.arange(right - left + 1, dtype=np.int64) * _GAP
    best = gaps
    for row in range(bottom - 1, top - 1, -1):
        best = _next_row(best, pair.costs(row, left, right)[::-1], gaps)
    return best[::-1]


def _next_row(best: Numbers, costs: Numbers, gaps: Numbers) -> Numbers:
    """Add one word: aligned or as a gap; then any number of gaps on the other side."""
    row = best + _GAP
    np.minimum(row[1:], best[:-1] + costs, out=row[1:])
    return np.minimum.accumulate(row - gaps) + gaps


def _trace(pair: _SequencePair, alignment: Numbers, top: int, bottom: int, left: int, right: int) -> None:
    """Trace the best alignment of a small block back from its end into ``alignment``."""
    rows = _forwards(pair, top, bottom, left, right, keep=True)
    row, column = bottom - top, right - left
    while row and column:
        cost = rows[row][column]
        if cost == rows[row][column - 1] + _GAP:
            column -= 1
        elif cost == rows[row - 1][column] + _GAP:
            row -= 1
        else:
            row, column = row - 1, column - 1
            alignment[top + row] = left + column
