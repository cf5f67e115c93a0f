"""``prepare``: a source becomes a data set folder. The whole way, from top to bottom.

What was measured of a recording is kept (:class:`Journal`), what follows from it is worked out anew
in every run. So a run that was interrupted goes on where it was and ends in the same folder, and a run with other
limits fetches only what the earlier one left out.
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
from training.recordings.checks import RATE, Limits, Measures, doubles, judge, judge_text, measure, to_16_bits
from training.recordings.dividing import Shares, divide
from training.recordings.fetching import Fetcher, FetchLimits, TooMuch
from training.recordings.readers import READERS, kind_of
from training.recordings.recording import (
    ExclusionReason,
    Fault,
    NoSource,
    ReadRequest,
    Recording,
    UnusableRecording,
    UrlSource,
)
from training.recordings.workplace import (
    FORMS,
    DatasetOrigin,
    Journal,
    KeptRecording,
    Result,
    Workplace,
    open_workplace,
    write_result,
)
from training.tasks.audio import decode
from training.tasks.base import Progress
from training.tasks.cache import digest
from training.tasks.language_codes import code_of
from training.tasks.sound_file import AudioError, Samples, SoundFile
from training.tasks.speech_clips import FileSource

if TYPE_CHECKING:
    from training.recordings.recording import Source
    from training.tasks.whisper.samples import ModelEar  # imports torch

_BATCH = 16  # clips of which a model tells the languages at once
_AS_LONG = 0.05  # seconds by which a file differs at most from what a table says of it
_BEYOND = 0.5  # seconds decoded after the longest that is kept


def key_of(recording: Recording, form: str) -> str:
    """Return what a recording's sound is known by: it changes with the file, the part of it, and the form written."""
    return digest([recording.audio.stamp(), repr(recording.offset), repr(recording.duration), form])


def hear(recording: Recording, target: Path, aside: Path, limits: Limits, fetcher: Fetcher, form: str) -> Measures:
    """Measure one recording; write it to ``target`` if :func:`judge` keeps it.

    Args:
        aside: a path of this recording alone, for what is half done.

    Raises:
        UnusableRecording: it cannot be had or read.
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
            raise UnusableRecording(ExclusionReason.NOT_THERE, text)
        case _:
            try:
                return audio.read(), 0
            except OSError as error:
                raise UnusableRecording(ExclusionReason.NOT_THERE, error.strerror or str(error)) from error


def _decode(
    source: Path | bytes, recording: Recording, limits: Limits, fetched: int
) -> tuple[Samples | None, Measures]:
    """Samples are ``None`` where the recording is too long to be decoded whole."""
    if not (len(source) if isinstance(source, bytes) else _size(source)):
        raise UnusableRecording(ExclusionReason.EMPTY, "an empty file")
    most = limits.longest + _BEYOND
    wanted = most if recording.duration is None else min(recording.duration, most)
    try:
        is_part = bool(recording.offset) and not _is_cut_already(source, recording.duration)
        offset = recording.offset if is_part else 0.0
        audio = decode(source, RATE, wanted, offset)
    except AudioError as error:
        raise UnusableRecording(ExclusionReason.UNREADABLE, str(error)) from error
    rest = audio.seconds - offset
    seconds = rest if recording.duration is None else min(rest, recording.duration)
    if seconds > limits.longest:
        return None, Measures(round(seconds, 3), fetched=fetched)
    return audio.samples, measure(audio.samples, fetched)


def _is_cut_already(source: Path | bytes, duration: float | None) -> bool:
    """Whether a file is as long as the part that is named: the table then says where in another file it was."""
    if duration is None:
        return False
    with SoundFile(source) as file:
        return abs(file.seconds - duration) < _AS_LONG


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UnusableRecording(ExclusionReason.NOT_THERE, error.strerror or str(error)) from error


def _write(samples: Samples, target: Path, aside: Path, form: str) -> None:
    _, container, coding = FORMS[form]
    try:
        soundfile.write(aside, to_16_bits(samples), RATE, format=container, subtype=coding)
        os.replace(aside, target)
    except soundfile.SoundFileError as error:  # a full disk, in libsndfile's words
        raise OSError(0, str(error), str(target)) from error
    finally:
        aside.unlink(missing_ok=True)


def hear_languages(ear: ModelEar, clips: Sequence[tuple[str, Path]], journal: Journal, progress: Progress) -> None:
    """Let the model listen to the clips (key and file) that it has not heard before."""
    fresh = [(key, file) for key, file in dict(clips).items() if (ear.name, key) not in journal.heard]
    for start in range(0, len(fresh), _BATCH):
        batch = fresh[start : start + _BATCH]
        for (key, _), heard in zip(batch, ear.languages([file for _, file in batch])):
            journal.add_language(ear.name, key, heard)
        progress("languages", min(start + _BATCH, len(fresh)), len(fresh))


def judge_language(recording: Recording, ear: ModelEar, key: str, journal: Journal) -> Fault | None:
    """Return why a recording is left out: another language was heard than is told. Where none is told: ``None``."""
    told, heard = ear.code(recording.language), journal.heard.get((ear.name, key), "")
    if told and heard and told != heard:
        return Fault(ExclusionReason.LANGUAGE, f"sounds like {heard}, not {told}")
    return None


_ROUNDS = 3  # a clip whose double is gone is heard again
_AHEAD = 4  # recordings handed over for each thread


@dataclass(frozen=True)
class PreparationJob:
    """What is to be prepared, and how."""

    request: ReadRequest
    out: Path
    kind: str = ""
    """See :data:`training.recordings.readers.READERS`; empty: recognised."""
    form: str = "flac"
    language: str = ""
    """Of recordings of which the source tells none."""
    lowercase: bool = False
    threads: int = 4
    limits: Limits = field(default_factory=Limits)
    shares: Shares = field(default_factory=Shares)
    fetching: FetchLimits = field(default_factory=FetchLimits)


@dataclass(frozen=True)
class _Item:
    """A recording with the place of its sound."""

    recording: Recording
    key: str
    file: Path


def prepare(job: PreparationJob, progress: Progress, ear: ModelEar | None = None) -> Result:
    """Make the folder ``job.out``, or go on with it.

    Args:
        ear: a model that tells the language of what is kept; ``None``: nobody listens.

    Raises:
        BadInput: the source cannot be read, the folder not written, or nothing is left.
        StoppedByUser: Ctrl-C; the same job goes on.
    """
    kind = kind_of(job.request.source, job.kind)
    recordings = _read(job, kind, progress)
    division = divide(recordings, job.shares)
    source = job.request.source
    lasting = source if kind in ("hub", "bigquery") else str(Path(source).expanduser().resolve())
    with open_workplace(job.out, DatasetOrigin(lasting, kind, job.form)) as place:
        with closing(Journal(place.journal)) as journal:
            run = _Run(job, place, _items(division.recordings, place, job.form), journal, progress)
            items = run.items
            run.hear_all()
            faults = run.faults()
            if ear is not None:
                kept = [item for item, fault in zip(items, faults) if fault is None]
                hear_languages(ear, [(item.key, item.file) for item in kept], journal, progress)
                faults = [fault or judge_language(i.recording, ear, i.key, journal) for i, fault in zip(items, faults)]
            kept_clips = [
                KeptRecording(item.recording, item.file, journal.measures[item.key].seconds)
                for item, fault in zip(items, faults)
                if fault is None
            ]
        notes = division.notes
        if {one.split for one in division.recordings} != {one.recording.split for one in kept_clips}:
            kept_clips, notes = _divided_anew(recordings, kept_clips, job.shares)
        left_out = [(item.recording, fault) for item, fault in zip(items, faults) if fault is not None]
        return write_result(place, kind, kept_clips, left_out, notes)


def _read(job: PreparationJob, kind: str, progress: Progress) -> list[Recording]:
    found: list[Recording] = []
    for recording in READERS[kind](job.request):
        # languages as Whisper writes them (``pt`` for ``pt-BR``), where it has them; texts as they are wanted
        given = recording.language or job.language
        language = code_of(given) or given
        text = recording.text.lower() if job.lowercase else recording.text
        found.append(dataclasses.replace(recording, language=language, text=text))
        if not len(found) % 1000:
            progress("reading", len(found), None)
    if not found:
        raise BadInput(f"source {job.request.source}: no recordings there", "it needs a line for each recording")
    return _with_own_ids(found)


def _divided_anew(
    recordings: Sequence[Recording], kept: Sequence[KeptRecording], shares: Shares
) -> tuple[list[KeptRecording], list[str]]:
    """Divide those that are kept: nothing is left of a whole split."""
    source = {one.id: one for one in recordings}
    division = divide([source[one.recording.id] for one in kept], shares)
    return [one._replace(recording=new) for one, new in zip(kept, division.recordings)], division.notes


def _with_own_ids(recordings: Sequence[Recording]) -> list[Recording]:
    """Ids are unique in a data set: the second ``a`` becomes ``a-2``."""
    seen: Counter[str] = Counter()
    taken = {recording.id for recording in recordings}
    found = []
    for recording in recordings:
        name = recording.id
        while seen[recording.id] and name in taken:
            seen[recording.id] += 1
            name = f"{recording.id}-{seen[recording.id]}"
        seen[recording.id] = seen[recording.id] or 1
        taken.add(name)
        found.append(dataclasses.replace(recording, id=name))
    return found


def _items(recordings: Sequence[Recording], place: Workplace, form: str) -> list[_Item]:
    """Give every recording its file; those that have the same sound have the same."""
    files: dict[str, Path] = {}
    items = []
    for recording in recordings:
        key = key_of(recording, form)
        file = files.setdefault(key, place.file_of(recording.id, key, form))
        items.append(_Item(recording, key, file))
    return items


@dataclass(frozen=True)
class _Run:
    """What one run of ``prepare`` hears, and what it knows of it."""

    job: PreparationJob
    place: Workplace
    items: Sequence[_Item]
    journal: Journal
    progress: Progress
    failures: dict[str, Fault] = field(default_factory=dict)
    """Why some could not be heard, by key."""

    def faults(self) -> list[Fault | None]:
        """Say of every recording why it is left out. Those that were not heard yet count as kept."""
        known = [self._known(item.key) for item in self.items]
        faults: list[Fault | None] = []
        for item, measures in zip(self.items, known):
            fault = judge_text(item.recording) or self.failures.get(item.key)
            faults.append(fault or (judge(item.recording, measures, self.job.limits) if measures else None))
        heard = [(index, found) for index, found in enumerate(known) if found and faults[index] is None]
        clips = [(self.items[index].recording, found.digest) for index, found in heard]
        for (index, _), fault in zip(heard, doubles(clips)):
            faults[index] = fault
        return faults

    def _known(self, key: str) -> Measures | None:
        """What was measured; of one that was too long to be decoded, nothing is known but its length."""
        found = self.journal.measures.get(key)
        return found if found and (found.digest or found.seconds > self.job.limits.longest) else None

    def hear_all(self) -> None:
        """Hear all that is to be kept and has no file yet."""
        for _ in range(_ROUNDS):
            kept = (item for item, fault in zip(self.items, self.faults()) if fault is None)
            to_do = {item.key: item for item in kept if not self._known(item.key) or not item.file.is_file()}
            if not to_do:
                break
            self._hear(list(to_do.values()))

    def _hear(self, items: Sequence[_Item]) -> None:
        job, done = self.job, 0
        fetcher = Fetcher(job.fetching, self.journal.fetched)

        def work(item: _Item) -> Measures:
            return hear(item.recording, item.file, self.place.partial / item.key, job.limits, fetcher, job.form)

        with ThreadPoolExecutor(job.threads, thread_name_prefix="prepare") as pool:
            try:
                for item, outcome in _in_flight(pool, work, items, _AHEAD * job.threads):
                    try:
                        self.journal.add(item.key, outcome.result())
                    except UnusableRecording as error:
                        self.failures[item.key] = error.fault
                    done += 1
                    self.progress("recordings", done, len(items))
            except KeyboardInterrupt:
                told = f"stopped after {done} of {len(items)}"
                raise StoppedByUser(told, "the same command continues there") from None
            except TooMuch as error:
                bound = f"{job.fetching.total_bytes / 1e9:g} GB"
                hint = "the same command with a larger --max-total continues"
                raise BadInput(f"all downloads together have reached {bound}", hint) from error
            finally:
                fetcher.cancel()
                pool.shutdown(cancel_futures=True)


def _in_flight(
    pool: ThreadPoolExecutor, work: Callable[[_Item], Measures], items: Sequence[_Item], most: int
) -> Iterator[tuple[_Item, Future[Measures]]]:
    """Hand ``most`` items over at a time; give each as it ends."""
    waiting = iter(items)
    running: dict[Future[Measures], _Item] = {}
    while True:
        while len(running) < most and (item := next(waiting, None)) is not None:
            running[pool.submit(work, item)] = item
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            yield running.pop(future), future
