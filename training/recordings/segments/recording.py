"""One long recording: where it is cut, what is said in each segment, and which segments are left out, with the reason.

The file is read three times as a stream, never as a whole: for the pauses, for the model, and for the clips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

from training.recordings.segments.cutting import (
    PAUSE,
    SegmentOptions,
    TimeSpan,
    cut,
    inner,
    quietest,
    spoken,
    within_speech,
)
from training.recordings.segments.hearing import HeardWord, Hearer
from training.recordings.segments.matching import MISSED, Match, keys_of, match, timed
from training.recordings.segments.transcript import Transcript, joined
from training.tasks.audio import RATE, SECONDS, Activity, SoundStream, decode, listen_for_speech, stream
from training.tasks.base import Progress
from training.tasks.sound_file import AudioError, Samples
from training.tasks.word_errors import normalizer_for

_TOGETHER = 8  # pieces that the model hears at a time
_NEAR = 0.12  # seconds around a gap between words in which the quietest place is looked for
_SHORTEST = 0.3  # seconds: what is shorter is not worth a clip
_CUT_OFF = "the recording is damaged there"


@dataclass(frozen=True)
class Segment:
    """A part of a recording with its text."""

    stretch: TimeSpan
    text: str = ""
    heard: str = ""
    agreement: float = 0.0
    reason: str = ""
    """Why it is left out; empty where it is not."""
    words: tuple[HeardWord, ...] = ()
    """The words of ``text`` with times."""


@dataclass(frozen=True)
class Segments:
    """What became of one recording."""

    seconds: float
    found: list[Segment] = field(default_factory=list)
    transcript_words: int = 0
    given_words: int = 0
    """Words of the transcript that are in the text of a segment that is kept."""
    damage: str = ""
    """Why it cannot be read to its end; what comes before is used."""

    @property
    def kept(self) -> list[Segment]:
        return [segment for segment in self.found if not segment.reason]

    @property
    def left_out(self) -> list[Segment]:
        return [segment for segment in self.found if segment.reason]


def segment_recording(
    path: Path, transcript: Transcript | None, listener: Hearer | None, options: SegmentOptions, progress: Progress
) -> Segments:
    """Cut a recording up to where it is damaged, and give each segment its text.

    Raises:
        AudioError: the recording cannot be read.
    """
    sound = SoundStream(path, RATE)
    sound.close()
    intact = _Intact(path)
    activity = listen_for_speech(intact, lambda done: progress("finding speech", int(done), int(sound.seconds) + 1))
    activity = _up_to(activity, intact.seconds)
    ear = _Ear(path, listener, progress) if listener and (transcript or options.draft) else None
    longest = min(options.longest, listener.seconds) if listener else options.longest
    stretches = cut(activity, longest, lambda part: _place(activity, ear, part))
    stretches = [stretch for stretch in stretches if stretch.seconds >= _SHORTEST]
    before_damage = [stretch for stretch in stretches if stretch.end < intact.seconds - _SHORTEST]
    cut_off = [Segment(stretch, reason=_CUT_OFF) for stretch in stretches[len(before_damage) :]]
    segments = _with_texts(activity, ear, transcript, before_damage, options.agreement)
    return replace(segments, found=segments.found + cut_off, damage=intact.error)


class _Intact:
    """The samples of a recording up to where it is damaged, to be gone through once."""

    def __init__(self, path: Path) -> None:
        self.path, self.error, self.seconds = path, "", math.inf

    def __iter__(self) -> Iterator[Samples]:
        try:
            yield from stream(self.path, RATE)
        except AudioError as error:
            if not error.intact:
                raise
            self.error, self.seconds = str(error), error.intact


def _up_to(activity: Activity, seconds: float) -> Activity:
    count = int(min(seconds, activity.seconds) / SECONDS)
    return Activity(activity.speech[:count], activity.loudness[:count])


def _with_texts(
    activity: Activity, ear: _Ear | None, transcript: Transcript | None, stretches: list[TimeSpan], agreement: float
) -> Segments:
    if ear is None:
        return Segments(activity.seconds, [Segment(stretch) for stretch in stretches])
    heard = ear.hear(stretches)
    if transcript is None:
        return Segments(
            activity.seconds,
            [_drafted(stretch, words, ear.listener.language) for stretch, words in zip(stretches, heard)],
        )
    return _matched(activity, ear, transcript, stretches, heard, agreement)


@dataclass(frozen=True)
class _Ear:
    """Hears stretches of one recording."""

    path: Path
    listener: Hearer
    progress: Progress

    def hear(self, stretches: Sequence[TimeSpan], phase: str = "listening") -> list[list[HeardWord]]:
        """Return the words of each stretch, in one pass over the file."""
        heard: list[list[HeardWord]] = []
        for some, sound in batches(self.path, stretches):
            heard += self.listener.hear(sound, [stretch.start for stretch in some])
            self.progress(phase, len(heard), len(stretches))
        return heard


def batches(path: Path, stretches: Sequence[TimeSpan]) -> Iterator[tuple[list[TimeSpan], list[Samples]]]:
    """Yield some stretches at a time with their samples, in one pass over the file."""
    both = zip(stretches, pieces(path, stretches))
    while some := list(islice(both, _TOGETHER)):
        yield [stretch for stretch, _ in some], [samples for _, samples in some]


def pieces(path: Path, stretches: Sequence[TimeSpan]) -> Iterator[Samples]:
    """Yield the samples of stretches that follow one another; of what lies beyond the end there is none."""
    sound = SoundStream(path, RATE)
    for stretch in stretches:
        first, last = round(stretch.start * RATE), round(stretch.end * RATE)
        yield sound.window(first, last - first).copy()
    sound.close()


def _place(activity: Activity, ear: _Ear | None, part: TimeSpan) -> float:
    """Return where speech without a pause is cut: the quietest place between two words as a model hears them."""
    gaps = [part]
    if ear is not None:
        words: Sequence[HeardWord] = ()
        with suppress(AudioError):  # it is damaged nearby
            (words,) = ear.listener.hear([decode(ear.path, RATE, part.seconds, part.start).samples], [part.start])
        between = [TimeSpan(before.end - _NEAR, after.start + _NEAR) for before, after in pairwise(words)]
        gaps = [gap for gap in between if part.start < gap.start and gap.end < part.end] or gaps
    found = quietest(activity, gaps)
    return min(max(found or part.end, part.start), part.end)


def _drafted(stretch: TimeSpan, words: Sequence[HeardWord], language: str) -> Segment:
    text = joined((word.text for word in words), language)
    return Segment(stretch, text, text, 0.0, "" if text else "the model hears no words", tuple(words))


def _matched(
    activity: Activity,
    ear: _Ear,
    transcript: Transcript,
    stretches: list[TimeSpan],
    heard: list[list[HeardWord]],
    bound: float,
) -> Segments:
    """Match once; cut what agrees too little at all its pauses, hear the parts, and match again."""
    normalize = normalizer_for(ear.listener.language)
    keys = keys_of([transcript.word(number) for number in range(len(transcript.words))])
    found = match(heard, transcript, normalize, keys, ear.listener.language)
    parts = [
        [stretch] if not _reason(one, bound) else inner(activity, stretch) or [stretch]
        for stretch, one in zip(stretches, found)
    ]
    finer = [part for some in parts if len(some) > 1 for part in some if part.seconds >= _SHORTEST]
    if finer:
        again = dict(zip(finer, ear.hear(finer, "listening to parts")))
        known = dict(zip(stretches, heard)) | again
        stretches = [part for some in parts for part in some if part in known]
        heard = [known[part] for part in stretches]
        found = match(heard, transcript, normalize, keys, ear.listener.language)
    language, speech = ear.listener.language, spoken(activity, PAUSE)
    segments = []
    for stretch, words, one in zip(stretches, heard, found):
        text, said = transcript.between(one.first, one.end), joined((word.text for word in words), language)
        inside = [part for part in speech if part.end > stretch.start and part.start < stretch.end]
        times = tuple(
            HeardWord(word.text, *within_speech(inside, word.start, word.end)) for word in timed(words, text, language)
        )
        segments.append(Segment(stretch, text, said, one.agreement, _reason(one, bound), times))
    given = sum(one.end - one.first for one, segment in zip(found, segments) if not segment.reason)
    return Segments(activity.seconds, segments, len(transcript.words), given)


def _reason(one: Match, bound: float) -> str:
    """Say why a segment is left out; nothing where it is not."""
    if one.first == one.end:
        return "no part of the transcript matches"
    if one.agreement < bound:
        return f"agreement below {bound:g}"
    return "words in a row are only heard, or only in the transcript" if one.missed > MISSED else ""
