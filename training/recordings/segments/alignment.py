"""The best global alignment of two sequences of words, in memory that grows with their lengths, not their product.

Needleman and Wunsch 1970 with linear gap costs, found by the divide and conquer of Hirschberg 1975: the best costs of
the two halves of one sequence against every prefix and suffix of the other say where to divide the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
_GAP, _OTHER, _ALONE = 4, 7, 1
"""Costs of a word without one opposite, of two different words, and of a match with no match at either side: of several
equal words the one in the same company is opposite. Two gaps are dearer than a pair of different words."""
_SMALL = 1 << 18  # cells that are kept at once at the bottom of the recursion


@dataclass(frozen=True)
class _Pair:
    heard: Numbers
    said: Numbers
    heard_times: npt.NDArray[np.float64] | None
    said_times: npt.NDArray[np.float64] | None
    slack: float

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
            near = np.abs(self.said_times[low:high] - self.heard_times[row]) <= self.slack
            found[low - first : high - first] &= near
        return found


def align(
    heard: Numbers,
    said: Numbers,
    heard_times: npt.NDArray[np.float64] | None = None,
    said_times: npt.NDArray[np.float64] | None = None,
    slack: float = 10.0,
) -> Numbers:
    """Return for each heard word the position of the said word opposite, -1 where there is none; they only grow.

    Args:
        heard: [n] numbers that are equal where words are.
        said: [m] likewise.
        heard_times: [n] seconds; with ``said_times`` words further apart than ``slack`` are never taken for the same.
        said_times: [m] seconds.
    """
    pair = _Pair(heard, said, heard_times, said_times, slack)
    opposite = np.full(len(heard), -1, np.int64)
    waiting = [(0, len(heard), 0, len(said))]
    while waiting:
        top, bottom, left, right = waiting.pop()
        if bottom == top or left == right:
            continue
        if bottom - top == 1 or (bottom - top + 1) * (right - left + 1) <= _SMALL:
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
