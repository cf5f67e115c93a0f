"""Speech data sets: recordings with transcripts, by split.

Three layouts are read: a folder with ``train.csv`` / ``validation.csv`` / ``test.csv``, a folder of audio with
``metadata.csv`` or ``metadata.jsonl`` as Hugging Face's audiofolder has it, and a Hugging Face data set by name
(``name`` or ``name:configuration``).
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from profiles.errors import BadInput, counted
from profiles.installation import program
from training.tasks.faults import Faults
from training.tasks.patches import KEPT, PSEUDO, AppliedPatch, Patches, patched, read_patches, unknown
from training.tasks.speech_clips import (
    COLUMNS,
    FILE_COLUMNS,
    IN_TRAIN_TOO,
    LANGUAGE_COLUMNS,
    OFFSET_COLUMNS,
    SPLITS,
    Clip,
    FileSource,
    SpeechSplits,
    by_split,
    existing,
    find_text_column,
    hold_out,
    id_hash,
    says_silence,
    split_named,
    warn_once,
)
from training.tasks.stored_files import as_stored, without_hidden, written_path
from training.tasks.tables import Row, read_table

_TABLES = (".csv", ".tsv", ".jsonl", ".json")
_SPREADSHEETS = (".csv", ".tsv", ".txt", ".xlsx", ".xls", ".ods", ".numbers")
_OWN_COLUMNS = ("id", "language", "duration")
HOW_TO_LABEL = "write it with pseudo-label MODEL FOLDER --into DATASET, or set pseudo_share = 0"
_LEAST_MILLISECONDS = 100.0  # of a clip; as seconds it would be too long for one
_NAMED = 10  # remarks on patches that are logged one by one


@dataclass(frozen=True)
class SpeechTables:
    """The clips of a data set as its tables and patches have them, those that a patch leaves out among them."""

    splits: SpeechSplits
    folder: Path | None = None
    """Where the tables are; ``None`` on the hub, where there are no patches."""
    patches: Patches = field(default_factory=Patches)
    changes: Sequence[AppliedPatch] = ()
    notes: Sequence[str] = ()
    """Lines and files of the patches that do nothing, with their places."""


def read_speech(path: str, text_column: str = "") -> SpeechSplits:
    """Read the clips of a data set by split (``train``, ``validation``, ``test``; only those that are there).

    Raises:
        BadInput: not there, in no known layout, or with a fault in a table (named by file, line and column).
    """
    return present(_read(path, text_column))


def read_divided(path: str, text_column: str = "", pseudo_share: float = 0.0) -> SpeechSplits:
    """Like :func:`read_speech`, with a validation split in any case (:func:`hold_out`).

    Which clips are held out does not depend on patches: none goes from one split to the other because of them.

    Args:
        pseudo_share: the most of the training clips that may come from ``pseudo.csv``, whose texts a model wrote.
    """
    tables = _read(path, text_column)
    splits = present(tables, hold_out(tables.splits))
    if doubled := in_train_too(splits):
        warn_once(f"{counted(len(doubled), 'held-out recording')} {IN_TRAIN_TOO}, such as {doubled[0].where}")
    if pseudo_share:
        splits["train"] = [*splits["train"], *_pseudo(tables, len(splits["train"]), pseudo_share)]
    return splits


def in_train_too(splits: SpeechSplits) -> list[Clip]:
    """Return the clips of other splits whose recordings are trained on."""
    trained = {name for clip in splits.get("train", ()) for name in _files(clip)}
    others = (clip for split, clips in splits.items() if split != "train" for clip in clips)
    return [clip for clip in others if trained.intersection(_files(clip))]


def _files(clip: Clip) -> list[str]:
    return [os.path.abspath(clip.audio.path)] if isinstance(clip.audio, FileSource) else []


def _pseudo(tables: SpeechTables, count: int, share: float) -> list[Clip]:
    """Return clips of ``pseudo.csv`` to go with ``count`` others: always the same ones, those of the lowest hash.

    None has the recording or the id of a clip in a table, be it left out: what a person wrote, or said, comes first.
    """
    path = (tables.folder or Path()) / PSEUDO
    if tables.folder is None or not path.is_file():
        raise BadInput("pseudo_share is set, but there is no pseudo.csv in the data set's folder", HOW_TO_LABEL)
    part = _table(path, "text")
    known = {(kind, name) for clips in tables.splits.values() for clip in clips for kind, name in _names(clip)}
    clips = patched({"train": part.clips}, tables.patches, {})[0]["train"]
    new = [clip for clip in clips if not clip.left_out and not known.intersection(_names(clip))]
    _refuse_incomplete(new, part)
    ranked = sorted(new, key=lambda clip: id_hash(clip.id))
    room = len(new) if share >= 1 else int(share / (1 - share) * count + 1e-9)
    taken = {clip.id for clip in ranked[:room]}
    return [clip for clip in new if clip.id in taken]


def _names(clip: Clip) -> set[tuple[str, str]]:
    assert isinstance(clip.audio, FileSource)
    return {("id", clip.id), ("path", os.path.abspath(clip.audio.path))}


def _read(path: str, text_column: str) -> SpeechTables:
    tables = read_tables(path, text_column)
    for note in tables.notes[:_NAMED]:
        warn_once(note)
    if len(tables.notes) > _NAMED:
        warn_once(f"{len(tables.notes) - _NAMED} more remarks on patches; see: patches {path}")
    return tables


def present(tables: SpeechTables, splits: SpeechSplits | None = None) -> SpeechSplits:
    """Return the clips (those of ``splits``) without those that a patch leaves out.

    Raises:
        BadInput: nothing is left of a split.
    """
    splits = tables.splits if splits is None else splits
    found = {split: [clip for clip in clips if not clip.left_out] for split, clips in splits.items()}
    for split, clips in found.items():
        if splits[split] and not clips:
            last = splits[split][-1]
            message = f"{split}: patches leave out all of its clips ({len(splits[split])}), the last by {last.left_out}"
            raise BadInput(message, "remove lines or files from patches/delete")
    return found


def read_tables(path: str, text_column: str = "") -> SpeechTables:
    """Read a data set's tables and patches.

    Raises:
        BadInput: see :func:`read_speech`.
    """
    place = Path(path).expanduser()
    if not path:
        raise BadInput("no data set was given", "set dataset_path to a folder with train.csv, or a hub name")
    if place.is_file():
        label = split_named(place.stem) or "train"
        return _patched(place.parent, {"train": _table(place, text_column)}, text_column, {"train": label})
    if place.is_dir():
        return _patched(place, _read_folder(place, text_column), text_column)
    if looks_like_path(path):
        near = difflib.get_close_matches(place.name, [one.name for one in place.parent.glob("*")], 1)
        hint = f"did you mean {place.parent / near[0]}?" if near else "check its path (dataset_path)"
        raise BadInput(f"data set {path}: no such folder", hint)
    from training.tasks.hub_speech import read_hub_speech  # the datasets package takes 2 s to import

    return SpeechTables(read_hub_speech(path, text_column))


def files_of_table(table: Path, text_column: str = "", pseudo: bool = False) -> list[Path]:
    """Return the recordings that a lone table names, all below its folder, and what stands beside it for them.

    Args:
        pseudo: whether ``pseudo.csv`` is used.

    Raises:
        BadInput: the table cannot be used, or a recording is elsewhere: its path leads nowhere on another machine.
    """
    tables = read_tables(str(table), text_column)
    clips = [clip for part in tables.splits.values() for clip in part if not clip.left_out]
    beside = [table.parent / PSEUDO] if pseudo and (table.parent / PSEUDO).is_file() else []
    for part in [_table(path, "text") for path in beside]:
        part.faults.raise_any()
        clips += part.clips
    return beside + [_travelling(clip, table.parent) for clip in clips]


def _travelling(clip: Clip, folder: Path) -> Path:
    """Return the path of a recording, without steps up."""
    assert isinstance(clip.audio, FileSource)
    path = Path(os.path.normpath(clip.audio.path))
    if clip.audio.absolute or not path.is_relative_to(os.path.normpath(folder)):
        where = "an absolute path" if clip.audio.absolute else "outside of the table's folder"
        message = f"{clip.where}: {clip.audio.path} is {where}, so other machines do not get it"
        raise BadInput(message, "put the recordings beside the table, and write their paths relative to its folder")
    return path


@dataclass(frozen=True)
class _Part:
    """Clips of one table, and how their columns are called there."""

    clips: list[Clip]
    audio: str
    text: str
    faults: Faults
    """Lines of the table that give no clip."""


def _patched(
    folder: Path, parts: dict[str, _Part], text_column: str, labels: dict[str, str] | None = None
) -> SpeechTables:
    """Apply the patches in ``folder``, then refuse what is incomplete without being left out."""
    patches = read_patches(folder, text_column)
    raw = {split: part.clips for split, part in parts.items()}
    splits, changes = patched(raw, patches, labels or {})
    for split, part in parts.items():
        _refuse_incomplete([clip for clip in splits[split] if not clip.left_out], part)
    # a lone table may be one of several that the patches are for
    notes = patches.notes + ([] if labels else unknown(raw, patches))
    return SpeechTables(splits, folder, patches, changes, notes)


def split_to_evaluate(path: str, split: str = "") -> str:
    """Return the split that a finished model is evaluated on: ``split``, all of a lone table, or ``test``.

    Of a folder without a test split it is ``validation``, be it what training holds out.

    Raises:
        BadInput: see :func:`read_speech`.
    """
    place = Path(path).expanduser()
    if split or not place.is_dir():
        return split or ("train" if place.is_file() else "test")
    return "test" if "test" in read_tables(path).splits else "validation"


def clips_of_split(path: str, split: str, text_column: str = "") -> list[Clip]:
    """Return the clips of one split; those that training holds out of it where there is no validation split.

    Raises:
        BadInput: there is no such split, or see :func:`read_speech`.
    """
    tables = _read(path, text_column)
    held_out = split == "validation" and "train" in tables.splits
    splits = present(tables, hold_out(tables.splits) if held_out else None)
    if split not in splits:
        raise BadInput(f"data set {path} has no split {split!r}", f"it has: {', '.join(splits)}")
    return splits[split]


def is_on_hub(path: str) -> bool:
    """Whether a data set is not here, and its name may be one of the hub."""
    return bool(path) and not Path(path).expanduser().exists() and not looks_like_path(path)


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be a path, not ``name`` or ``owner/name`` on the hub."""
    is_file = Path(name).suffix.lower() in {".csv", ".tsv", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow"}
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or is_file


def has_tables(folder: Path) -> bool:
    """Whether a folder is a data set."""
    return bool(_tables_in(folder) or _metadata(folder) or _inner_tables(folder))


def _read_folder(folder: Path, text_column: str) -> dict[str, _Part]:
    tables, metadata = _tables_in(folder), _metadata(folder)
    if not tables and metadata is not None:
        return _by_first_folder(_table(metadata, text_column), folder)
    tables = tables or _inner_tables(folder)
    if not tables:
        raise BadInput(f"data set {folder}: neither train.csv nor metadata.csv is there", _instead_of_tables(folder))
    return {split: _table(path, text_column) for split, path in tables.items()}


def _instead_of_tables(folder: Path) -> str:
    """Return what to do with a folder that has no table of a data set."""
    hint = "write train.csv with the columns id, audio_path, text"
    there = [path for path in sorted(without_hidden(folder.glob("*"))) if path.suffix.lower() in _SPREADSHEETS]
    if there:
        hint = f"{there[0].name} is there: save it as train.csv ('CSV UTF-8') with the columns id, audio_path, text"
    if there and there[0].suffix.lower() in (".csv", ".tsv"):
        hint += f", or name it: --dataset {shlex.quote(str(there[0]))}"
    made = program("prepare", shlex.quote(str(folder)), "--out NEW")
    return f"{hint}; of other forms (LJSpeech, Kaldi, a text beside each sound, ...) a data set is made with: {made}"


def _tables_in(folder: Path) -> dict[str, Path]:
    return by_split(lambda name: next(filter(None, (existing(folder / f"{name}{end}") for end in _TABLES)), None))


def _inner_tables(folder: Path) -> dict[str, Path]:
    return by_split(lambda name: _metadata(folder / name))


def _metadata(folder: Path) -> Path | None:
    return existing(folder / "metadata.csv") or existing(folder / "metadata.jsonl")


def _by_first_folder(table: _Part, folder: Path) -> dict[str, _Part]:
    """Divide the clips of one table by the split that the first folder of their path names, like audiofolder does."""
    if not table.clips:
        table.faults.raise_any()
    found: SpeechSplits = {split: [] for split in SPLITS}
    for clip in table.clips:
        assert isinstance(clip.audio, FileSource)
        path = clip.audio.path
        first = path.relative_to(folder).parts[0] if path.is_relative_to(folder) else ""
        found[split_named(first) or "train"].append(clip)
    return {split: replace(table, clips=clips) for split, clips in found.items() if clips}


def _table(path: Path, text_column: str) -> _Part:
    faults = Faults(path)
    table = read_table(path, faults=faults).spelled(COLUMNS)
    audio = table.column(FILE_COLUMNS, "recordings")
    text = find_text_column(table, text_column)
    clips = list[Clip]()
    for row in table.rows:
        if row.cells.get(KEPT, "").lower() != "no":
            with faults:
                clips.append(_clip(row, audio, text))
    _refuse_parts(clips, path, faults)
    _refuse_doubled(clips, "id" if "id" in table.columns else audio, faults)
    return _Part(_in_seconds(path, clips), audio, text, faults)


def _in_seconds(path: Path, clips: list[Clip]) -> list[Clip]:
    """Return clips whose lengths are seconds: of a table that gives milliseconds, as its first recording shows."""
    first = next((clip for clip in clips if clip.duration), None)
    if first is None or any(clip.duration and clip.duration < _LEAST_MILLISECONDS for clip in clips):
        return clips
    assert first.duration is not None and isinstance(first.audio, FileSource)
    import soundfile  # 40 ms, for tables with such lengths only

    try:
        seconds = soundfile.info(str(first.audio.path)).duration
    except (RuntimeError, OSError, TypeError):
        return clips
    if not 0.9 < first.duration / 1000 / max(seconds, 1e-9) < 1.1:
        return clips
    warn_once(f"{path}: column duration is in milliseconds")
    return [replace(clip, duration=clip.duration and clip.duration / 1000) for clip in clips]


def _clip(row: Row, audio: str, text: str) -> Clip:
    if not row.cells.get(audio):
        raise BadInput(f"{row.where}, column {audio}: empty", "fill it in or remove the line")
    path, written = as_stored(row.table.parent, row.cells[audio]), written_path(row.cells[audio])
    source = FileSource(path, written.is_absolute() and path == written)
    identity = row.cells.get("id") or row.cells[audio]
    further = {name: cell for name, cell in row.cells.items() if name not in (audio, text, *_OWN_COLUMNS)}
    language = next((cell for name in LANGUAGE_COLUMNS if (cell := row.cells.get(name, ""))), "")
    return Clip(identity, source, row.text(text), row.where, language, row.number("duration"), further)


def _refuse_parts(clips: Sequence[Clip], table: Path, faults: Faults) -> None:
    """Refuse parts of files, which are not cut here. Where each row has a file, it may say where that was cut out."""
    rows = Counter(name for clip in clips for name in _files(clip))
    for clip in clips:
        column = next((name for name in OFFSET_COLUMNS if clip.columns.get(name)), "")
        shares = any(rows[name] > 1 for name in _files(clip))
        if column and (shares or (column == "offset" and clip.columns[column].strip("0.,:"))):
            hint = f"make clips of them: {program('prepare', shlex.quote(str(table)), '--out NEW')}"
            with faults:
                raise BadInput(f"{clip.where}, column {column}: parts of recordings, and files are read whole", hint)
            return


def _refuse_doubled(clips: Sequence[Clip], column: str, faults: Faults) -> None:
    seen: dict[str, Clip] = {}
    for clip in clips:
        first = seen.setdefault(clip.id, clip)
        if first is not clip:
            hint = "ids are unique" if column == "id" else "remove one of the lines, or add a column id"
            with faults:
                raise BadInput(f"{clip.where}, column {column}: {clip.id!r} is there already, in {first.where}", hint)


def _refuse_incomplete(clips: Sequence[Clip], part: _Part) -> None:
    """Raise all that is wrong with the lines of a table."""
    for clip in clips:
        with part.faults:
            if not clip.text and not says_silence(clip.columns):
                raise BadInput(f"{clip.where}, column {part.text}: empty", "fill it in or remove the line")
            if isinstance(clip.audio, FileSource) and not clip.audio.path.is_file():
                hint = "paths are relative to the table's folder"
                raise BadInput(f"{clip.where}, column {part.audio}: {clip.audio.path} is not there", hint)
    part.faults.raise_any()
