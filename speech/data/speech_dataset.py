"""Read speech data sets: recordings with transcripts, by split.

Three layouts are supported: a folder with ``train.csv`` / ``validation.csv`` / ``test.csv`` (or a single table of any
name, which is taken for the training data), a folder of audio with ``metadata.csv`` or ``metadata.jsonl`` as in Hugging
Face's audiofolder, and a Hugging Face data set by name (``name`` or ``name:configuration``).
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from profiles.errors import BadInput, counted
from profiles.installation import program
from profiles.locations import is_on_hub, looks_like_path, similar_path
from speech.data.missing_tables import missing_tables
from speech.data.patches import (
    KEPT,
    PSEUDO,
    AppliedPatch,
    Patches,
    apply_patches,
    read_patches,
    unmatched_patches,
)
from speech.data.path_resolution import SEARCHED, is_written_absolute, resolve_path
from speech.data.speech_clips import (
    COLUMNS,
    LANGUAGE_COLUMNS,
    LEAKAGE_REMARK,
    OFFSET_COLUMNS,
    Clip,
    FileSource,
    SpeechSplits,
    files_of_clip,
    find_audio_column,
    find_text_column,
    hold_out,
    leaked_clips,
    logger,
    repair_hint,
    says_silence,
    warn_once,
)
from training.tasks.data_files.faults import Faults
from training.tasks.data_files.splits import SPLITS, by_split, id_hash, path_if_file, split_named, without_hidden
from training.tasks.data_files.tables import Row, read_table

_TABLES = (".csv", ".tsv", ".jsonl", ".json")
_CLIP_COLUMNS = ("id", "language", "duration")
_LABEL = program("data", "pseudo-label", "MODEL FOLDER --into DATASET")
LABEL_HINT = f"set pseudo_share = 0, or write it with: {_LABEL}"
_MIN_MILLISECONDS = 100.0  # of a clip, whose duration in seconds would be implausible
_MAX_LISTED = 10  # remarks on patches that are logged individually


@dataclass(frozen=True)
class SpeechTables:
    """The clips of a data set with patches applied, including those that a patch marks as left out."""

    splits: SpeechSplits
    folder: Path | None = None
    """Folder of the tables; ``None`` on the hub, where there are no patches."""
    patches: Patches = field(default_factory=Patches)
    changes: Sequence[AppliedPatch] = ()
    notes: Sequence[str] = ()
    """Remarks on lines and files of patches without effect, with their locations."""


def read_speech(path: str, text_column: str = "") -> SpeechSplits:
    """Read the clips of a data set by split (those of ``train``, ``validation`` and ``test`` that exist).

    Raises:
        BadInput: not found, in no known layout, or with an error in a table (named by file, line and column).
    """
    return without_left_out(_read(path, text_column))


def read_with_validation(
    path: str, text_column: str = "", pseudo_share: float = 0.0, quiet: bool = False
) -> SpeechSplits:
    """Like :func:`read_speech`, but always with a validation split (:func:`hold_out`).

    Which clips are held out does not depend on patches, so that no clip changes its split because of them.

    Args:
        pseudo_share: maximum share of the training clips from ``pseudo.csv``, whose texts were written by a model.
        quiet: remarks are no warnings, as who started the run has given them; those on a data set of the hub are.
    """
    tables, tell = _read(path, text_column), logger.info if quiet and not is_on_hub(path) else warn_once
    splits = without_left_out(tables, hold_out(tables.splits, tell))
    if doubled := leaked_clips(splits):
        tell(f"{counted(len(doubled), 'held-out recording')} {LEAKAGE_REMARK}, such as {doubled[0].location}")
    if pseudo_share:
        splits["train"] = [*splits["train"], *_pseudo(tables, len(splits["train"]), pseudo_share)]
    return splits


def _pseudo(tables: SpeechTables, count: int, share: float) -> list[Clip]:
    """Return the clips of ``pseudo.csv`` to add to ``count`` others, chosen by lowest hash.

    Recordings and ids that are in a table are excluded, even if left out: what people wrote takes precedence.
    """
    path = (tables.folder or Path()) / PSEUDO
    if tables.folder is None or not path.is_file():
        raise BadInput("pseudo_share is set, but there is no pseudo.csv in the data set's folder", LABEL_HINT)
    pseudo_table = _table(path, "text")
    table_names = {(kind, name) for clips in tables.splits.values() for clip in clips for kind, name in _names(clip)}
    clips = apply_patches({"train": pseudo_table.clips}, tables.patches, {})[0]["train"]
    new = [clip for clip in clips if not clip.left_out and not table_names.intersection(_names(clip))]
    _check_complete(new, pseudo_table)
    ranked = sorted(new, key=lambda clip: id_hash(clip.id))
    limit = len(new) if share >= 1 else int(share / (1 - share) * count + 1e-9)
    taken = {clip.id for clip in ranked[:limit]}
    return [clip for clip in new if clip.id in taken]


def _names(clip: Clip) -> set[tuple[str, str]]:
    assert isinstance(clip.audio, FileSource)
    return {("id", clip.id), ("path", os.path.abspath(clip.audio.path))}


def _read(path: str, text_column: str) -> SpeechTables:
    tables = read_tables(path, text_column)
    for note in tables.notes[:_MAX_LISTED]:
        warn_once(note)
    if len(tables.notes) > _MAX_LISTED:
        warn_once(f"{len(tables.notes) - _MAX_LISTED} more remarks on patches; see: patches {path}")
    return tables


def without_left_out(tables: SpeechTables, splits: SpeechSplits | None = None) -> SpeechSplits:
    """Return the clips (of ``splits`` if given) without those that a patch leaves out.

    Raises:
        BadInput: nothing is left of a split.
    """
    splits = tables.splits if splits is None else splits
    remaining = {split: [clip for clip in clips if not clip.left_out] for split, clips in splits.items()}
    for split, clips in remaining.items():
        if splits[split] and not clips:
            last_patch = splits[split][-1].left_out
            message = f"{split}: patches leave out all of its clips ({len(splits[split])}), the last by {last_patch}"
            raise BadInput(message, "remove lines or files from patches/delete")
    return remaining


def read_tables(path: str, text_column: str = "") -> SpeechTables:
    """Read a data set's tables and patches.

    Raises:
        BadInput: see :func:`read_speech`.
    """
    source = Path(path).expanduser()
    if not path:
        raise BadInput("no data set was given", "set dataset_path to a folder with train.csv, or a hub name")
    if source.is_file():
        label = split_named(source.stem) or "train"
        return _with_patches(source.parent, {"train": _table(source, text_column)}, text_column, {"train": label})
    if source.is_dir():
        return _with_patches(source, _read_folder(source, text_column), text_column)
    if looks_like_path(path):
        similar = similar_path(source)
        hint = f"did you mean {similar}?" if similar else "check the path: --dataset, or dataset_path of the profile"
        raise BadInput(f"data set {path}: no such folder", hint)
    from speech.data.hub_speech import read_hub_speech  # the datasets package takes 2 s to import

    return SpeechTables(read_hub_speech(path, text_column))


def files_of_table(table: Path, text_column: str = "", pseudo: bool = False) -> list[Path]:
    """Return the recordings listed in a single table, all below its folder, and ``pseudo.csv`` beside it if used.

    Args:
        pseudo: whether ``pseudo.csv`` is used.

    Raises:
        BadInput: the table cannot be used, or a recording is outside the folder, so that it cannot be sent.
    """
    tables = read_tables(str(table), text_column)
    clips = [clip for split_clips in tables.splits.values() for clip in split_clips if not clip.left_out]
    pseudo_tables = [table.parent / PSEUDO] if pseudo and (table.parent / PSEUDO).is_file() else []
    for table_clips in [_table(path, "text") for path in pseudo_tables]:
        table_clips.faults.raise_any()
        clips += table_clips.clips
    return pseudo_tables + [_sendable_path(clip, table.parent) for clip in clips]


def _sendable_path(clip: Clip, folder: Path) -> Path:
    """Return the normalised path of a recording that can be sent with the table's folder."""
    assert isinstance(clip.audio, FileSource)
    path = Path(os.path.normpath(clip.audio.path))
    if clip.audio.absolute or not path.is_relative_to(os.path.normpath(folder)):
        reason = "an absolute path" if clip.audio.absolute else "outside of the table's folder"
        message = f"{clip.location}: {clip.audio.path} is {reason}, so other machines do not get it"
        raise BadInput(message, "put the recordings beside the table, and write their paths relative to its folder")
    return path


@dataclass(frozen=True)
class _TableClips:
    """Clips of one table, and its columns as the file spells them."""

    clips: list[Clip]
    audio: str
    text: str
    faults: Faults
    """Errors of invalid lines."""


def _with_patches(
    folder: Path, tables: dict[str, _TableClips], text_column: str, labels: dict[str, str] | None = None
) -> SpeechTables:
    """Apply the patches in ``folder``, then reject incomplete clips that are not left out."""
    patches = read_patches(folder, text_column)
    raw = {split: table.clips for split, table in tables.items()}
    splits, changes = apply_patches(raw, patches, labels or {})
    for split, table in tables.items():
        _check_complete([clip for clip in splits[split] if not clip.left_out], table)
    # the patches may be for several tables, of which a single one is read
    notes = patches.notes + ([] if labels else unmatched_patches(raw, patches))
    return SpeechTables(splits, folder, patches, changes, notes)


def split_to_evaluate(path: str, split: str = "") -> str:
    """Return the split that a trained model is evaluated on: ``split``, all of a single table, or ``test``.

    A folder without a test split is evaluated on ``validation``, which may be the split held out by training.

    Raises:
        BadInput: see :func:`read_speech`.
    """
    source = Path(path).expanduser()
    if split or not source.is_dir():
        return split or ("train" if source.is_file() else "test")
    return "test" if "test" in read_tables(path).splits else "validation"


def clips_of_split(path: str, split: str, text_column: str = "") -> list[Clip]:
    """Return the clips of one split; without a validation split, those held out by training.

    Raises:
        BadInput: there is no such split, or see :func:`read_speech`.
    """
    tables = _read(path, text_column)
    held_out = split == "validation" and "train" in tables.splits
    splits = without_left_out(tables, hold_out(tables.splits) if held_out else None)
    if split not in splits:
        raise BadInput(f"data set {path} has no split {split!r}", f"it has: {', '.join(splits)}")
    return splits[split]


def has_tables(folder: Path) -> bool:
    """Whether a folder holds the tables of a data set."""
    return bool(_tables_in(folder) or _metadata(folder) or _inner_tables(folder) or _only_table(folder))


def _read_folder(folder: Path, text_column: str) -> dict[str, _TableClips]:
    tables, metadata = _tables_in(folder), _metadata(folder)
    if not tables and metadata is not None:
        return _by_first_folder(_table(metadata, text_column), folder)
    tables = tables or _inner_tables(folder) or _only_table(folder)
    if not tables:
        raise missing_tables(folder)
    return {split: _table(path, text_column) for split, path in tables.items()}


def _tables_in(folder: Path) -> dict[str, Path]:
    return by_split(lambda name: next(filter(None, (path_if_file(folder / f"{name}{end}") for end in _TABLES)), None))


def _inner_tables(folder: Path) -> dict[str, Path]:
    return by_split(lambda name: _metadata(folder / name))


def _only_table(folder: Path) -> dict[str, Path]:
    """Return the table in a folder that holds a single one, under whatever name, as training data."""
    paths = [file for file in without_hidden(folder.glob("*.[ct]sv")) if file.name != PSEUDO]
    return {"train": paths[0]} if len(paths) == 1 else {}


def _metadata(folder: Path) -> Path | None:
    return path_if_file(folder / "metadata.csv") or path_if_file(folder / "metadata.jsonl")


def _by_first_folder(table: _TableClips, folder: Path) -> dict[str, _TableClips]:
    """Divide the clips of one table by the first folder of their path, which names the split, as audiofolder does."""
    if not table.clips:
        table.faults.raise_any()
    clips_by_split: SpeechSplits = {split: [] for split in SPLITS}
    for clip in table.clips:
        assert isinstance(clip.audio, FileSource)
        path = clip.audio.path
        top_folder = path.relative_to(folder).parts[0] if path.is_relative_to(folder) else ""
        clips_by_split[split_named(top_folder) or "train"].append(clip)
    return {split: replace(table, clips=clips) for split, clips in clips_by_split.items() if clips}


def _table(path: Path, text_column: str) -> _TableClips:
    faults = Faults(path)
    table = read_table(path, faults=faults).with_spelling(COLUMNS)
    audio = find_audio_column(table)
    text = find_text_column(table, text_column, audio=audio)
    clips = list[Clip]()
    for row in table.rows:
        if row.cells.get(KEPT, "").lower() != "no":
            with faults:
                clips.append(_clip(row, audio, text))
    _check_excerpts(clips, path, faults)
    _check_duplicates(clips, "id" if "id" in table.columns else audio, faults)
    return _TableClips(_in_seconds(path, clips), table.spelling_of(audio), table.spelling_of(text), faults)


def _in_seconds(path: Path, clips: list[Clip]) -> list[Clip]:
    """Convert durations in milliseconds to seconds, if the first recording confirms that unit."""
    timed_clip = next((clip for clip in clips if clip.duration), None)
    if timed_clip is None or any(clip.duration and clip.duration < _MIN_MILLISECONDS for clip in clips):
        return clips
    assert timed_clip.duration is not None and isinstance(timed_clip.audio, FileSource)
    import soundfile  # 40 ms, only for tables with such durations

    try:
        seconds = soundfile.info(str(timed_clip.audio.path)).duration
    except (RuntimeError, OSError, TypeError):
        return clips
    if not 0.9 < timed_clip.duration / 1000 / max(seconds, 1e-9) < 1.1:
        return clips
    warn_once(f"{path}: column duration is in milliseconds")
    return [replace(clip, duration=clip.duration and clip.duration / 1000) for clip in clips]


def _clip(row: Row, audio: str, text: str) -> Clip:
    if not row.cells.get(audio):
        raise BadInput(f"{row.location}, column {audio}: empty", repair_hint(row.table))
    path = resolve_path(row.table.parent, row.cells[audio])
    source = FileSource(path, is_written_absolute(row.cells[audio], path))
    identity = row.cells.get("id") or row.cells[audio]
    further = {name: cell for name, cell in row.cells.items() if name not in (audio, text, *_CLIP_COLUMNS)}
    language = next((cell for name in LANGUAGE_COLUMNS if (cell := row.cells.get(name, ""))), "")
    return Clip(identity, source, row.text(text), row.location, language, row.number("duration"), further)


def _check_excerpts(clips: Sequence[Clip], table: Path, faults: Faults) -> None:
    """Reject rows that are parts of files; an offset is harmless if each row has a file of its own."""
    rows = Counter(name for clip in clips for name in files_of_clip(clip))
    for clip in clips:
        column = next((name for name in OFFSET_COLUMNS if clip.columns.get(name)), "")
        shares = any(rows[name] > 1 for name in files_of_clip(clip))
        if column and (shares or (column == "offset" and clip.columns[column].strip("0.,:"))):
            hint = f"make clips of them: {program('data', 'prepare', shlex.quote(str(table)), '--out NEW')}"
            with faults:
                raise BadInput(f"{clip.location}, column {column}: parts of recordings, and files are read whole", hint)
            return


def _check_duplicates(clips: Sequence[Clip], column: str, faults: Faults) -> None:
    seen: dict[str, Clip] = {}
    for clip in clips:
        earlier = seen.setdefault(clip.id, clip)
        if earlier is not clip:
            hint = "ids are unique" if column == "id" else "remove one of the lines, or add a column id"
            with faults:
                raise BadInput(
                    f"{clip.location}, column {column}: {clip.id!r} is there already, in {earlier.location}", hint
                )


def _check_complete(clips: Sequence[Clip], table: _TableClips) -> None:
    """Raise all errors of a table's lines."""
    repair, searched = repair_hint(table.faults.file), f", {SEARCHED}"
    for clip in clips:
        with table.faults:
            if not clip.text and not says_silence(clip.columns):
                raise BadInput(f"{clip.location}, column {table.text}: empty", repair)
            if isinstance(clip.audio, FileSource) and not clip.audio.path.is_file():
                problem = f"{clip.location}, column {table.audio}: {clip.audio.path} is not there{searched}"
                searched = ""  # the first one says it for all
                raise BadInput(problem, repair)
    table.faults.raise_any()
