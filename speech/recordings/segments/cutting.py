"""Finds the speech in a recording and cuts it at pauses into segments as long as allowed, never inside a word.

Speech is where the probability of :mod:`speech.data.audio` stays above 0.35 and reaches 0.5 at least once:
the thresholds of Silero's ``get_speech_timestamps``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from speech.data.audio import SECONDS, SPEECH_THRESHOLD, Activity

_SPEECH_CONTINUES = 0.35
_SHORTEST = 0.1  # seconds: a shorter sound is a click
SHORTEST_PAUSE = 0.2
"""Seconds of silence that a cut needs: the closure of a consonant is shorter."""
LONG_PAUSE = 2.0
"""Seconds of silence that no segment holds."""
PADDING = 0.15
"""Seconds that a segment begins before its speech and ends after it, where the pause has them."""


@dataclass(frozen=True)
class SegmentOptions:
    """Options of ``segment``: which segments become clips."""

    longest: float = 30.0
    """Seconds that a segment has at most."""
    agreement: float = 0.6
    """Segments whose text agrees less with what was heard are left out."""
    draft: bool = False
    """Without a transcript: use the model's transcription as text."""


class TimeSpan(NamedTuple):
    """A part of a recording, in seconds from its beginning."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


ChooseCut = Callable[[TimeSpan], float]
"""Returns the second at which speech without a pause is cut, inside the span given."""


def speech_spans(activity: Activity, pause: float) -> list[TimeSpan]:
    """Return the spans of speech that lie between silences of at least ``pause`` seconds, in order."""
    spans: list[TimeSpan] = []
    edges = np.diff(np.concatenate([[False], activity.speech >= _SPEECH_CONTINUES, [False]]).astype(np.int8))
    for first_frame, end_frame in zip(np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist()):
        if activity.speech[first_frame:end_frame].max() < SPEECH_THRESHOLD:
            continue
        span = TimeSpan(first_frame * SECONDS, end_frame * SECONDS)
        if spans and span.start - spans[-1].end < pause:
            spans[-1] = TimeSpan(spans[-1].start, span.end)
        else:
            spans.append(span)
    return [span for span in spans if span.seconds >= _SHORTEST]


def trim_to_speech(speech: Sequence[TimeSpan], start: float, end: float) -> TimeSpan:
    """Trim a word that reaches into a pause: dynamic time warping adds a pause to one of its neighbours.

    Args:
        speech: spans of speech, in order.
        start: second at which the word starts.
        end: second at which it ends.
    """
    overlaps = [TimeSpan(max(span.start, start), min(span.end, end)) for span in speech]
    best = max(overlaps, key=lambda span: span.seconds, default=TimeSpan(start, end))
    return best if best.seconds > 0 else TimeSpan(start, end)


def quietest_second(activity: Activity, spans: Iterable[TimeSpan]) -> float | None:
    """Return the middle of the quietest tenth of a second inside the spans; ``None`` if they are empty."""
    smooth = np.convolve(activity.loudness, np.ones(3, np.float32) / 3, mode="same")
    best: tuple[float, int] | None = None
    for span in spans:
        first_frame, end_frame = max(0, round(span.start / SECONDS)), min(len(smooth), round(span.end / SECONDS) + 1)
        if first_frame < end_frame:
            frame = first_frame + int(smooth[first_frame:end_frame].argmin())
            best = min(best or (np.inf, 0), (float(smooth[frame]), frame))
    return None if best is None else (best[1] + 0.5) * SECONDS


def cut_at_pauses(activity: Activity, longest: float, choose_cut: ChooseCut) -> list[TimeSpan]:
    """Return the segments of a recording, in order; they do not overlap.

    Each holds speech between two pauses, as much as fits into ``longest`` seconds; where there is a choice, the longest
    pause is cut. Speech of more than ``longest`` seconds without a pause is cut where ``choose_cut`` says.
    """
    speech_seconds = longest - 2 * PADDING
    spans = [
        piece
        for span in speech_spans(activity, SHORTEST_PAUSE)
        for piece in _split_to_length(span, speech_seconds, choose_cut)
    ]
    groups: list[list[TimeSpan]] = [[]]
    for span in spans:
        group = groups[-1]
        if group and span.start - group[-1].end >= LONG_PAUSE:
            groups.append([])
        elif group and span.end - group[0].start > speech_seconds:
            groups[-1:] = _split_at_longest_pause(group)
            while groups[-1] and span.end - groups[-1][0].start > speech_seconds:
                groups.append([])
        groups[-1].append(span)
    return pad_groups([group for group in groups if group], activity.seconds)


def _split_to_length(remaining: TimeSpan, longest: float, choose_cut: ChooseCut) -> list[TimeSpan]:
    pieces = []
    while remaining.seconds > longest:
        cut_second = choose_cut(TimeSpan(remaining.start + longest / 2, remaining.start + longest))
        pieces.append(TimeSpan(remaining.start, cut_second))
        remaining = TimeSpan(cut_second, remaining.end)
    return [*pieces, remaining]


def _split_at_longest_pause(group: list[TimeSpan]) -> list[list[TimeSpan]]:
    """Split a group of spans at the longest pause that begins in its second half."""
    middle = (group[0].start + group[-1].end) / 2
    pauses = [(after.start - before.end, number) for number, (before, after) in enumerate(pairwise(group), 1)
              if before.end >= middle]  # fmt: skip
    if not pauses:
        return [group, []]
    _, number = max(pauses)
    return [group[:number], group[number:]]


def pad_groups(groups: Sequence[Sequence[TimeSpan]], seconds: float) -> list[TimeSpan]:
    """Return a segment for each group of spans: with :data:`PADDING` at both ends, or half of a shorter pause."""
    ends = [0.0, *(group[-1].end for group in groups)]
    starts = [*(group[0].start for group in groups), seconds]
    segments = []
    for number, group in enumerate(groups):
        before = group[0].start - ends[number]
        after = starts[number + 1] - group[-1].end
        start = group[0].start - min(PADDING, max(0.0, before if number == 0 else before / 2))
        end = group[-1].end + min(PADDING, max(0.0, after if number + 1 == len(groups) else after / 2))
        segments.append(TimeSpan(start, end))
    return segments


def split_at_all_pauses(activity: Activity, segment: TimeSpan) -> list[TimeSpan]:
    """Return the segments that result from cutting a segment at each of its pauses."""
    groups = [
        [TimeSpan(max(span.start, segment.start), min(span.end, segment.end))]
        for span in speech_spans(activity, SHORTEST_PAUSE)
        if span.end > segment.start and span.start < segment.end
    ]
    return [
        TimeSpan(max(span.start, segment.start), min(span.end, segment.end)) for span in pad_groups(groups, segment.end)
    ]
