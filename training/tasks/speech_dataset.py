"""Speech data sets: recordings with transcripts, by split.

Three layouts are read: a folder with ``train.csv`` / ``validation.csv`` / ``test.csv``, a folder of audio with
``metadata.csv`` or ``metadata.jsonl`` as Hugging Face's audiofolder has it, and a Hugging Face data set by name
(``name`` or ``name:configuration``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from profiles.errors import BadInput
from training.tasks.speech_clips import SPLITS, Clip, FileSource, SpeechSplits, find_text_column, hold_out
from training.tasks.tables import Row, Table, read_table

AUDIO_COLUMNS = ("audio_path", "file_name")
_OWN_COLUMNS = ("id", "language", "duration")


def read_speech(path: str, text_column: str = "") -> SpeechSplits:
    """Read the clips of a data set by split (``train``, ``validation``, ``test``; only those that are there).

    Raises:
        BadInput: not there, in no known layout, or with a fault in a table (named by file, line and column).
    """
    folder = Path(path).expanduser()
    if not path:
        raise BadInput("no data set was given", "set dataset_path to a folder with train.csv, or a hub name")
    if folder.is_file():
        return {"train": _clips(read_table(folder), text_column)}
    if folder.is_dir():
        return _read_folder(folder, text_column)
    if looks_like_path(path):
        raise BadInput(f"data set {path}: no such folder", "check dataset_path")
    from training.tasks.hub_speech import read_hub_speech  # the datasets package takes 2 s to import

    return read_hub_speech(path, text_column)


def split_to_evaluate(path: str, split: str = "") -> str:
    """Return the split that a finished model is evaluated on: ``split``, all of a lone table, or ``test``."""
    return split or ("train" if Path(path).expanduser().is_file() else "test")


def clips_of_split(path: str, split: str, text_column: str = "") -> list[Clip]:
    """Return the clips of one split; those that training holds out of it where there is no validation split.

    Raises:
        BadInput: there is no such split, or see :func:`read_speech`.
    """
    splits = read_speech(path, text_column)
    if split == "validation" and "train" in splits:
        splits = hold_out(splits)
    if split not in splits:
        raise BadInput(f"data set {path} has no split {split!r}", f"it has: {', '.join(splits)}")
    return splits[split]


def is_on_hub(path: str) -> bool:
    """Whether a data set is not here, and its name may be one of the hub."""
    return bool(path) and not Path(path).expanduser().exists() and not looks_like_path(path)


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be a path, not ``name`` or ``owner/name`` on the hub."""
    return (
        name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or Path(name).suffix in {".csv", ".txt"}
    )


def _read_folder(folder: Path, text_column: str) -> SpeechSplits:
    tables = {split: path for split in SPLITS if (path := _first_file(folder, split)) is not None}
    if tables:
        return {split: _clips(read_table(path), text_column) for split, path in tables.items()}
    metadata = _metadata(folder)
    if metadata is not None:
        return _by_first_folder(_clips(read_table(metadata), text_column), folder)
    inner = {split: path for split in SPLITS if (path := _split_metadata(folder, split)) is not None}
    if inner:
        return {split: _clips(read_table(path), text_column) for split, path in inner.items()}
    hint = "write train.csv with the columns id, audio_path, text"
    raise BadInput(f"data set {folder}: neither train.csv nor metadata.csv is there", hint)


def _first_file(folder: Path, split: str) -> Path | None:
    return next((path for name in SPLITS[split] if (path := folder / f"{name}.csv").is_file()), None)


def _metadata(folder: Path) -> Path | None:
    return next((path for end in ("csv", "jsonl") if (path := folder / f"metadata.{end}").is_file()), None)


def _split_metadata(folder: Path, split: str) -> Path | None:
    return next((path for name in SPLITS[split] if (path := _metadata(folder / name)) is not None), None)


def _by_first_folder(clips: list[Clip], folder: Path) -> SpeechSplits:
    """Divide the clips of one table by the split that the first folder of their path names, like audiofolder does."""
    found: SpeechSplits = {split: [] for split in SPLITS}
    for clip in clips:
        assert isinstance(clip.audio, FileSource)
        path = clip.audio.path
        first = path.relative_to(folder).parts[0] if path.is_relative_to(folder) else ""
        found[next((split for split, names in SPLITS.items() if first in names), "train")].append(clip)
    return {split: clips for split, clips in found.items() if clips}


def _clips(table: Table, text_column: str) -> list[Clip]:
    audio = table.column(AUDIO_COLUMNS, "recordings")
    text = find_text_column(table.columns, text_column, table, str(table.path))
    clips = [_clip(row, audio, text) for row in table.rows]
    _refuse_doubled(clips)
    _refuse_missing(clips, audio)
    return clips


def _clip(row: Row, audio: str, text: str) -> Clip:
    for column in (audio, text):
        if not row.cells.get(column):
            raise BadInput(f"{row.where}, column {column}: empty", "fill it in or remove the line")
    path = Path(row.cells[audio]).expanduser()
    source = FileSource(path if path.is_absolute() else row.table.parent / path)
    identity = row.cells.get("id") or row.cells[audio]
    further = {name: cell for name, cell in row.cells.items() if name not in (audio, text, *_OWN_COLUMNS)}
    seconds = row.number("duration")
    return Clip(identity, source, row.cells[text], row.where, row.cells.get("language", ""), seconds, further)


def _refuse_doubled(clips: Sequence[Clip]) -> None:
    seen: dict[str, Clip] = {}
    for clip in clips:
        first = seen.setdefault(clip.id, clip)
        if first is not clip:
            line = first.where.rpartition(" ")[2]
            raise BadInput(f"{clip.where}, column id: {clip.id!r} is there already in line {line}", "ids are unique")


def _missing(clips: Sequence[Clip]) -> Iterator[Clip]:
    return (clip for clip in clips if isinstance(clip.audio, FileSource) and not clip.audio.path.is_file())


def _refuse_missing(clips: Sequence[Clip], column: str) -> None:
    missing = list(_missing(clips))
    if missing:
        first = missing[0]
        assert isinstance(first.audio, FileSource)
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        hint = "paths are relative to the table's folder"
        raise BadInput(f"{first.where}, column {column}: {first.audio.path} is not there{more}", hint)
