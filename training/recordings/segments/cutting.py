"""Where a recording is cut: in pauses, as long a segment as fits, and never through a word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from training.recordings.segments.sound import Stretch
from training.recordings.segments.voice import Activity, spoken

PAUSE = 0.2
"""Seconds of silence that a cut needs: the closure of a consonant is shorter."""
LONG_PAUSE = 2.0
"""Seconds of silence that no segment holds."""
PAD = 0.15
"""Seconds that a segment begins before its speech and ends after it, where the pause has them."""

PlaceCut = Callable[[Stretch], float]
"""Gives the second at which speech without a pause is cut, inside the stretch that may hold it."""


def cut(activity: Activity, longest: float, place_cut: PlaceCut) -> list[Stretch]:
    """Return the segments of a recording, in order and apart from each other.

    Each holds speech between two pauses, as much as fits into ``longest`` seconds; where there is a choice, the longest
    pause is cut. Speech of more than ``longest`` seconds without a pause is cut where ``place_cut`` says.
    """
    stretches = [part for whole in spoken(activity, PAUSE) for part in _fitting(whole, longest - 2 * PAD, place_cut)]
    groups: list[list[Stretch]] = [[]]
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


def _fitting(whole: Stretch, longest: float, place_cut: PlaceCut) -> list[Stretch]:
    parts = []
    while whole.seconds > longest:
        at = place_cut(Stretch(whole.start + longest / 2, whole.start + longest))
        parts.append(Stretch(whole.start, at))
        whole = Stretch(at, whole.end)
    return [*parts, whole]


def _halves(group: list[Stretch]) -> list[list[Stretch]]:
    """Divide stretches at the longest pause of their second half, the end of the last included."""
    middle = (group[0].start + group[-1].end) / 2
    pauses = [(after.start - before.end, number) for number, (before, after) in enumerate(pairwise(group), 1)
              if before.end >= middle]  # fmt: skip
    if not pauses:
        return [group, []]
    _, number = max(pauses)
    return [group[:number], group[number:]]


def padded(groups: Sequence[Sequence[Stretch]], seconds: float) -> list[Stretch]:
    """Return a segment for each group of stretches: with :data:`PAD` at both ends, or half of a shorter pause."""
    ends = [0.0, *(group[-1].end for group in groups)]
    starts = [*(group[0].start for group in groups), seconds]
    segments = []
    for number, group in enumerate(groups):
        before = group[0].start - ends[number]
        after = starts[number + 1] - group[-1].end
        first = group[0].start - min(PAD, max(0.0, before if number == 0 else before / 2))
        last = group[-1].end + min(PAD, max(0.0, after if number + 1 == len(groups) else after / 2))
        segments.append(Stretch(first, last))
    return segments


def inner(activity: Activity, segment: Stretch) -> list[Stretch]:
    """Return what a segment falls into when it is cut at each of its pauses."""
    groups = [
        [Stretch(max(stretch.start, segment.start), min(stretch.end, segment.end))]
        for stretch in spoken(activity, PAUSE)
        if stretch.end > segment.start and stretch.start < segment.end
    ]
    return [Stretch(max(part.start, segment.start), min(part.end, segment.end)) for part in padded(groups, segment.end)]
