"""Corrections of a data set that leave its tables as they are: CSV files in ``patches/`` beside them.

``override_text`` replaces transcripts, ``protect`` keeps samples from being left out, ``delete`` leaves samples out;
they are applied in this order. Each folder holds any number of CSV files with the column ``id``, in ``override_text``
one with the text, and if wanted ``split``: without it a line means the samples of that id in every split. Take a file
away, and what it did is undone.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from profiles.errors import BadInput
from training.tasks.speech_clips import SPLITS, Clip, SpeechSplits, find_text_column
from training.tasks.tables import Row, read_table

Kind = Literal["override_text", "protect", "delete"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""In the order in which they are applied."""
FOLDER = "patches"
MOST_FILES, MOST_BYTES = 1000, 1 << 28
"""Of all patches of one data set."""


@dataclass(frozen=True)
class Patch:
    """One line of a patch file."""

    kind: Kind
    id: str
    split: str
    """Split whose samples are meant; empty: all."""
    text: str
    """The transcript that ``override_text`` gives."""
    where: str
    """File and line."""

    def meets(self, split: str) -> bool:
        """Whether samples of ``split`` are meant; with an empty one: whether any are."""
        return not self.split or not split or self.split == split


@dataclass(frozen=True)
class Patches:
    """What the patch files of a data set say."""

    by_id: dict[str, list[Patch]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What a person should know: lines and files without effect, each with its place."""

    def of(self, kind: Kind, split: str, identity: str) -> Patch | None:
        """The line of one kind that means a sample, if there is one."""
        return next((p for p in self.by_id.get(identity, ()) if p.kind == kind and p.meets(split)), None)


@dataclass(frozen=True)
class Change:
    """What a line of a patch file did to a sample."""

    id: str
    split: str
    kind: Kind
    where: str
    """File and line of the patch."""
    before: str
    after: str


LEFT_OUT = "(left out)"
BLACKLIST = "blacklist-"
"""What the names of the files begin with that the command ``blacklist`` writes."""


def read_patches(folder: Path, text_column: str = "") -> Patches:
    """Read the patches of the data set whose tables are in ``folder``; there need not be any.

    Args:
        text_column: column of the transcripts in the data set's tables, if a person named one.

    Raises:
        BadInput: a file cannot be read, a line is incomplete, two lines give one sample different texts, or there is
            a folder whose name is no kind of patch; the message names file and line.
    """
    top = folder / FOLDER
    patches = Patches()
    if not top.is_dir():
        return patches
    files = _files(top, patches.notes)
    _check_sizes(top, [path for _, path in files])
    for kind, path in files:
        for patch in _lines(kind, path, text_column):
            _add(patches, patch)
    return patches


def _files(top: Path, notes: list[str]) -> list[tuple[Kind, Path]]:
    try:
        for entry in sorted(top.iterdir()):
            if not entry.name.startswith(".") and (entry.is_dir() or entry.suffix.lower() == ".csv"):
                _check_folder(entry)
        found = list[tuple[Kind, Path]]()
        for kind in KINDS:
            for path in sorted((top / kind).iterdir()) if (top / kind).is_dir() else []:
                if path.name.startswith("."):  # what file managers and open spreadsheets leave behind
                    continue
                if path.suffix.lower() == ".csv" and path.is_file():
                    found.append((kind, path))
                else:
                    notes.append(f"{path}: not a CSV file; it is not read")
    except OSError as error:
        raise BadInput(f"{error.filename or top}: {error.strerror}", "make it readable, or move it away") from error
    return found


def _check_folder(entry: Path) -> None:
    if entry.is_dir() and entry.name in KINDS:
        return
    near = difflib.get_close_matches(entry.name, KINDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"files of patches are in {', '.join(KINDS)}"
    raise BadInput(f"{entry}: no kind of patch", hint)


def _check_sizes(top: Path, files: list[Path]) -> None:
    if len(files) > MOST_FILES or sum(path.stat().st_size for path in files) > MOST_BYTES:
        message = f"{top}: more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB of patches"
        raise BadInput(message, "put what they say into fewer lines, or correct the tables themselves")


def _lines(kind: Kind, path: Path, text_column: str) -> Iterator[Patch]:
    table = read_table(path)
    table.column(("id",), "samples")
    text = ""
    if kind == "override_text":
        known = text_column if text_column in table.columns else ""
        text = find_text_column(table.columns, known, table, str(path))
    for row in table.rows:
        yield _patch(kind, row, text)


def _patch(kind: Kind, row: Row, text: str) -> Patch:
    identity = row.cells.get("id", "")
    if not identity:
        raise BadInput(f"{row.where}, column id: empty", "name the sample or remove the line")
    if text and not row.cells.get(text):
        hint = "write what is said; a sample to leave out belongs in delete"
        raise BadInput(f"{row.where}, column {text}: empty", hint)
    return Patch(kind, identity, _split(row), row.cells[text] if text else "", row.where)


def _split(row: Row) -> str:
    name = row.cells.get("split", "").lower()
    found = next((split for split, names in SPLITS.items() if name in names), "")
    if name and not found:
        raise BadInput(f"{row.where}, column split: no split {name!r}", f"it is one of: {', '.join(SPLITS)}, or empty")
    return found


def _add(patches: Patches, patch: Patch) -> None:
    """Take a line in; one that says the same again is noted."""
    known = patches.by_id.setdefault(patch.id, [])
    for other in known:
        if other.kind == patch.kind and other.meets(patch.split):
            if other.text != patch.text:
                message = f"{patch.where}: another text for {patch.id!r} than in {other.where}"
                raise BadInput(message, "keep one of the two lines")
            if other.split in ("", patch.split):
                patches.notes.append(f"{patch.where}: {patch.id!r} is there already, in {other.where}")
                return
    known.append(patch)


def patched(splits: SpeechSplits, patches: Patches, labels: dict[str, str]) -> tuple[SpeechSplits, list[Change]]:
    """Apply ``patches``; return the clips and what was changed, in the order of the clips.

    A clip that is left out stays, marked, for those who divide a split by its ids.

    Args:
        labels: what patches call a split, where that is not its own name.
    """
    changes = list[Change]()
    result = {
        split: [_patched_clip(clip, labels.get(split, split), patches, changes) for clip in clips]
        for split, clips in splits.items()
    }
    return result, changes


def _patched_clip(clip: Clip, split: str, patches: Patches, changes: list[Change]) -> Clip:
    if clip.id not in patches.by_id:
        return clip
    override, protect, delete = (patches.of(kind, split, clip.id) for kind in KINDS)
    if override:
        changes.append(Change(clip.id, split, override.kind, override.where, clip.text, override.text))
        clip = dataclasses.replace(clip, text=override.text)
    if protect:
        before = f"{LEFT_OUT} by {delete.where}" if delete else clip.text
        changes.append(Change(clip.id, split, protect.kind, protect.where, before, clip.text))
    elif delete:
        changes.append(Change(clip.id, split, delete.kind, delete.where, clip.text, LEFT_OUT))
        clip = dataclasses.replace(clip, left_out=delete.where)
    return clip


def unknown(splits: SpeechSplits, patches: Patches) -> list[str]:
    """Say which lines mean no sample of ``splits``."""
    there = {(name, clip.id) for split, clips in splits.items() for clip in clips for name in ("", split)}
    lines = itertools.chain.from_iterable(patches.by_id.values())
    return [
        f"{patch.where}: no sample {patch.id!r}" + (f" in {patch.split}" if patch.split else "")
        for patch in lines
        if (patch.split, patch.id) not in there
    ]
