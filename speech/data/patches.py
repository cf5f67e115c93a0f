"""Files that complement a data set's tables without modifying them: corrections, and pseudo-labels.

Corrections are CSV files in ``patches/``: ``override_text`` replaces transcripts, ``protect`` prevents samples from
being left out, ``delete`` leaves samples out; they are applied in this order. Each folder holds any number of CSV files
with the column ``id``, in ``override_text`` also the text, and optionally ``split``: without it a line applies to the
samples of that id in every split. Removing a file undoes its changes.

``pseudo.csv`` holds transcripts by a model, each with its measures and whether it is good enough to train on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args
from unicodedata import normalize

from profiles.errors import BadInput
from profiles.options import hint_for
from profiles.quantities import bytes_text, setting_text
from speech.data.path_resolution import resolve_path
from speech.data.sound_containers import SOUND_ENDINGS
from speech.data.speech_clips import TEXT_COLUMNS, Clip, SpeechSplits
from training.tasks.data_files.splits import SPLITS, split_named
from training.tasks.data_files.tables import Row, check_size, read_table

Kind = Literal["override_text", "protect", "delete"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of patches, in the order in which they are applied."""
FOLDER = "patches"
MAX_FILES, MAX_BYTES = 1000, 1 << 28
"""Limits over all patches of one data set."""
PSEUDO = "pseudo.csv"
KEPT = "kept"
"""Column of any table of recordings; the value ``no`` leaves the row out."""
PSEUDO_COLUMNS = (
    *("id", "audio_path", "text", KEPT, "left_out", "confidence", "agreement", "compression", "no_speech"),
    *("duration", "cut", "unusable", "heard_by"),
)
_MAX_PSEUDO_BYTES = 1 << 30


@dataclass(frozen=True)
class Patch:
    """One line of a patch file."""

    kind: Kind
    id: str
    split: str
    """Split that it applies to; empty: all."""
    text: str
    """New transcript of ``override_text``."""
    location: str
    """File and line."""

    def applies_to(self, split: str) -> bool:
        """Whether it applies to samples of ``split``; an empty split matches any."""
        return not self.split or not split or self.split == split


@dataclass(frozen=True)
class Patches:
    """The patches of a data set."""

    by_id: dict[str, list[Patch]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Remarks for the user: lines and files without effect, with their locations."""

    def of(self, kind: Kind, split: str, identity: str) -> Patch | None:
        """Return the patch of one kind that applies to a sample, if any."""
        return next((p for p in self.by_id.get(identity, ()) if p.kind == kind and p.applies_to(split)), None)


@dataclass(frozen=True)
class AppliedPatch:
    """The effect of a patch on a sample."""

    id: str
    split: str
    kind: Kind
    where: str
    """File and line of the patch."""
    before: str
    after: str


LEFT_OUT = "(left out)"
BLACKLIST = "blacklist-"
"""Prefix of the files written by the command ``blacklist``."""


def read_patches(folder: Path, text_column: str = "") -> Patches:
    """Read the patches, if any, of the data set whose tables are in ``folder``.

    Args:
        text_column: column of the transcripts in the data set's tables, if the user named one.

    Raises:
        BadInput: a file cannot be read, a line is incomplete, two lines give one sample different texts, or a folder's
            name is not a kind of patch; the message names file and line.
    """
    top = folder / FOLDER
    patches = Patches()
    if not top.is_dir():
        return patches
    files = _files(top, patches.notes)
    if len(files) > MAX_FILES or sum(path.stat().st_size for _, path in files) > MAX_BYTES:
        message = f"{top}: more than {MAX_FILES} files or {bytes_text(MAX_BYTES)} of patches"
        raise BadInput(message, "put what they say into fewer lines, or correct the tables themselves")
    for kind, path in files:
        for patch in _lines(kind, path, text_column):
            _add(patches, patch)
    return patches


def _files(top: Path, notes: list[str]) -> list[tuple[Kind, Path]]:
    try:
        for entry in sorted(top.iterdir()):
            is_meant = not entry.name.startswith(".") and (entry.is_dir() or entry.suffix.lower() == ".csv")
            if is_meant and not (entry.is_dir() and entry.name in KINDS):
                hint = hint_for(entry.name, KINDS, f"files of patches are in {', '.join(KINDS)}")
                raise BadInput(f"{entry}: no kind of patch", hint)
        patch_files = list[tuple[Kind, Path]]()
        for kind in KINDS:
            for path in sorted((top / kind).iterdir()) if (top / kind).is_dir() else []:
                if path.name.startswith("."):  # left behind by file managers and open spreadsheets
                    continue
                if path.suffix.lower() == ".csv" and path.is_file():
                    patch_files.append((kind, path))
                else:
                    notes.append(f"{path}: not a CSV file; it is ignored")
    except OSError as error:
        raise BadInput(f"{error.filename or top}: {error.strerror}", "make it readable, or move it away") from error
    return patch_files


def _lines(kind: Kind, path: Path, text_column: str) -> Iterator[Patch]:
    table = read_table(path).with_spelling(("id", "split", *TEXT_COLUMNS))
    table.column(("id",), "samples")
    text = ""
    if kind == "override_text":
        text = table.column((text_column, *TEXT_COLUMNS) if text_column else TEXT_COLUMNS, "transcripts")
    for row in table.rows:
        yield _patch(kind, row, text)


def _patch(kind: Kind, row: Row, text: str) -> Patch:
    identity = row.cells.get("id", "")
    if not identity:
        raise BadInput(f"{row.location}, column id: empty", "name the sample or remove the line")
    if text and not row.text(text):
        hint = "write what is said; a sample to leave out belongs in delete"
        raise BadInput(f"{row.location}, column {text}: empty", hint)
    named = row.cells.get("split", "")
    split = split_named(named)
    if named and not split:
        hint = f"it is one of: {', '.join(SPLITS)}, or empty"
        raise BadInput(f"{row.location}, column split: no split {named.lower()!r}", hint)
    return Patch(kind, identity, split, row.text(text) if text else "", row.location)


def _add(patches: Patches, patch: Patch) -> None:
    """Add a patch; a duplicate is noted instead."""
    same_id = patches.by_id.setdefault(patch.id, [])
    for earlier in same_id:
        if earlier.kind == patch.kind and earlier.applies_to(patch.split):
            if earlier.text != patch.text:
                message = f"{patch.location}: another text for {patch.id!r} than in {earlier.location}"
                raise BadInput(message, "keep one of the two lines")
            if earlier.split in ("", patch.split):
                patches.notes.append(f"{patch.location}: {patch.id!r} is there already, in {earlier.location}")
                return
    same_id.append(patch)


def apply_patches(
    splits: SpeechSplits, patches: Patches, labels: dict[str, str]
) -> tuple[SpeechSplits, list[AppliedPatch]]:
    """Apply ``patches``; return the clips and the changes, in the order of the clips.

    A clip that is left out stays in the list, marked, because splits are divided by the ids of all clips.

    Args:
        labels: names that patches use for splits, where they differ.
    """
    changes = list[AppliedPatch]()
    result = {
        split: [_patch_clip(clip, labels.get(split, split), patches, changes) for clip in clips]
        for split, clips in splits.items()
    }
    return result, changes


def _patch_clip(clip: Clip, split: str, patches: Patches, changes: list[AppliedPatch]) -> Clip:
    if clip.id not in patches.by_id:
        return clip
    override, protect, delete = (patches.of(kind, split, clip.id) for kind in KINDS)
    if override:
        changes.append(AppliedPatch(clip.id, split, override.kind, override.location, clip.text, override.text))
        clip = dataclasses.replace(clip, text=override.text)
    if protect:
        before = f"{LEFT_OUT} by {delete.location}" if delete else clip.text
        changes.append(AppliedPatch(clip.id, split, protect.kind, protect.location, before, clip.text))
    elif delete:
        changes.append(AppliedPatch(clip.id, split, delete.kind, delete.location, clip.text, LEFT_OUT))
        clip = dataclasses.replace(clip, left_out=delete.location)
    return clip


def unmatched_patches(splits: SpeechSplits, patches: Patches) -> list[str]:
    """Return a remark for every patch that applies to no sample of ``splits``."""
    sample_keys = {(name, clip.id) for split, clips in splits.items() for clip in clips for name in ("", split)}
    lines = itertools.chain.from_iterable(patches.by_id.values())
    return [
        f"{patch.location}: no sample {patch.id!r}" + (f" in {patch.split}" if patch.split else "")
        for patch in lines
        if (patch.split, patch.id) not in sample_keys
    ]


@dataclass(frozen=True)
class PseudoRow:
    """One pseudo-labelled recording."""

    id: str
    path: Path
    text: str = ""
    confidence: float = 0.0
    """Mean natural logarithm of the tokens' probabilities."""
    agreement: float = 0.0
    """1 - WER between two transcriptions, at least 0."""
    compression: float = 0.0
    no_speech: float = 0.0
    seconds: float = 0.0
    cut: bool = False
    unusable: str = ""
    """Why it was not transcribed."""
    heard_by: str = ""
    """Hashes of the models."""
    left_out: str = ""
    """Why it is excluded from training."""
    kind: str = ""
    """The same reason without the row's own figure, for counting."""

    def cells(self, folder: Path) -> list[str]:
        """Return the cells of a line of a table in ``folder``, in the order of :data:`PSEUDO_COLUMNS`."""
        folder = folder.resolve()
        path = self.path.relative_to(folder) if self.path.is_relative_to(folder) else self.path
        numbers = [f"{value:.4f}" for value in (self.confidence, self.agreement, self.compression, self.no_speech)]
        head = [self.id, str(path), self.text, "no" if self.left_out else "yes", self.left_out]
        return [*head, *numbers, f"{self.seconds:.3f}", str(int(self.cut)), self.unusable, self.heard_by]


@dataclass(frozen=True)
class TextBounds:
    """Quality thresholds of a pseudo-label. The first three are those of Radford et al. 2022, section 4.5."""

    confidence: float = -1.0
    compression: float = 2.4
    no_speech: float = 0.6
    agreement: float = 0.9

    def judge(self, row: PseudoRow) -> PseudoRow:
        """Return the row with the reason why it is left out, if any."""
        reason = row.unusable or ("" if row.text else "nothing was heard") or ("the text has no end" if row.cut else "")
        if reason:
            return dataclasses.replace(row, left_out=reason, kind=reason)
        for name, value, upper, explanation in (
            ("no-speech probability", row.no_speech, self.no_speech, ""),
            ("compression ratio", row.compression, self.compression, ": it repeats itself"),
        ):
            if value > upper:
                return _left_out(row, name, value, f"above {setting_text(upper)}{explanation}")
        for name, value, lower in (
            ("confidence", row.confidence, self.confidence),
            ("agreement", row.agreement, self.agreement),
        ):
            if value < lower:
                return _left_out(row, name, value, f"below {setting_text(lower)}")
        return dataclasses.replace(row, left_out="", kind="")


def _left_out(row: PseudoRow, measure: str, value: float, bound: str) -> PseudoRow:
    return dataclasses.replace(row, left_out=f"{measure} {value:.2f} {bound}", kind=f"{measure} {bound}")


def find_recordings(folder: Path, root: Path) -> list[tuple[str, Path]]:
    """Return the audio files below a folder: their path relative to ``root`` (else to the folder), and their path.

    Raises:
        BadInput: the folder does not exist, or holds none.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder", "name the folder of the recordings")
    folder, root = folder.resolve(), root.resolve()
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SOUND_ENDINGS and path.is_file())
    named_paths = [
        (normalize("NFC", path.relative_to(root if path.is_relative_to(root) else folder).as_posix()), path)
        for path in paths
        if not any(name.startswith(".") for name in path.relative_to(folder).parts) and str(path).isprintable()
    ]
    if not named_paths:
        raise BadInput(f"{folder}: no recordings", f"it takes {', '.join(SOUND_ENDINGS)}")
    return named_paths


def read_rows(table: Path) -> Iterator[PseudoRow]:
    """Read the complete lines of a table written by labelling; the last line may be truncated.

    Raises:
        BadInput: it cannot be read, or is a different table.
    """
    check_size(table, _MAX_PSEUDO_BYTES, "move it away")
    try:
        data = table.read_bytes()
    except OSError as error:
        raise BadInput(f"{table}: {error.strerror}", "make it readable, or move it away") from error
    header = data.decode("utf-8-sig", "replace").partition("\n")[0]
    if data and not set(PSEUDO_COLUMNS) <= set(re.split("[,;\t]", header.replace('"', "").strip())):
        raise BadInput(
            f"{table}: not written by 'data pseudo-label'", "choose another folder with --into, or move it away"
        )
    complete_lines = data[: data.rfind(b"\n") + 1]
    if complete_lines.count(b"\n") > 1:
        yield from (_row(row) for row in read_table(table, data=complete_lines).rows)


def _row(row: Row) -> PseudoRow:
    cells = row.cells
    return PseudoRow(
        id=cells["id"],
        path=resolve_path(row.table.parent.resolve(), cells["audio_path"]),
        text=cells["text"],
        confidence=_number(row, "confidence"),
        agreement=_number(row, "agreement"),
        compression=_number(row, "compression"),
        no_speech=_number(row, "no_speech"),
        seconds=row.number("duration") or 0.0,
        cut=cells["cut"] == "1",
        unusable=cells["unusable"],
        heard_by=cells["heard_by"],
    )


def _number(row: Row, column: str) -> float:
    try:
        value = float(row.cells[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        message = f"{row.location}, column {column}: {row.cells[column][:50]!r} is not a number"
        raise BadInput(message, "remove the line; it is written again")
    return value
