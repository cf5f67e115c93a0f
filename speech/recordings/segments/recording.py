"""One long recording: where it is cut, the text of each segment, and which segments are left out, with the reason.

The file is read three times as a stream, never as a whole: for the pauses, for the model, and for the clips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

from profiles.quantities import setting_text
from speech.data.audio import RATE, SECONDS, Activity, SoundStream, decode, detect_speech, stream
from speech.data.sound_file import AudioError, Samples
from speech.recordings.segments.cutting import (
    SHORTEST_PAUSE,
    SegmentOptions,
    TimeSpan,
    cut_at_pauses,
    quietest_second,
    speech_spans,
    split_at_all_pauses,
    trim_to_speech,
)
from speech.recordings.segments.matching import LONGEST_MISSED_RUN, Match, match_transcript, time_words, word_keys
from speech.recordings.segments.transcribing import TimedTranscriber, TimedWord
from speech.recordings.segments.transcript import Transcript, join_words
from speech.scoring.word_errors import normalizer_for
from training.tasks.base import Progress

_BATCH_SIZE = 8  # spans that the model transcribes at a time
_MARGIN = 0.12  # seconds around a gap between words in which the quietest moment is looked for
_SHORTEST = 0.3  # seconds: what is shorter is not worth a clip
_DAMAGED = "the recording is damaged there"


@dataclass(frozen=True)
class Segment:
    """A part of a recording with its text."""

    span: TimeSpan
    text: str = ""
    heard: str = ""
    agreement: float = 0.0
    reason: str = ""
    """Why it is left out; empty: it is accepted."""
    words: tuple[TimedWord, ...] = ()
    """The words of ``text`` with times."""


@dataclass(frozen=True)
class SegmentedRecording:
    """One recording cut into segments."""

    seconds: float
    segments: list[Segment] = field(default_factory=list)
    transcript_words: int = 0
    matched_words: int = 0
    """Words of the transcript that are in the text of an accepted segment."""
    damage: str = ""
    """Why it cannot be read to its end; what comes before is used."""

    @property
    def accepted(self) -> list[Segment]:
        return [segment for segment in self.segments if not segment.reason]

    @property
    def left_out(self) -> list[Segment]:
        return [segment for segment in self.segments if segment.reason]


def segment_recording(
    path: Path,
    transcript: Transcript | None,
    transcriber: TimedTranscriber | None,
    options: SegmentOptions,
    progress: Progress,
) -> SegmentedRecording:
    """Cut a recording up to where it is damaged, and give each segment its text.

    Raises:
        AudioError: the recording cannot be read.
    """
    sound = SoundStream(path, RATE)
    sound.close()
    intact = _IntactSamples(path)
    activity = detect_speech(intact, lambda done: progress("finding speech", int(done), int(sound.seconds) + 1))
    activity = _up_to(activity, intact.seconds)
    span_transcriber = (
        _SpanTranscriber(path, transcriber, progress) if transcriber and (transcript or options.draft) else None
    )
    longest = min(options.longest, transcriber.seconds) if transcriber else options.longest
    spans = cut_at_pauses(activity, longest, lambda span: _cut_between_words(activity, span_transcriber, span))
    spans = [span for span in spans if span.seconds >= _SHORTEST]
    before_damage = [span for span in spans if span.end < intact.seconds - _SHORTEST]
    cut_off = [Segment(span, reason=_DAMAGED) for span in spans[len(before_damage) :]]
    segmented = _with_texts(activity, span_transcriber, transcript, before_damage, options.agreement)
    return replace(segmented, segments=segmented.segments + cut_off, damage=intact.error)


class _IntactSamples:
    """The samples of a recording up to where it is damaged; can be iterated once."""

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
    activity: Activity,
    span_transcriber: _SpanTranscriber | None,
    transcript: Transcript | None,
    spans: list[TimeSpan],
    lowest_agreement: float,
) -> SegmentedRecording:
    if span_transcriber is None:
        return SegmentedRecording(activity.seconds, [Segment(span) for span in spans])
    heard = span_transcriber.transcribe(spans)
    if transcript is None:
        return SegmentedRecording(
            activity.seconds,
            [_draft_segment(span, words, span_transcriber.transcriber.language) for span, words in zip(spans, heard)],
        )
    return _match_segments(activity, span_transcriber, transcript, spans, heard, lowest_agreement)


@dataclass(frozen=True)
class _SpanTranscriber:
    """Transcribes spans of one recording."""

    path: Path
    transcriber: TimedTranscriber
    progress: Progress

    def transcribe(self, spans: Sequence[TimeSpan], phase: str = "listening") -> list[list[TimedWord]]:
        """Return the words of each span, in one pass over the file."""
        heard: list[list[TimedWord]] = []
        for batch, samples in batches(self.path, spans):
            heard += self.transcriber.transcribe(samples, [span.start for span in batch])
            self.progress(phase, len(heard), len(spans))
        return heard


def batches(path: Path, spans: Sequence[TimeSpan]) -> Iterator[tuple[list[TimeSpan], list[Samples]]]:
    """Yield batches of spans with their samples, in one pass over the file."""
    with_samples = zip(spans, pieces(path, spans))
    while batch := list(islice(with_samples, _BATCH_SIZE)):
        yield [span for span, _ in batch], [samples for _, samples in batch]


def pieces(path: Path, spans: Sequence[TimeSpan]) -> Iterator[Samples]:
    """Yield the samples of each span, in order of time; none beyond the end of the file."""
    sound = SoundStream(path, RATE)
    for span in spans:
        first_sample, end_sample = round(span.start * RATE), round(span.end * RATE)
        yield sound.window(first_sample, end_sample - first_sample).copy()
    sound.close()


def _cut_between_words(activity: Activity, span_transcriber: _SpanTranscriber | None, span: TimeSpan) -> float:
    """Return the second at which speech without a pause is cut: the quietest between two words of the model."""
    gaps = [span]
    if span_transcriber is not None:
        words: Sequence[TimedWord] = ()
        with suppress(AudioError):  # it is damaged nearby
            (words,) = span_transcriber.transcriber.transcribe(
                [decode(span_transcriber.path, RATE, span.seconds, span.start).samples], [span.start]
            )
        between = [TimeSpan(before.end - _MARGIN, after.start + _MARGIN) for before, after in pairwise(words)]
        gaps = [gap for gap in between if span.start < gap.start and gap.end < span.end] or gaps
    cut_second = quietest_second(activity, gaps)
    return min(max(cut_second or span.end, span.start), span.end)


def _draft_segment(span: TimeSpan, words: Sequence[TimedWord], language: str) -> Segment:
    text = join_words((word.text for word in words), language)
    return Segment(span, text, text, 0.0, "" if text else "the model hears no words", tuple(words))


def _match_segments(
    activity: Activity,
    span_transcriber: _SpanTranscriber,
    transcript: Transcript,
    spans: list[TimeSpan],
    heard: list[list[TimedWord]],
    lowest_agreement: float,
) -> SegmentedRecording:
    """Match once; split segments that agree too little at all their pauses, transcribe these, and match again."""
    language = span_transcriber.transcriber.language
    normalize = normalizer_for(language)
    keys = word_keys([transcript.word(number) for number in range(len(transcript.words))])
    matches = match_transcript(heard, transcript, normalize, keys, language)
    splits = [
        [span] if not _reason(match, lowest_agreement) else split_at_all_pauses(activity, span) or [span]
        for span, match in zip(spans, matches)
    ]
    finer = [span for split in splits if len(split) > 1 for span in split if span.seconds >= _SHORTEST]
    if finer:
        heard_finer = dict(zip(finer, span_transcriber.transcribe(finer, "listening to parts")))
        heard_by_span = dict(zip(spans, heard)) | heard_finer
        spans = [span for split in splits for span in split if span in heard_by_span]
        heard = [heard_by_span[span] for span in spans]
        matches = match_transcript(heard, transcript, normalize, keys, language)
    speech = speech_spans(activity, SHORTEST_PAUSE)
    segments = []
    for span, words, match in zip(spans, heard, matches):
        text = transcript.text_between(match.start, match.end)
        heard_text = join_words((word.text for word in words), language)
        speech_inside = [
            speech_span for speech_span in speech if speech_span.end > span.start and speech_span.start < span.end
        ]
        timed_words = tuple(
            TimedWord(word.text, *trim_to_speech(speech_inside, word.start, word.end))
            for word in time_words(words, text, language)
        )
        reason = _reason(match, lowest_agreement)
        segments.append(Segment(span, text, heard_text, match.agreement, reason, timed_words))
    matched_words = sum(match.end - match.start for match, segment in zip(matches, segments) if not segment.reason)
    return SegmentedRecording(activity.seconds, segments, len(transcript.words), matched_words)


def _reason(match: Match, lowest_agreement: float) -> str:
    """Return why a segment is left out; empty if it is accepted."""
    if match.start == match.end:
        return "no part of the transcript matches"
    if match.agreement < lowest_agreement:
        return f"agreement below {setting_text(lowest_agreement)}"
    return "words in a row are only heard, or only in the transcript" if match.missed > LONGEST_MISSED_RUN else ""
