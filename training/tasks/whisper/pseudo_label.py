"""Transcripts of recordings that have none, by a model, with how far they can be trusted (``pseudo.csv``).

The table is written as it grows, a batch of whole lines at a time. Who begins again goes on where it ended, and may
judge what was heard before by other bounds. Transcripts that people made are in other tables and never touched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from profiles.errors import BadInput
from training.run_files import add_file, explain
from training.tasks.audio import decode, hears_voice
from training.tasks.base import Progress
from training.tasks.patches import PSEUDO_COLUMNS, PseudoRow, TextBounds, read_rows
from training.tasks.sound_file import AudioError
from training.tasks.tables import csv_lines, write_table
from training.tasks.whisper.features import NOISE, Features, augment
from training.tasks.whisper.listening import Transcriber, compression_ratio, hear, is_silence
from training.tasks.word_errors import ErrorRates


def fingerprint(folder: Path) -> str:
    """Return a short hash of what is in a model's folder."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode())
        add_file(digest, path)
    return digest.hexdigest()


@dataclass(frozen=True)
class Labelling:
    """What is to be labelled, by whom."""

    model: Path
    second: Path | None
    """Whose transcripts have to agree; ``None``: the first, which hears the sound with noise and masks."""
    language: str = ""
    device: str = "auto"
    batch_size: int = 8
    bounds: TextBounds = field(default_factory=TextBounds)


def label(job: Labelling, files: Sequence[tuple[str, Path]], table: Path, progress: Progress) -> list[PseudoRow]:
    """Write ``table``, with a line for each of ``files`` (id and path), and return these lines.

    Its lines of other recordings stay, as long as those are there.

    Raises:
        BadInput: a model cannot be used, the table was not made here or names another recording by one of the ids, or
            it cannot be written.
    """
    transcriber = Transcriber(job.model, job.device, job.language)
    second_transcriber = Transcriber(job.second, job.device, job.language) if job.second else transcriber
    heard_by = "+".join(fingerprint(folder) for folder in (job.model, job.second) if folder)
    heard_by += f" {transcriber.language}" if job.language else ""
    pair = _Pair(transcriber, second_transcriber, job.second is None, heard_by)
    for ear in (
        transcriber,
        second_transcriber,
    ):  # before anything is written: a model that cannot be read costs no line
        ear.model  # noqa: B018 - it is read when it is first asked for
    rows_by_id, others = _known(table, files)
    done = {name: job.bounds.judged(row) for name, row in rows_by_id.items() if row.heard_by == heard_by}
    others = [job.bounds.judged(row) for row in others]
    waiting = [(name, path) for name, path in files if name not in done]

    def write(rows: Iterable[PseudoRow]) -> None:
        write_table(table, [PSEUDO_COLUMNS, *(row.cells(table.parent) for row in rows)], option="--into")

    try:
        write([*others, *done.values()])
        for start in range(0, len(waiting), job.batch_size):
            progress("listening", len(done), len(files))
            batch = waiting[start : start + job.batch_size]
            rows = [job.bounds.judged(row) for row in pair.rows(batch)]
            with table.open("ab") as file:
                file.write(csv_lines(row.cells(table.parent) for row in rows))
                file.flush()
                os.fsync(file.fileno())
            done |= {row.id: row for row in rows}
        progress("listening", len(done), len(files))
        ordered = [done[name] for name, _ in files]
        write([*others, *ordered])
    except OSError as error:
        raise BadInput(*explain(error, table, "--into")) from error
    return ordered


def _known(table: Path, files: Sequence[tuple[str, Path]]) -> tuple[dict[str, PseudoRow], list[PseudoRow]]:
    """Return what a table says of ``files``, by id, and its lines of other recordings that are there.

    Raises:
        BadInput: the table was not made here, or one of the ids is that of another recording.
    """
    rows = {row.id: row for row in read_rows(table)} if os.path.lexists(table) else {}
    rows_by_id = dict[str, PseudoRow]()
    for name, path in files:
        row = rows.pop(name, None)
        if row is not None and row.path.exists() and not row.path.samefile(path):
            message = f"{table}: {name} is another recording there, {row.path}"
            raise BadInput(message, "give one of them another name, or choose another folder with --into")
        if row is not None:
            rows_by_id[name] = dataclasses.replace(row, path=path)
    return rows_by_id, [row for row in rows.values() if row.path.is_file()]


class _Sound(NamedTuple):
    """A recording as both models hear it, and whether a voice is in it."""

    features: Sequence[Features]
    has_voice: Callable[[], bool]


@dataclass(frozen=True)
class _Pair:
    """Two models that listen to every recording; or one, the second time with noise and masks."""

    first: Transcriber
    second: Transcriber
    noisy: bool
    heard_by: str

    def rows(self, batch: Sequence[tuple[str, Path]]) -> list[PseudoRow]:
        read = [self._sound(name, path) for name, path in batch]
        sounds = [sound for _, sound in read if sound is not None]
        heard = self._measures(sounds) if sounds else iter(())
        return [row if sound is None else dataclasses.replace(row, **next(heard)) for row, sound in read]

    def _sound(self, name: str, path: Path) -> tuple[PseudoRow, _Sound | None]:
        """Return what the models hear of a recording; without it the row says why."""
        row = PseudoRow(name, path, heard_by=self.heard_by)
        features, has_voice = list[Features](), list[Callable[[], bool]]()
        for ear in (self.first, self.second):
            log_mel = ear.wrapper.log_mel
            try:
                audio = decode(path, log_mel.rate, log_mel.seconds)
            except AudioError as error:
                return dataclasses.replace(row, unusable=str(error)), None
            row = dataclasses.replace(row, seconds=audio.seconds)
            if audio.seconds > log_mel.seconds + 1e-3:
                long = f"longer than the model's window of {log_mel.seconds:g} s"
                return dataclasses.replace(row, unusable=long), None
            has_voice.append(partial(hears_voice, audio.samples, log_mel.rate))
            features.append(log_mel.fill(*log_mel(audio.samples)))
        if self.noisy:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
            features[1] = augment(features[1], NOISE, np.random.default_rng(seed))
        return row, _Sound(features, has_voice[0])

    def _measures(self, sounds: Sequence[_Sound]) -> Iterator[dict[str, Any]]:
        """Yield what a row says of each sound: its text, and how far that can be trusted; silence has no text."""
        results = []
        for which, ear in enumerate((self.first, self.second)):
            features = torch.from_numpy(np.stack([sound.features[which] for sound in sounds])).to(ear.device)
            results.append(hear(ear.wrapper, ear.model, features, [ear.language] * len(sounds), ear.wrapper.room))
        rates = ErrorRates()
        for sound, result, second_result in zip(sounds, *results, strict=True):
            text = (
                ""
                if is_silence(result.no_speech, result.confidence, sound.has_voice)
                else " ".join(result.text.split())
            )
            yield {
                "text": text,
                "confidence": result.confidence,
                "compression": compression_ratio(text),
                "no_speech": result.no_speech,
                "agreement": max(0.0, 1.0 - rates.of(text, second_result.text, self.first.language)) if text else 0.0,
                "cut": result.cut,
            }
