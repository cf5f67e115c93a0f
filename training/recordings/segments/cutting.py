"""Where somebody speaks in a recording, and where it is cut: in pauses, as long a segment as fits, never in a word.

Speech is where the probability of :mod:`training.tasks.audio` stays above 0.35 and somewhere reaches 0.5: the
thresholds of Silero's own ``get_speech_timestamps``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from training.tasks.audio import BEGINS, SECONDS, Activity

_GOES_ON = 0.35
_SHORTEST = 0.1  # seconds: what is shorter is a click
PAUSE = 0.2
"""Seconds of silence that a cut needs: the closure of a consonant is shorter."""
LONG_PAUSE = 2.0
"""Seconds of silence that no segment holds."""
PAD = 0.15
"""Seconds that a segment begins before its speech and ends after it, where the pause has them."""


@dataclass(frozen=True)
class SegmentOptions:
    """What becomes a clip."""

    longest: float = 30.0
    """Seconds that a segment has at most."""
    agreement: float = 0.6
    """Segments whose text agrees less with what was heard are left out."""
    draft: bool = False
    """Without a transcript: take what the model heard as text."""


class TimeSpan(NamedTuple):
    """A part of a recording, in seconds from its beginning."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


PlaceCut = Callable[[TimeSpan], float]
"""Gives the second at which speech without a pause is cut, inside the stretch that may hold it."""


def spoken(activity: Activity, pause: float) -> list[TimeSpan]:
    """Return the stretches of speech between silences of at least ``pause`` seconds."""
    found: list[TimeSpan] = []
    edges = np.diff(np.concatenate([[False], activity.speech >= _GOES_ON, [False]]).astype(np.int8))
    for first, last in zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist()):
        if activity.speech[first:last].max() < BEGINS:
            continue
        stretch = TimeSpan(first * SECONDS, last * SECONDS)
        if found and stretch.start - found[-1].end < pause:
            found[-1] = TimeSpan(found[-1].start, stretch.end)
        else:
            found.append(stretch)
    return [stretch for stretch in found if stretch.seconds >= _SHORTEST]


def within_speech(stretches: Sequence[TimeSpan], start: float, end: float) -> TimeSpan:
    """Take the silence off a word that reaches into a pause: time warping gives a pause to one of its neighbours.

    Args:
        stretches: speech, in order.
    """
    shared = [TimeSpan(max(one.start, start), min(one.end, end)) for one in stretches]
    best = max(shared, key=lambda one: one.seconds, default=TimeSpan(start, end))
    return best if best.seconds > 0 else TimeSpan(start, end)


def quietest(activity: Activity, within: Iterable[TimeSpan]) -> float | None:
    """Return the middle of the quietest tenth of a second inside some stretches; ``None`` where they hold nothing."""
    smooth = np.convolve(activity.loudness, np.ones(3, np.float32) / 3, mode="same")
    best: tuple[float, int] | None = None
    for stretch in within:
        first, last = max(0, round(stretch.start / SECONDS)), min(len(smooth), round(stretch.end / SECONDS) + 1)
        if first < last:
            frame = first + int(smooth[first:last].argmin())
            best = min(best or (np.inf, 0), (float(smooth[frame]), frame))
    return None if best is None else (best[1] + 0.5) * SECONDS


def cut(activity: Activity, longest: float, place_cut: PlaceCut) -> list[TimeSpan]:
    """Return the segments of a recording, in order and apart from each other.

    Each holds speech between two pauses, as much as fits into ``longest`` seconds; where there is a choice, the longest
    pause is cut. Speech of more than ``longest`` seconds without a pause is cut where ``place_cut`` says.
    """
    stretches = [part for whole in spoken(activity, PAUSE) for part in _fitting(whole, longest - 2 * PAD, place_cut)]
    groups: list[list[TimeSpan]] = [[]]
    for stretch in stretches:
        last = groups[-1]
        if last and stretch.start - last[-1].end >= LONG_PAUSE:
            groups.append([])
        elif last and stretch.end - last[0].start > longest - 2 * PAD:
            groups[-1:] = _halves(last)
            while groups[-1] and stretch.end - groups[-1][0].start > longest - 2 * PAD:
                groups.append([])
        groups[-1].append(stretch)
    return padded([group for group in groups if group], activity.seconds)


def _fitting(whole: TimeSpan, longest: float, place_cut: PlaceCut) -> list[TimeSpan]:
    parts = []
    while whole.seconds > longest:
        at = place_cut(TimeSpan(whole.start + longest / 2, whole.start + longest))
        parts.append(TimeSpan(whole.start, at))
        whole = TimeSpan(at, whole.end)
    return [*parts, whole]


def _halves(group: list[TimeSpan]) -> list[list[TimeSpan]]:
    """Divide stretches at the longest pause of their second half, the end of the last included."""
    middle = (group[0].start + group[-1].end) / 2
    pauses = [(after.start - before.end, number) for number, (before, after) in enumerate(pairwise(group), 1)
              if before.end >= middle]  # fmt: skip
    if not pauses:
        return [group, []]
    _, number = max(pauses)
    return [group[:number], group[number:]]


def padded(groups: Sequence[Sequence[TimeSpan]], seconds: float) -> list[TimeSpan]:
    """Return a segment for each group of stretches: with :data:`PAD` at both ends, or half of a shorter pause."""
    ends = [0.0, *(group[-1].end for group in groups)]
    starts = [*(group[0].start for group in groups), seconds]
    segments = []
    for number, group in enumerate(groups):
        before = group[0].start - ends[number]
        after = starts[number + 1] - group[-1].end
        first = group[0].start - min(PAD, max(0.0, before if number == 0 else before / 2))
        last = group[-1].end + min(PAD, max(0.0, after if number + 1 == len(groups) else after / 2))
        segments.append(TimeSpan(first, last))
    return segments


def inner(activity: Activity, segment: TimeSpan) -> list[TimeSpan]:
    """Return what a segment falls into when it is cut at each of its pauses."""
    groups = [
        [TimeSpan(max(stretch.start, segment.start), min(stretch.end, segment.end))]
        for stretch in spoken(activity, PAUSE)
        if stretch.end > segment.start and stretch.start < segment.end
    ]
    return [
        TimeSpan(max(part.start, segment.start), min(part.end, segment.end)) for part in padded(groups, segment.end)
    ]
