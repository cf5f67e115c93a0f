"""What is said in sound files of any length, with a finished model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.tasks.audio import SoundStream, hears_voice
from training.tasks.sound_file import AudioError, Samples
from training.tasks.whisper.listening import (
    SILENT,
    TimedText,
    Transcriber,
    divided,
    is_silence,
    probabilities,
    silence,
    write_with_times,
)

_SEARCH = 0.2  # share of the window, to each side, in which the quietest place to cut is looked for
_FULL = 0.9  # share of the window that pieces fill on average: the rest is room to choose the cut
_QUIET = 0.1  # seconds over which loudness is measured
_LONGEST_TEXT = 224
"""Tokens of one window with times, as in the paper's code: half of the decoder's positions."""


@dataclass(frozen=True)
class TranscriptionResult:
    """What was heard in one file."""

    file: Path
    text: str
    seconds: float
    """Length of the recording."""
    error: str = ""
    """Why the file could not be read to its end, and what was said up to there is here; empty if it could."""
    segments: tuple[TimedText, ...] = ()
    """The same with times: those that the model wrote, or of the windows it heard."""
    language: str = ""
    """Code."""


@dataclass(frozen=True)
class TranscriptionOptions:
    """How a model is to write."""

    language: str = ""
    prompt: str = ""
    """Taken as said before each window."""
    timestamps: bool | None = None
    """Whether the model writes times; ``None``: for recordings longer than its window, if it can."""
    times_wanted: bool = False
    """With ``timestamps = None``: for all recordings, if it can."""
    max_new_tokens: int = 440


def transcribe(
    model_dir: str | Path,
    files: Sequence[Path],
    device: str = "auto",
    options: TranscriptionOptions = TranscriptionOptions(),
    batch_size: int = 8,
) -> Iterator[TranscriptionResult]:
    """Transcribe sound files of any length, in their order; no more than a window of each is in memory.

    A recording longer than the model's window is heard in windows that begin where the words of the one before ended
    (:mod:`training.tasks.whisper.listening`); a model that knows no times cuts it at its quietest places. A file that
    cannot be read to its end gives a transcript of what can, with ``error``; the others go on.

    Raises:
        BadInput: the model cannot be used, does not know the language, or takes no such prompt or times.
    """
    listener = _WindowTranscriber(model_dir, device, options)
    return _transcribe_all(listener, files, batch_size)


def pieces_of(count: int, longest: int) -> int:
    """Return into how many pieces so many samples are cut."""
    return 1 if count <= longest else math.ceil(count / (_FULL * longest))


def next_cut(head: Samples, remaining: int, rate: int, longest: int, left: int) -> int:
    """Return how many samples the next of ``left`` pieces takes of ``remaining`` ones.

    The cut is at the quietest place near where it would be even, so that words stay whole and no piece is a rest of
    silence, in which a model hears words that nobody said.

    Args:
        head: the first ``longest`` of the samples.
    """
    if left <= 1 and remaining <= longest:
        return remaining
    left, slack = max(left, 2, math.ceil(remaining / longest)), round(_SEARCH * longest)
    even = remaining // left
    earliest = max(1, even - slack, remaining - (left - 1) * longest)
    return _quietest(head, rate, earliest, min(longest, even + slack))


def _quietest(samples: Samples, rate: int, earliest: int, latest: int) -> int:
    """Position from ``first`` to ``last`` around which a tenth of a second is quietest."""
    half = max(1, round(_QUIET * rate / 2))
    start = max(0, earliest - half)
    energy = np.concatenate([[0.0], np.cumsum(samples[start : latest + half].astype(np.float64) ** 2)])
    positions = np.arange(earliest, latest + 1)
    before = np.clip(positions - half - start, 0, len(energy) - 1)
    after = np.clip(positions + half - start, 0, len(energy) - 1)
    return earliest + int((energy[after] - energy[before]).argmin())


@dataclass
class _Recording:
    """A file that is being heard."""

    file: Path
    stream: SoundStream | None
    error: str = ""
    at: int = 0
    """Sample that the next window begins with."""
    left: int = 0
    """Pieces that it is still cut into where the model predicts no times; 0: not known."""
    language: str = ""
    segments: list[TimedText] = field(default_factory=list)
    done: bool = False

    def close(self) -> None:
        """There is nothing more to hear."""
        self.done = True
        if self.stream is not None:
            self.error = self.error or self.stream.error
            self.stream.close()

    @property
    def transcript(self) -> TranscriptionResult:
        text = " ".join(segment.text for segment in self.segments)
        seconds = self.stream.seconds if self.stream else 0.0
        return TranscriptionResult(self.file, text, seconds, self.error, tuple(self.segments), self.language)


@dataclass(frozen=True)
class _Window:
    """What is heard next of a recording."""

    recording: _Recording
    piece: Samples
    timed: bool


class _WindowTranscriber(Transcriber):
    """A model that is ready to hear windows of sound."""

    def __init__(self, model_dir: str | Path, device: str, options: TranscriptionOptions) -> None:
        super().__init__(model_dir, device, options.language)
        self.wrapper.write_as(options.prompt, options.timestamps)
        self.options = options
        self.model.eval()  # read here: whoever asks hears at once that it cannot be

    def open(self, file: Path) -> _Recording:
        try:
            return _Recording(file, SoundStream(file, self.wrapper.log_mel.rate))
        except AudioError as error:
            return _Recording(file, None, str(error), done=True)

    def next_window(self, recording: _Recording) -> _Window | None:
        """Return what is to be heard next; ``None`` at the end."""
        log_mel, stream = self.wrapper.log_mel, recording.stream
        if stream is None or recording.done:
            return None
        try:
            piece = stream.window(recording.at, log_mel.n_samples)
            alone = stream.ends_within(recording.at + len(piece))
        except AudioError as error:
            recording.error = str(error)
            recording.close()
            return None
        if not len(piece) or (recording.at and len(piece) < log_mel.rate // 10):
            recording.close()
            return None
        timed = self.options.timestamps
        if timed is None:
            single = alone and recording.at == 0
            timed = self.wrapper.knows_times and (self.options.times_wanted or not single)
        if not timed and not alone:
            total = max(round(stream.seconds * log_mel.rate) - recording.at, len(piece) + 1)
            recording.left = recording.left or pieces_of(total, log_mel.n_samples)
            piece = piece[: next_cut(piece, total, log_mel.rate, log_mel.n_samples, recording.left)]
            recording.left -= 1
        return _Window(recording, piece, timed)

    @torch.no_grad()
    def hear(self, windows: Sequence[_Window]) -> None:
        """Add what is said in some windows to their recordings, and move on in these."""
        log_mel = self.wrapper.log_mel
        encoded = self.encode([window.piece for window in windows])
        self._find_languages(windows, encoded)
        languages = [window.recording.language for window in windows]
        if not windows[0].timed:
            bound = min(self.options.max_new_tokens, self.wrapper.room)
            generated = [result.text for result in self.wrapper.generate(self.model, encoded, languages, bound)]
            for window, text in zip(windows, self._without_silence(windows, encoded, languages, generated)):
                self._add(window, [(0.0, len(window.piece) / log_mel.rate, text)], len(window.piece))
            return
        bound = min(self.options.max_new_tokens, _LONGEST_TEXT, self.wrapper.room)
        voices = [self._voice(window) for window in windows]
        written = write_with_times(self.wrapper, self.model, encoded, languages, bound, voices)
        for window, tokens in zip(windows, written):
            segments, move = divided(tokens, self.wrapper.first_time, len(window.piece) / log_mel.rate)
            texts = [(start, end, self.wrapper.text(tokens_of_segment)) for start, end, tokens_of_segment in segments]
            self._add(window, texts, round(move * log_mel.rate))

    def _without_silence(
        self, windows: Sequence[_Window], encoded: Any, languages: Sequence[str], texts: Sequence[str]
    ) -> list[str]:
        """Return the texts, empty ones for windows in which nobody speaks."""
        no_speech = silence(self.wrapper, self.model, encoded)
        if max(no_speech) <= SILENT:
            return list(texts)
        confidences, _ = probabilities(self.wrapper, self.model, encoded, languages, texts)
        silent = (
            is_silence(probability, confidence, self._voice(window))
            for probability, confidence, window in zip(no_speech, confidences, windows)
        )
        return ["" if is_silent else text for is_silent, text in zip(silent, texts)]

    def _voice(self, window: _Window) -> Callable[[], bool]:
        """Return what tells whether somebody speaks in a window."""
        return lambda: hears_voice(window.piece, self.wrapper.log_mel.rate)

    def _find_languages(self, windows: Sequence[_Window], encoded: object) -> None:
        """A recording keeps the language of its first window."""
        if not self.language and not all(window.recording.language for window in windows):
            codes = self.wrapper.detect_languages(self.model, encoded)
        else:
            codes = [self.language] * len(windows)
        for window, code in zip(windows, codes, strict=True):
            window.recording.language = window.recording.language or code

    def _add(self, window: _Window, segments: Sequence[tuple[float, float, str]], move: int) -> None:
        begin = window.recording.at / self.wrapper.log_mel.rate
        window.recording.segments += [
            TimedText(begin + start, begin + end, text) for start, end, text in segments if text
        ]
        window.recording.at += move


def _transcribe_all(
    listener: _WindowTranscriber, files: Iterable[Path], batch_size: int
) -> Iterator[TranscriptionResult]:
    """Hear the next window of several files at once; a file comes out when it was heard to its end."""
    coming, queue = iter(files), list[_Recording]()
    try:
        while True:
            batch = [window for recording in queue if (window := listener.next_window(recording)) is not None]
            while len(batch) < batch_size and (file := next(coming, None)) is not None:
                queue.append(listener.open(file))
                if (window := listener.next_window(queue[-1])) is not None:
                    batch.append(window)
            while queue and queue[0].done:
                yield queue.pop(0).transcript
            if not batch:
                return
            for timed in (False, True):
                if alike := [window for window in batch if window.timed is timed]:
                    listener.hear(alike)
    finally:
        for recording in queue:
            recording.close()
