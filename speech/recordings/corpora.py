"""Readers of published corpora in their own formats: Common Voice, LibriSpeech, VoxPopuli, NeMo.

Each ``read_*`` yields the recordings of a source; the function that recognises such a source follows it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from profiles.errors import BadInput
from speech.recordings.recording import (
    Columns,
    Exclusion,
    ExclusionReason,
    ReadRequest,
    Recording,
    TableColumns,
    find_columns,
    locate_audio,
    one_line,
    recording_of,
    with_usual_spelling,
)
from training.tasks.data_files.splits import split_named, without_hidden
from training.tasks.data_files.tables import JSON_LINES, Row, read_table

_PEEK = 2**16  # characters of the first line that are read
_LIBRISPEECH_DEPTHS = ("*/*", "*/*/*", "*/*/*/*")  # a subset, the folder of the subsets, its parent
_VOXPOPULI_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


def read_common_voice(request: ReadRequest) -> Iterator[Recording]:
    """Yield the validated recordings of a release: ``train.tsv``, ``dev.tsv`` and ``test.tsv`` (or ``validated.tsv``)
    next to ``clips/``. Fields are never quoted.

    Raises:
        BadInput: a table cannot be read.
    """
    folder = Path(request.source).expanduser()
    columns = Columns("path", request.columns.text or "sentence", request.columns.speaker or "client_id")
    table_request = ReadRequest(request.source, columns, request.roots)
    for file in _common_voice_tables(folder):
        table = with_usual_spelling(read_table(file, quoted=False, may_be_empty=True))
        names = find_columns(table, table_request) if table.rows else TableColumns()
        for row in table.rows:
            yield recording_of(row, names, folder / "clips", table_request, split_named(file.stem))


def is_common_voice(folder: Path) -> bool:
    """Whether a folder is a release of Common Voice."""
    headers = [set(_first_line(path).rstrip("\r\n").split("\t")) for path in _common_voice_tables(folder)]
    return (folder / "clips").is_dir() and any({"client_id", "path", "sentence"} <= names for names in headers)


def _common_voice_tables(folder: Path) -> list[Path]:
    split_tables = [path for name in ("train", "dev", "test") if (path := folder / f"{name}.tsv").is_file()]
    return split_tables or [path for path in [folder / "validated.tsv"] if path.is_file()]


def _first_line(path: Path) -> str:
    """Return the beginning of a file's first line; empty if it cannot be read as text."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            return file.readline(_PEEK)
    except (OSError, UnicodeDecodeError):
        return ""


def read_librispeech(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of all subsets in a folder: ``SUBSET/SPEAKER/CHAPTER/`` with ``SPEAKER-CHAPTER.trans.txt``
    and FLAC files (openslr.org/12). Its texts are in capitals and stay so.

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
                audio, exclusion = locate_audio(f"{name}.flac", chapter, request.roots)
                location = f"{file}, line {number}"
                yield Recording(
                    name, audio, one_line(text), location, chapter.parent.name, "en", split, exclusion=exclusion
                )


def librispeech_transcripts(folder: Path) -> Iterator[Path]:
    """Yield the transcript files, in order; none if this is not LibriSpeech."""
    for depth in _LIBRISPEECH_DEPTHS:
        yield from sorted(without_hidden(folder.glob(f"{depth}/*.trans.txt")))


def read_voxpopuli(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of all languages in a folder as VoxPopuli's own tools write it: ``LANGUAGE/asr_train.tsv``
    (dev, test) and ``LANGUAGE/YEAR/ID.ogg``; the raw text if there is one, else the normalised one.

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
            audio, exclusion = locate_audio(f"{name[:4]}/{name}.ogg" if name else "", file.parent, request.roots)
            yield Recording(
                name or row.location,
                audio,
                one_line(next((cell for column in texts if (cell := row.text(column))), "")),
                row.location,
                "" if speaker.lower() in ("none", "na", "n/a") else speaker,
                file.parent.name,
                _VOXPOPULI_SPLITS[file.stem.removeprefix("asr_")],
                exclusion=exclusion,
            )


def voxpopuli_tables(folder: Path) -> list[Path]:
    """Return the tables of the folder's languages; none if this is not VoxPopuli."""
    folders = [folder, *sorted(folder.glob("*")), *sorted(folder.glob("transcribed_data/*"))]
    return [
        path
        for language_folder in folders
        for split in _VOXPOPULI_SPLITS
        if (path := language_folder / f"asr_{split}.tsv").is_file()
    ]


def read_nemo(request: ReadRequest) -> Iterator[Recording]:
    """Yield the recordings of a NeMo manifest, the format of Granary: one JSON object a line with ``audio_filepath``,
    ``text`` and ``duration``; ``offset`` cuts a clip out of a longer file.

    Raises:
        BadInput: it cannot be read, or a line is not a JSON object.
    """
    path = Path(request.source).expanduser()
    table = with_usual_spelling(read_table(path))
    columns = Columns(request.columns.audio or "audio_filepath", request.columns.text, request.columns.speaker)
    table_request = ReadRequest(request.source, columns, request.roots)
    names = find_columns(table, table_request)
    stem_words = path.stem.replace("-", "_").split("_")  # train_manifest
    split = next((named_split for word in stem_words if (named_split := split_named(word))), "")
    for row in table.rows:
        yield _exclude_translation(recording_of(row, names, path.parent, table_request, split, always_cut=True), row)


def is_nemo(path: Path) -> bool:
    """Whether a file looks like a NeMo manifest."""
    if path.suffix.lower() not in JSON_LINES:
        return False
    try:
        entry = json.loads(_first_line(path))
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and "audio_filepath" in entry


def _exclude_translation(recording: Recording, row: Row) -> Recording:
    """Exclude a recording whose text is a translation: its ``target_lang`` differs from its ``source_lang``."""
    source_language, target_language = row.cells.get("source_lang", ""), row.cells.get("target_lang", "")
    if recording.exclusion is None and source_language and target_language and source_language != target_language:
        return dataclasses.replace(
            recording,
            exclusion=Exclusion(ExclusionReason.TRANSLATION, f"from {source_language} into {target_language}"),
        )
    return recording
