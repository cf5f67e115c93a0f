"""A model's transcripts of every clip beside the references: ``predictions.csv``.

One line per clip, readable by any spreadsheet. Edits are counted on the normalised texts, which are included, so that
readers of the file need neither the model nor its normaliser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from profiles.errors import BadInput
from training.tasks.data_files.tables import Row, check_size, read_table, write_table

FOLDER = "evaluation"
"""Subfolder of a run folder with the predictions of its evaluations."""
NAME = "predictions.csv"
BEFORE = "before.csv"
"""Predictions before the first step."""

_COUNTS = ("edits", "words", "char_edits", "chars")
COLUMNS = (
    *("id", "audio", "speaker", "language", "duration", "noise", "reference", "prediction"),
    *("normalised_reference", "normalised_prediction", *_COUNTS, "cut"),
)
_MAX_BYTES = 1 << 28
"""Maximum size in bytes of a file that is read: some millions of short clips."""


@dataclass(frozen=True)
class Prediction:
    """One clip, its reference, and a model's transcript."""

    id: str
    audio: str
    """Path of the recording; empty if it is not a file of its own."""
    reference: str
    prediction: str
    normalised_reference: str
    normalised_prediction: str
    edits: int
    """Substitutions, deletions and insertions of words between the normalised texts."""
    words: int
    """Words of the normalised reference."""
    char_edits: int
    chars: int
    cut: bool = False
    """Whether generation stopped at the length limit."""
    speaker: str = ""
    language: str = ""
    duration: float | None = None
    """In seconds."""
    noise: str = ""
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Further columns of the clip's table."""


def write_predictions(path: Path, predictions: Sequence[Prediction], mode: int = 0o600) -> None:
    """Write the file atomically; its folder is created.

    Raises:
        BadInput: it cannot be written.
    """
    further = list(dict.fromkeys(name for prediction in predictions for name in prediction.columns))
    rows = list[list[object]]([[*COLUMNS, *map(_escaped, further)]])
    for prediction in predictions:
        seconds = "" if prediction.duration is None else f"{prediction.duration:.3f}"
        cell_by_column = {**vars(prediction), "duration": seconds, "cut": int(prediction.cut)}
        cells = [*(cell_by_column[name] for name in COLUMNS), *(prediction.columns.get(name, "") for name in further)]
        rows.append([_escaped(cell) if isinstance(cell, str) else cell for cell in cells])
    write_table(path, rows, mode, end="\r\n")  # so that cells containing either character are quoted


def _escaped(cell: str) -> str:
    """Escape a cell that a spreadsheet would evaluate as a formula, as texts come from untrusted sources."""
    return f"'{cell}" if _is_formula(cell.lstrip("'")) else cell


def _unescaped(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and _is_formula(cell.lstrip("'")) else cell


def _is_formula(cell: str) -> bool:
    return cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))


def read_predictions(path: Path) -> list[Prediction]:
    """Read a file written by :func:`write_predictions`.

    Raises:
        BadInput: missing, too large, a column is missing, an id is duplicated, or a count is invalid.
    """
    check_size(path, _MAX_BYTES, "name a predictions.csv")
    table = read_table(path)
    for name in ("id", "reference", "prediction", "normalised_reference", "normalised_prediction", *_COUNTS):
        table.column((name,), "predictions")
    predictions = [_read(row) for row in table.rows]
    if len({prediction.id for prediction in predictions}) < len(predictions):
        raise BadInput(f"{path}: an id is there twice", "name the predictions.csv of one evaluation")
    return predictions


def _read(row: Row) -> Prediction:
    def count(name: str) -> int:
        text = row.cells.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise BadInput(f"{row.location}, column {name}: {text[:50]!r} is not a count", "evaluate again to write it")
        return int(text)

    counts = {name: count(name) for name in _COUNTS}
    cells = {_unescaped(name): _unescaped(text) for name, text in row.cells.items()}
    texts = {name: cells.get(name, "") for name in COLUMNS if name not in (*_COUNTS, "cut", "duration")}
    further = {name: text for name, text in cells.items() if name not in COLUMNS}
    cut = row.cells.get("cut", "") not in ("", "0")
    return Prediction(**texts, **counts, cut=cut, duration=row.number("duration"), columns=further)  # type: ignore[arg-type]
