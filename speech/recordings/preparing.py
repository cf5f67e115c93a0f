"""``prepare``: a source of recordings becomes a data set folder.

The measurements of a recording are stored (:class:`Journal`); everything that follows from them is computed again in
every run. So an interrupted run resumes and ends with the same folder, and a run with other limits fetches only what
the earlier one left out.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import soundfile

from profiles.errors import BadInput, StoppedByUser
from profiles.quantities import bytes_text
from speech.data.audio import decode
from speech.data.language_codes import code_of
from speech.data.sound_file import AudioError, Samples, SoundFile
from speech.data.speech_clips import FileSource
from speech.recordings.checks import RATE, Limits, Measures, find_duplicates, judge, judge_text, measure, to_16_bits
from speech.recordings.dataset_folder import (
    FORMS,
    AcceptedRecording,
    DatasetFolder,
    DatasetOrigin,
    Journal,
    Result,
    open_dataset_folder,
    write_result,
)
from speech.recordings.dividing import HeldOutShares, divide
from speech.recordings.fetching import DownloadLimitReached, Fetcher, FetchLimits
from speech.recordings.readers import READERS, kind_of
from speech.recordings.recording import (
    Exclusion,
    ExclusionReason,
    MissingSource,
    ReadRequest,
    Recording,
    UnusableRecording,
    UrlSource,
)
from training.tasks.base import Progress
from training.tasks.cache import digest

if TYPE_CHECKING:
    from speech.recordings.recording import Source
    from speech.whisper.samples import LanguageDetector  # imports torch

_BATCH_SIZE = 16  # clips of which a model detects the languages at once
_LENGTH_TOLERANCE = 0.05  # seconds by which the lengths of a file and of its part in the table may differ
_DECODED_BEYOND = 0.5  # seconds decoded beyond the longest that is accepted


def cache_key(recording: Recording, form: str) -> str:
    """Return the key of a recording's sound: it changes with the file, the part of it, and the output format."""
    return digest([recording.audio.stamp(), repr(recording.offset), repr(recording.duration), form])


def measure_and_write(
    recording: Recording, target: Path, temporary: Path, limits: Limits, fetcher: Fetcher, form: str
) -> Measures:
    """Measure one recording; write it to ``target`` if :func:`judge` accepts it.

    Args:
        temporary: a path for unfinished files that no other recording uses.

    Raises:
        UnusableRecording: it cannot be fetched or read.
        OSError: ``target`` cannot be written.
    """
    downloaded = temporary.with_suffix(".download")
    try:
        source, fetched = _get(recording.audio, downloaded, fetcher)
        samples, measures = _decode(source, recording, limits, fetched)
    finally:
        downloaded.unlink(missing_ok=True)
    if samples is not None and judge(recording, measures, limits) is None:
        _write(samples, target, temporary, form)
    return measures


def _get(audio: Source, downloaded: Path, fetcher: Fetcher) -> tuple[Path | bytes, int]:
    match audio:
        case UrlSource(url):
            count = fetcher.fetch(url, downloaded)
            return downloaded, count
        case FileSource(path):
            return path, 0
        case MissingSource(text):
            raise UnusableRecording(ExclusionReason.NOT_THERE, text)
        case _:
            try:
                return audio.read(), 0
            except OSError as error:
                raise UnusableRecording(ExclusionReason.NOT_THERE, error.strerror or str(error)) from error


def _decode(
    source: Path | bytes, recording: Recording, limits: Limits, fetched: int
) -> tuple[Samples | None, Measures]:
    """Return samples and measures; the samples are ``None`` if the recording is too long."""
    if not (len(source) if isinstance(source, bytes) else _size(source)):
        raise UnusableRecording(ExclusionReason.EMPTY, "an empty file")
    decoded_seconds = limits.longest + _DECODED_BEYOND
    if recording.duration is not None:
        decoded_seconds = min(recording.duration, decoded_seconds)
    try:
        needs_offset = bool(recording.offset) and not _is_cut_already(source, recording.duration)
        offset = recording.offset if needs_offset else 0.0
        audio = decode(source, RATE, decoded_seconds, offset)
    except AudioError as error:
        raise UnusableRecording(ExclusionReason.UNREADABLE, str(error)) from error
    available = audio.seconds - offset
    seconds = available if recording.duration is None else min(available, recording.duration)
    if seconds > limits.longest:
        return None, Measures(round(seconds, 3), fetched=fetched)
    return audio.samples, measure(audio.samples, fetched)


def _is_cut_already(source: Path | bytes, duration: float | None) -> bool:
    """Whether a file is as long as the part: then the offset refers to another file, which it was cut from."""
    if duration is None:
        return False
    with SoundFile(source) as file:
        return abs(file.seconds - duration) < _LENGTH_TOLERANCE


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UnusableRecording(ExclusionReason.NOT_THERE, error.strerror or str(error)) from error


def _write(samples: Samples, target: Path, temporary: Path, form: str) -> None:
    _, container, encoding = FORMS[form]
    try:
        soundfile.write(temporary, to_16_bits(samples), RATE, format=container, subtype=encoding)
        os.replace(temporary, target)
    except soundfile.SoundFileError as error:  # what libsndfile raises when the disk is full
        raise OSError(0, str(error), str(target)) from error
    finally:
        temporary.unlink(missing_ok=True)


def detect_languages(
    ear: LanguageDetector, clips: Sequence[tuple[str, Path]], journal: Journal, progress: Progress
) -> None:
    """Detect the languages of the clips (key and file) for which the journal holds none of this model."""
    unknown = [(key, file) for key, file in dict(clips).items() if (ear.name, key) not in journal.languages]
    for start in range(0, len(unknown), _BATCH_SIZE):
        batch = unknown[start : start + _BATCH_SIZE]
        for (key, _), language in zip(batch, ear.languages([file for _, file in batch])):
            journal.add_language(ear.name, key, language)
        progress("languages", min(start + _BATCH_SIZE, len(unknown)), len(unknown))


def judge_language(recording: Recording, ear: LanguageDetector, key: str, journal: Journal) -> Exclusion | None:
    """Return an exclusion if the detected language is not the stated one; ``None`` if either is unknown."""
    stated, detected = ear.code(recording.language), journal.languages.get((ear.name, key), "")
    if stated and detected and stated != detected:
        return Exclusion(ExclusionReason.LANGUAGE, f"sounds like {detected}, not {stated}")
    return None


_ROUNDS = 3  # a clip whose duplicate turned out unusable is measured in the next round
_QUEUED_PER_THREAD = 4  # recordings


@dataclass(frozen=True)
class PreparationJob:
    """A source, the folder to make of it, and all options."""

    request: ReadRequest
    out: Path
    kind: str = ""
    """See :data:`speech.recordings.readers.READERS`; empty: recognised."""
    form: str = "flac"
    language: str = ""
    """Language of recordings for which the source states none."""
    lowercase: bool = False
    threads: int = 4
    limits: Limits = field(default_factory=Limits)
    shares: HeldOutShares = field(default_factory=HeldOutShares)
    fetching: FetchLimits = field(default_factory=FetchLimits)


@dataclass(frozen=True)
class _Item:
    """A recording, the key of its sound, and the file it is written to."""

    recording: Recording
    key: str
    file: Path


def prepare(job: PreparationJob, progress: Progress, ear: LanguageDetector | None = None) -> Result:
    """Make the data set folder ``job.out``, or resume it.

    Args:
        ear: a model that detects the languages of the accepted recordings; ``None``: they are not checked.

    Raises:
        BadInput: the source cannot be read, the folder cannot be written, or every recording is left out.
        StoppedByUser: Ctrl-C; the same job resumes.
    """
    kind = kind_of(job.request.source, job.kind)
    recordings = _read(job, kind, progress)
    division = divide(recordings, job.shares)
    source = job.request.source
    source_identity = source if kind in ("hub", "bigquery") else str(Path(source).expanduser().resolve())
    with open_dataset_folder(job.out, DatasetOrigin(source_identity, kind, job.form)) as dataset_folder:
        with closing(Journal(dataset_folder.journal)) as journal:
            items = _items(division.recordings, dataset_folder, job.form)
            run = _Preparation(job, dataset_folder, items, journal, progress)
            run.measure_all()
            exclusions = run.exclusions()
            if ear is not None:
                accepted_items = [item for item, exclusion in zip(items, exclusions) if exclusion is None]
                detect_languages(ear, [(item.key, item.file) for item in accepted_items], journal, progress)
                exclusions = [
                    exclusion or judge_language(i.recording, ear, i.key, journal)
                    for i, exclusion in zip(items, exclusions)
                ]
            accepted = [
                AcceptedRecording(item.recording, item.file, journal.measures[item.key].seconds)
                for item, exclusion in zip(items, exclusions)
                if exclusion is None
            ]
        notes = division.notes
        if {item.recording.split for item in items} != {clip.recording.split for clip in accepted}:
            accepted, notes = _redivide(recordings, accepted, job.shares)
        left_out = [(item.recording, exclusion) for item, exclusion in zip(items, exclusions) if exclusion is not None]
        return write_result(dataset_folder, kind, accepted, left_out, notes)


def _read(job: PreparationJob, kind: str, progress: Progress) -> list[Recording]:
    recordings: list[Recording] = []
    for recording in READERS[kind](job.request):
        # Whisper's code of the language if it has one (``pt`` for ``pt-BR``)
        stated = recording.language or job.language
        language = code_of(stated) or stated
        text = recording.text.lower() if job.lowercase else recording.text
        recordings.append(dataclasses.replace(recording, language=language, text=text))
        if not len(recordings) % 1000:
            progress("reading", len(recordings), None)
    if not recordings:
        raise BadInput(f"source {job.request.source}: no recordings there", "it needs a line for each recording")
    return _with_unique_ids(recordings)


def _redivide(
    recordings: Sequence[Recording], accepted: Sequence[AcceptedRecording], shares: HeldOutShares
) -> tuple[list[AcceptedRecording], list[str]]:
    """Divide the accepted recordings again, because all of a split were left out."""
    undivided = {recording.id: recording for recording in recordings}
    division = divide([undivided[clip.recording.id] for clip in accepted], shares)
    return [clip._replace(recording=new) for clip, new in zip(accepted, division.recordings)], division.notes


def _with_unique_ids(recordings: Sequence[Recording]) -> list[Recording]:
    """Make ids unique within the data set: the second ``a`` becomes ``a-2``."""
    seen: Counter[str] = Counter()
    taken = {recording.id for recording in recordings}
    renamed = []
    for recording in recordings:
        name = recording.id
        while seen[recording.id] and name in taken:
            seen[recording.id] += 1
            name = f"{recording.id}-{seen[recording.id]}"
        seen[recording.id] = seen[recording.id] or 1
        taken.add(name)
        renamed.append(dataclasses.replace(recording, id=name))
    return renamed


def _items(recordings: Sequence[Recording], dataset_folder: DatasetFolder, form: str) -> list[_Item]:
    """Assign a file to every recording; recordings with the same key share it."""
    files: dict[str, Path] = {}
    items = []
    for recording in recordings:
        key = cache_key(recording, form)
        file = files.setdefault(key, dataset_folder.file_of(recording.id, key, form))
        items.append(_Item(recording, key, file))
    return items


@dataclass(frozen=True)
class _Preparation:
    """One run of ``prepare``: measures its recordings, and decides which are left out."""

    job: PreparationJob
    folder: DatasetFolder
    items: Sequence[_Item]
    journal: Journal
    progress: Progress
    failures: dict[str, Exclusion] = field(default_factory=dict)
    """Exclusions of recordings that could not be measured, by key."""

    def exclusions(self) -> list[Exclusion | None]:
        """Return for each recording why it is left out; ``None`` if it is accepted or not measured yet."""
        measured = [self._measures_of(item.key) for item in self.items]
        exclusions: list[Exclusion | None] = []
        for item, measures in zip(self.items, measured):
            exclusion = judge_text(item.recording) or self.failures.get(item.key)
            exclusions.append(exclusion or (judge(item.recording, measures, self.job.limits) if measures else None))
        heard = [(index, measures) for index, measures in enumerate(measured) if measures and exclusions[index] is None]
        clips = [(self.items[index].recording, measures.digest) for index, measures in heard]
        for (index, _), exclusion in zip(heard, find_duplicates(clips)):
            exclusions[index] = exclusion
        return exclusions

    def _measures_of(self, key: str) -> Measures | None:
        """Return the journal's measures, unless they lack what these limits need: too long sound is not decoded."""
        measures = self.journal.measures.get(key)
        return measures if measures and (measures.digest or measures.seconds > self.job.limits.longest) else None

    def measure_all(self) -> None:
        """Measure and write all recordings that are not left out and have no file yet."""
        for _ in range(_ROUNDS):
            accepted = (item for item, exclusion in zip(self.items, self.exclusions()) if exclusion is None)
            pending = {
                item.key: item for item in accepted if not self._measures_of(item.key) or not item.file.is_file()
            }
            if not pending:
                break
            self._measure(list(pending.values()))

    def _measure(self, items: Sequence[_Item]) -> None:
        job, done = self.job, 0
        fetcher = Fetcher(job.fetching, self.journal.fetched)

        def work(item: _Item) -> Measures:
            temporary = self.folder.partial / item.key
            return measure_and_write(item.recording, item.file, temporary, job.limits, fetcher, job.form)

        with ThreadPoolExecutor(job.threads, thread_name_prefix="prepare") as pool:
            try:
                for item, future in _bounded_futures(pool, work, items, _QUEUED_PER_THREAD * job.threads):
                    try:
                        self.journal.add(item.key, future.result())
                    except UnusableRecording as error:
                        self.failures[item.key] = error.exclusion
                    done += 1
                    self.progress("recordings", done, len(items))
            except KeyboardInterrupt:
                message = f"stopped after {done} of {len(items)}"
                raise StoppedByUser(message, "the same command continues there") from None
            except DownloadLimitReached as error:
                size_limit = bytes_text(job.fetching.total_bytes)
                hint = "the same command with a larger --max-total continues"
                raise BadInput(f"all downloads together have reached {size_limit}", hint) from error
            finally:
                fetcher.cancel()
                pool.shutdown(cancel_futures=True)


def _bounded_futures(
    pool: ThreadPoolExecutor, work: Callable[[_Item], Measures], items: Sequence[_Item], limit: int
) -> Iterator[tuple[_Item, Future[Measures]]]:
    """Submit items, at most ``limit`` at a time; yield each with its future when it is done."""
    waiting = iter(items)
    running: dict[Future[Measures], _Item] = {}
    while True:
        while len(running) < limit and (item := next(waiting, None)) is not None:
            running[pool.submit(work, item)] = item
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future
