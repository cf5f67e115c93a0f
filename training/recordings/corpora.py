"""Readers of published corpora, each in the form that it is published in: Common Voice, LibriSpeech, VoxPopuli, NeMo.

A ``read_*`` gives the recordings of a source; beside it stands what tells whether a folder or file is one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from profiles.errors import BadInput
from training.recordings.recording import (
    Columns,
    ExclusionReason,
    Fault,
    ReadRequest,
    Recording,
    TableColumns,
    located,
    names_in,
    one_line,
    recording_of,
    spelled,
)
from training.tasks.speech_clips import split_named
from training.tasks.stored_files import without_hidden
from training.tasks.tables import JSON_LINES, Row, read_table

_PEEK = 2**16  # characters of the first line that are looked at
_LIBRISPEECH_DEPTHS = ("*/*", "*/*/*", "*/*/*/*")  # a subset, the folder with the subsets, the folder around that
_VOXPOPULI_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


def read_common_voice(request: ReadRequest) -> Iterator[Recording]:
    """Give the validated recordings of a release: ``train.tsv``, ``dev.tsv`` and ``test.tsv`` (else ``validated.tsv``)
    beside ``clips/``. Fields are never quoted there.

    Raises:
        BadInput: a table cannot be read.
    """
    folder = Path(request.source).expanduser()
    columns = Columns("path", request.columns.text or "sentence", request.columns.speaker or "client_id")
    asked = ReadRequest(request.source, columns, request.roots)
    for file in _common_voice_tables(folder):
        table = spelled(read_table(file, quoted=False, may_be_empty=True))
        names = names_in(table, asked) if table.rows else TableColumns()
        for row in table.rows:
            yield recording_of(row, names, folder / "clips", asked, split_named(file.stem))


def is_common_voice(folder: Path) -> bool:
    """Whether a folder is a release of Common Voice."""
    firsts = [set(_first_line(path).rstrip("\r\n").split("\t")) for path in _common_voice_tables(folder)]
    return (folder / "clips").is_dir() and any({"client_id", "path", "sentence"} <= names for names in firsts)


def _common_voice_tables(folder: Path) -> list[Path]:
    found = [path for name in ("train", "dev", "test") if (path := folder / f"{name}.tsv").is_file()]
    return found or [path for path in [folder / "validated.tsv"] if path.is_file()]


def _first_line(path: Path) -> str:
    """Return the beginning of a file's first line; nothing of one that cannot be read as text."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.readline(_PEEK)
    except (OSError, UnicodeDecodeError):
        return ""


def read_librispeech(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings of all subsets in a folder: ``SUBSET/SPEAKER/CHAPTER/`` with ``SPEAKER-CHAPTER.trans.txt``
    and FLAC files (openslr.org/12). Its texts are in capitals, and stay so.

    Raises:
        BadInput: a transcript file cannot be read.
    """
    for file in librispeech_transcripts(Path(request.source).expanduser()):
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{file}: cannot be read: {error}", "unpack the archive again") from error
        chapter = file.parent
        split = split_named(chapter.parent.parent.name.partition("-")[0])  # train-clean-100, dev-other, test-clean
        for number, line in enumerate(lines, start=1):
            if line.strip():
                name, _, text = line.strip().partition(" ")
                audio, fault = located(f"{name}.flac", chapter, request.roots)
                where = f"{file}, line {number}"
                yield Recording(name, audio, one_line(text), where, chapter.parent.name, "en", split, fault=fault)


def librispeech_transcripts(folder: Path) -> Iterator[Path]:
    """Return the transcript files, in order; none if this is no LibriSpeech."""
    for depth in _LIBRISPEECH_DEPTHS:
        yield from sorted(without_hidden(folder.glob(f"{depth}/*.trans.txt")))


def read_voxpopuli(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings of all languages in a folder as VoxPopuli's own tools leave it: ``LANGUAGE/asr_train.tsv``
    (dev, test) and ``LANGUAGE/YEAR/ID.ogg``; the raw text where there is one, else the normalised one.

    Raises:
        BadInput: a table cannot be read, or lacks a column.
    """
    texts = (request.columns.text,) if request.columns.text else ("raw_text", "normalized_text")
    for file in voxpopuli_tables(Path(request.source).expanduser()):
        table = read_table(file, quoted=False)
        table.column(("id",), "names of the recordings")
        table.column(texts, "transcripts", "--text-column")
        for row in table.rows:
            name, speaker = row.cells.get("id", ""), row.cells.get("speaker_id", "")
            audio, fault = located(f"{name[:4]}/{name}.ogg" if name else "", file.parent, request.roots)
            yield Recording(
                name or row.where,
                audio,
                one_line(next((cell for column in texts if (cell := row.text(column))), "")),
                row.where,
                "" if speaker.lower() in ("none", "na", "n/a") else speaker,
                file.parent.name,
                _VOXPOPULI_SPLITS[file.stem.removeprefix("asr_")],
                fault=fault,
            )


def voxpopuli_tables(folder: Path) -> list[Path]:
    """Return the tables of the folder's languages; none if this is no VoxPopuli."""
    places = [folder, *sorted(folder.glob("*")), *sorted(folder.glob("transcribed_data/*"))]
    return [path for place in places for split in _VOXPOPULI_SPLITS if (path := place / f"asr_{split}.tsv").is_file()]


def read_nemo(request: ReadRequest) -> Iterator[Recording]:
    """Give the recordings of a manifest of NeMo, as Granary is published: one JSON object a line with
    ``audio_filepath``, ``text`` and ``duration``; ``offset`` cuts a clip out of a longer file.

    Raises:
        BadInput: it cannot be read, or a line is no JSON object.
    """
    path = Path(request.source).expanduser()
    table = spelled(read_table(path))
    columns = Columns(request.columns.audio or "audio_filepath", request.columns.text, request.columns.speaker)
    asked = ReadRequest(request.source, columns, request.roots)
    names = names_in(table, asked)
    parts = path.stem.replace("-", "_").split("_")  # train_manifest
    split = next((found for part in parts if (found := split_named(part))), "")
    for row in table.rows:
        yield _transcript_only(recording_of(row, names, path.parent, asked, split, always_cut=True), row)


def is_nemo(path: Path) -> bool:
    """Whether a file looks like a manifest of NeMo."""
    if path.suffix.lower() not in JSON_LINES:
        return False
    try:
        first = json.loads(_first_line(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "audio_filepath" in first


def _transcript_only(found: Recording, row: Row) -> Recording:
    """Lines whose ``target_lang`` is not their ``source_lang`` hold translations, which are no transcripts."""
    spoken, written = row.cells.get("source_lang", ""), row.cells.get("target_lang", "")
    if found.fault is None and spoken and written and spoken != written:
        return dataclasses.replace(found, fault=Fault(ExclusionReason.TRANSLATION, f"from {spoken} into {written}"))
    return found
