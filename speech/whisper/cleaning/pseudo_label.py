"""Pseudo-labelling: transcribe recordings without transcripts, with measures of confidence (``pseudo.csv``).

The table is appended to batch by batch, in complete lines. An interrupted job can be resumed, and earlier results can
be judged by other bounds. Human transcripts are in other tables and never modified.
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
from profiles.quantities import span_text
from speech.data.audio import contains_speech, decode
from speech.data.patches import PSEUDO_COLUMNS, PseudoRow, TextBounds, read_rows
from speech.data.sound_file import AudioError
from speech.scoring.word_errors import ErrorRates
from speech.whisper.decoding import Transcriber, compression_ratio, is_silence, transcribe_clips
from speech.whisper.features import NOISE, Features, augment
from training.records.run_files import add_file, explain
from training.tasks.base import Progress
from training.tasks.data_files.tables import csv_lines, write_table


def fingerprint(folder: Path) -> str:
    """Return a short hash of the files in a model's folder."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest.update(path.name.encode())
        add_file(digest, path)
    return digest.hexdigest()


@dataclass(frozen=True)
class LabellingJob:
    """Models and options of pseudo-labelling."""

    model: Path
    second: Path | None
    """Model whose transcripts have to agree; ``None``: the first one again, with noise and masks."""
    language: str = ""
    device: str = "auto"
    batch_size: int = 8
    bounds: TextBounds = field(default_factory=TextBounds)


def label(job: LabellingJob, files: Sequence[tuple[str, Path]], table: Path, progress: Progress) -> list[PseudoRow]:
    """Write ``table`` with a line for each of ``files`` (id and path), and return these lines.

    Lines of other recordings are kept, as long as these exist.

    Raises:
        BadInput: a model cannot be used, the table has another format or another recording with one of the ids, or it
            cannot be written.
    """
    transcriber = Transcriber(job.model, job.device, job.language)
    second_transcriber = Transcriber(job.second, job.device, job.language) if job.second else transcriber
    heard_by = "+".join(fingerprint(folder) for folder in (job.model, job.second) if folder)
    heard_by += f" {transcriber.language}" if job.language else ""
    pair = _ModelPair(transcriber, second_transcriber, job.second is None, heard_by)
    for loaded in (
        transcriber,
        second_transcriber,
    ):  # before anything is written: a model that cannot be read costs no line
        loaded.model  # noqa: B018 - it is read when it is first asked for
    rows_by_id, others = _existing_rows(table, files)
    done = {name: job.bounds.judge(row) for name, row in rows_by_id.items() if row.heard_by == heard_by}
    others = [job.bounds.judge(row) for row in others]
    waiting = [(name, path) for name, path in files if name not in done]

    def write(rows: Iterable[PseudoRow]) -> None:
        write_table(table, [PSEUDO_COLUMNS, *(row.cells(table.parent) for row in rows)], option="--into")

    try:
        write([*others, *done.values()])
        for start in range(0, len(waiting), job.batch_size):
            progress("listening", len(done), len(files))
            batch = waiting[start : start + job.batch_size]
            rows = [job.bounds.judge(row) for row in pair.rows(batch)]
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


def _existing_rows(table: Path, files: Sequence[tuple[str, Path]]) -> tuple[dict[str, PseudoRow], list[PseudoRow]]:
    """Return a table's rows of ``files`` by id, and its rows of other recordings that still exist.

    Raises:
        BadInput: the table has another format, or one of the ids belongs to another recording.
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


class _ModelInputs(NamedTuple):
    """The input features of a recording for both models, and a voice detector for it."""

    features: Sequence[Features]
    has_voice: Callable[[], bool]


@dataclass(frozen=True)
class _ModelPair:
    """Two models that transcribe every recording; or one, the second time with noise and masks."""

    primary: Transcriber
    secondary: Transcriber
    noisy: bool
    heard_by: str

    def rows(self, batch: Sequence[tuple[str, Path]]) -> list[PseudoRow]:
        read = [self._model_inputs(name, path) for name, path in batch]
        sounds = [sound for _, sound in read if sound is not None]
        heard = self._measures(sounds) if sounds else iter(())
        return [row if sound is None else dataclasses.replace(row, **next(heard)) for row, sound in read]

    def _model_inputs(self, name: str, path: Path) -> tuple[PseudoRow, _ModelInputs | None]:
        """Return the models' inputs for a recording; ``None`` if it is unusable, for a reason given in the row."""
        row = PseudoRow(name, path, heard_by=self.heard_by)
        features, has_voice = list[Features](), list[Callable[[], bool]]()
        for model in (self.primary, self.secondary):
            log_mel = model.wrapper.log_mel
            try:
                audio = decode(path, log_mel.rate, log_mel.seconds)
            except AudioError as error:
                return dataclasses.replace(row, unusable=str(error)), None
            row = dataclasses.replace(row, seconds=audio.seconds)
            if audio.seconds > log_mel.seconds + 1e-3:
                long = f"longer than the model's window of {span_text(log_mel.seconds)}"
                return dataclasses.replace(row, unusable=long), None
            has_voice.append(partial(contains_speech, audio.samples, log_mel.rate))
            features.append(log_mel.fill(*log_mel(audio.samples)))
        if self.noisy:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
            features[1] = augment(features[1], NOISE, np.random.default_rng(seed))
        return row, _ModelInputs(features, has_voice[0])

    def _measures(self, sounds: Sequence[_ModelInputs]) -> Iterator[dict[str, Any]]:
        """Yield a row's text and measures for each recording; silence has an empty text."""
        results = []
        for index, model in enumerate((self.primary, self.secondary)):
            features = torch.from_numpy(np.stack([sound.features[index] for sound in sounds])).to(model.device)
            results.append(
                transcribe_clips(
                    model.wrapper, model.model, features, [model.language] * len(sounds), model.wrapper.text_positions
                )
            )
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
                "agreement": max(0.0, 1.0 - rates.of(text, second_result.text, self.primary.language)) if text else 0.0,
                "cut": result.cut,
            }
