"""``pseudo.csv``: transcripts that a model made, each with its measures and whether it is good enough to train on."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unicodedata import normalize

from profiles.errors import BadInput
from training.tasks.tables import Row, as_stored, read_table

NAME = "pseudo.csv"
KEPT = "kept"
"""Column of any table of recordings: ``no`` leaves the row out."""
COLUMNS = (
    *("id", "audio_path", "text", KEPT, "left_out", "confidence", "agreement", "compression", "no_speech"),
    *("duration", "cut", "unusable", "heard_by"),
)
_AUDIO = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3"})
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class PseudoRow:
    """One recording."""

    id: str
    path: Path
    text: str = ""
    confidence: float = 0.0
    """Mean natural logarithm of the tokens' probabilities."""
    agreement: float = 0.0
    """1 - WER between two listens, at least 0."""
    compression: float = 0.0
    no_speech: float = 0.0
    seconds: float = 0.0
    cut: bool = False
    unusable: str = ""
    """Why nobody listened to it."""
    heard_by: str = ""
    """Hashes of the models."""
    left_out: str = ""
    """Why it is not to be trained on."""

    def cells(self, folder: Path) -> list[str]:
        """The line of a table in ``folder``, in the order of :data:`COLUMNS`."""
        path = self.path.relative_to(folder) if self.path.is_relative_to(folder) else self.path
        numbers = [f"{one:.4f}" for one in (self.confidence, self.agreement, self.compression, self.no_speech)]
        head = [self.id, str(path), self.text, "no" if self.left_out else "yes", self.left_out]
        return [*head, *numbers, f"{self.seconds:.3f}", str(int(self.cut)), self.unusable, self.heard_by]


@dataclass(frozen=True)
class TextBounds:
    """What a transcript has to reach. The first three are those of Radford et al. 2022, section 4.5."""

    confidence: float = -1.0
    compression: float = 2.4
    no_speech: float = 0.6
    agreement: float = 0.9

    def judged(self, row: PseudoRow) -> PseudoRow:
        """Return the row with the reason why it is left out, if there is one."""
        return dataclasses.replace(row, left_out=self._reason(row))

    def _reason(self, row: PseudoRow) -> str:
        if row.unusable:
            return row.unusable
        if not row.text:
            return "nothing was heard"
        if row.cut:
            return "the text has no end"
        if row.no_speech > self.no_speech:
            return f"no-speech probability {row.no_speech:.2f} above {self.no_speech:g}"
        if row.compression > self.compression:
            return f"compression ratio {row.compression:.1f} above {self.compression:g}: it repeats itself"
        if row.confidence < self.confidence:
            return f"confidence {row.confidence:.2f} below {self.confidence:g}"
        if row.agreement < self.agreement:
            return f"agreement {row.agreement:.2f} below {self.agreement:g}"
        return ""


def recordings(folder: Path, root: Path) -> list[tuple[str, Path]]:
    """Return the sound files in a folder and below: their path from ``root``, where they are in it, and the path.

    Raises:
        BadInput: the folder is not there, or holds none.
    """
    if not folder.is_dir():
        raise BadInput(f"{folder}: no such folder", "name the folder of the recordings")
    folder, root = folder.resolve(), root.resolve()
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _AUDIO and path.is_file())
    found = [
        (normalize("NFC", path.relative_to(root if path.is_relative_to(root) else folder).as_posix()), path)
        for path in paths
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and str(path).isprintable()
    ]
    if not found:
        raise BadInput(f"{folder}: no recordings", f"it takes {', '.join(sorted(_AUDIO))}")
    return found


def read_rows(table: Path) -> Iterator[PseudoRow]:
    """Read the whole lines of a table that labelling wrote; the last one may be torn.

    Raises:
        BadInput: it cannot be read, or is another table.
    """
    try:
        if table.stat().st_size > _MOST_BYTES:
            raise BadInput(f"{table}: larger than {_MOST_BYTES >> 30} GiB", "move it away")
        data = table.read_bytes()
    except OSError as error:
        raise BadInput(f"{table}: {error.strerror}", "make it readable, or move it away") from error
    header = data.decode("utf-8-sig", "replace").partition("\n")[0]
    if data and not set(COLUMNS) <= set(re.split("[,;\t]", header.replace('"', "").strip())):
        raise BadInput(f"{table}: not written by pseudo-label", "choose another folder with --into, or move it away")
    whole = data[: data.rfind(b"\n") + 1]
    if whole.count(b"\n") > 1:
        yield from (_row(row) for row in read_table(table, data=whole).rows)


def _row(row: Row) -> PseudoRow:
    cells = row.cells
    return PseudoRow(
        id=cells["id"],
        path=as_stored(row.table.parent.resolve(), cells["audio_path"]),
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
        message = f"{row.where}, column {column}: {row.cells[column][:50]!r} is not a number"
        raise BadInput(message, "remove the line; it is written again")
    return value
