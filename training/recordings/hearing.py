"""What is heard in recordings: each is fetched, decoded, measured, and written as 16 kHz mono if nothing speaks against
it; a model may tell its language."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import soundfile

from training.recordings.checks import RATE, Limits, Measures, judge, measure, to_16_bits
from training.recordings.fetching import Fetcher
from training.recordings.recording import Fault, NoSource, Reason, Recording, Unusable, UrlSource
from training.recordings.workplace import FORMS, Journal
from training.tasks.audio import AudioError, Samples, decode
from training.tasks.base import Progress
from training.tasks.speech_clips import FileSource

if TYPE_CHECKING:
    from training.recordings.recording import Source

_BATCH = 16  # clips of which a model tells the languages at once
_BEYOND = 0.5  # seconds decoded after the longest that is kept


def key_of(recording: Recording, form: str) -> str:
    """Return what a recording's sound is known by: it changes with the file, the part of it, and the form written."""
    parts = (recording.audio.stamp(), repr(recording.offset), repr(recording.duration), form)
    return hashlib.blake2b("\n".join(parts).encode("utf-8", "replace"), digest_size=16).hexdigest()


def hear(recording: Recording, target: Path, aside: Path, limits: Limits, fetcher: Fetcher, form: str) -> Measures:
    """Measure one recording; write it to ``target`` if :func:`judge` keeps it.

    Args:
        aside: a path of this recording alone, for what is half done.

    Raises:
        Unusable: it cannot be had or read.
        OSError: ``target`` cannot be written.
    """
    downloaded = aside.with_suffix(".download")
    try:
        source, fetched = _get(recording.audio, downloaded, fetcher)
        samples, measures = _decode(source, recording, limits, fetched)
    finally:
        downloaded.unlink(missing_ok=True)
    if samples is not None and judge(recording, measures, limits) is None:
        _write(samples, target, aside, form)
    return measures


def _get(audio: Source, downloaded: Path, fetcher: Fetcher) -> tuple[Path | bytes, int]:
    match audio:
        case UrlSource(url):
            count = fetcher.fetch(url, downloaded)
            return downloaded, count
        case FileSource(path):
            return path, 0
        case NoSource(text):
            raise Unusable(Reason.NOT_THERE, text)
        case _:
            try:
                return audio.read(), 0
            except OSError as error:
                raise Unusable(Reason.NOT_THERE, error.strerror or str(error)) from error


def _decode(
    source: Path | bytes, recording: Recording, limits: Limits, fetched: int
) -> tuple[Samples | None, Measures]:
    """Samples are ``None`` where the recording is too long to be decoded whole."""
    if not (len(source) if isinstance(source, bytes) else _size(source)):
        raise Unusable(Reason.EMPTY, "an empty file")
    most = limits.longest + _BEYOND
    wanted = most if recording.duration is None else min(recording.duration, most)
    try:
        audio = decode(source, RATE, wanted, recording.offset)
    except AudioError as error:
        raise Unusable(Reason.UNREADABLE, str(error)) from error
    rest = audio.seconds - recording.offset
    seconds = rest if recording.duration is None else min(rest, recording.duration)
    if seconds > limits.longest:
        return None, Measures(round(seconds, 3), fetched=fetched)
    return audio.samples, measure(audio.samples, fetched)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise Unusable(Reason.NOT_THERE, error.strerror or str(error)) from error


def _write(samples: Samples, target: Path, aside: Path, form: str) -> None:
    _, container, coding = FORMS[form]
    try:
        soundfile.write(aside, to_16_bits(samples), RATE, format=container, subtype=coding)
        os.replace(aside, target)
    except soundfile.SoundFileError as error:  # a full disk, in libsndfile's words
        raise OSError(0, str(error), str(target)) from error
    finally:
        aside.unlink(missing_ok=True)


class Ear(Protocol):
    """A model that tells languages."""

    @property
    def name(self) -> str:
        """What its answers are remembered by."""
        ...

    def languages(self, files: Sequence[Path]) -> list[str]:
        """Codes of the languages in sound files."""
        ...

    def code(self, language: str) -> str:
        """The code of a language given by name or code; empty if the model does not know it."""
        ...


def hear_languages(ear: Ear, clips: Sequence[tuple[str, Path]], journal: Journal, progress: Progress) -> None:
    """Let the model listen to the clips (key and file) that it has not heard before."""
    fresh = [(key, file) for key, file in dict(clips).items() if (ear.name, key) not in journal.heard]
    for start in range(0, len(fresh), _BATCH):
        batch = fresh[start : start + _BATCH]
        for (key, _), heard in zip(batch, ear.languages([file for _, file in batch])):
            journal.add_language(ear.name, key, heard)
        progress("languages", min(start + _BATCH, len(fresh)), len(fresh))


def judge_language(recording: Recording, ear: Ear, key: str, journal: Journal) -> Fault | None:
    """Return why a recording is left out: another language was heard than is told. Where none is told: ``None``."""
    told, heard = ear.code(recording.language), journal.heard.get((ear.name, key), "")
    if told and heard and told != heard:
        return Fault(Reason.LANGUAGE, f"sounds like {heard}, not {told}")
    return None
