"""Transcripts of recordings that have none, by a model, with how far they can be trusted (``pseudo.csv``).

The table is written as it grows, a batch of whole lines at a time. Who begins again goes on where it ended, and may
judge what was heard before by other bounds. Transcripts that people made are in other tables and never touched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profiles.errors import BadInput
from training.run_files import add_file, explain
from training.tasks.audio import AudioError, decode
from training.tasks.base import Progress
from training.tasks.patches import PSEUDO_COLUMNS, PseudoRow, TextBounds, read_rows
from training.tasks.tables import csv_lines, write_table
from training.tasks.whisper.features import Features, augment
from training.tasks.whisper.listening import Listener, compression_ratio, hear
from training.tasks.word_errors import ErrorRates

NOISE = 0.3
"""Strength of the changes (:func:`augment`) under which a model without a second one listens again."""


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
    """Write ``table``, with a line for each of ``files`` (id and path), and return the lines.

    Raises:
        BadInput: a model cannot be used, the table was not made here, or cannot be written.
    """
    first = Listener(job.model, job.device, job.language)
    second = Listener(job.second, job.device, job.language) if job.second else first
    heard_by = "+".join(fingerprint(folder) for folder in (job.model, job.second) if folder)
    pair = _Pair(first, second, job.second is None, heard_by)
    known = {row.id: row for row in read_rows(table)} if table.is_file() else {}
    known = {name: row for name, row in known.items() if row.heard_by == heard_by}
    done = {name: job.bounds.judged(known[name]) for name, _ in files if name in known}
    waiting = [(name, path) for name, path in files if name not in known]
    try:
        write_table(table, [PSEUDO_COLUMNS, *(row.cells(table.parent) for row in done.values())])
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
        write_table(table, [PSEUDO_COLUMNS, *(row.cells(table.parent) for row in ordered)])
    except OSError as error:
        raise BadInput(*explain(error, table)) from error
    return ordered


@dataclass(frozen=True)
class _Pair:
    """Two models that listen to every recording; or one, the second time with noise and masks."""

    first: Listener
    second: Listener
    noisy: bool
    heard_by: str

    def rows(self, batch: Sequence[tuple[str, Path]]) -> list[PseudoRow]:
        read = [self._sound(name, path) for name, path in batch]
        sounds = [sound for _, sound in read if sound is not None]
        heard = self._measures(sounds) if sounds else iter(())
        return [row if sound is None else dataclasses.replace(row, **next(heard)) for row, sound in read]

    def _sound(self, name: str, path: Path) -> tuple[PseudoRow, tuple[Features, Features] | None]:
        """Return what the models hear of a recording; without it the row says why."""
        row = PseudoRow(name, path, heard_by=self.heard_by)
        found = list[Features]()
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
            found.append(log_mel.fill(*log_mel(audio.samples)))
        if self.noisy:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
            found[1] = augment(found[1], NOISE, np.random.default_rng(seed))
        return row, (found[0], found[1])

    def _measures(self, sounds: Sequence[tuple[Features, Features]]) -> Iterator[dict[str, Any]]:
        """Yield what a row says of each sound: its text, and how far that can be trusted."""
        said = []
        for which, ear in enumerate((self.first, self.second)):
            features = torch.from_numpy(np.stack([sound[which] for sound in sounds])).to(ear.device)
            said.append(hear(ear.wrapper, ear.model, features, [ear.language] * len(sounds), ear.wrapper.room))
        rates = ErrorRates(self.first.wrapper.tokenizer)
        for one, other in zip(*said, strict=True):
            text = " ".join(one.text.split())
            yield {
                "text": text,
                "confidence": one.confidence,
                "compression": compression_ratio(text),
                "no_speech": one.no_speech,
                "agreement": max(0.0, 1.0 - rates.of(text, other.text, self.first.language)) if text else 0.0,
                "cut": one.cut,
            }
