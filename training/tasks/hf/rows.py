"""Rows of a data set for a transformers model: which columns are its input and its target. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from profiles.errors import BadInput
from profiles.locations import is_on_hub
from training.tasks.data_files.splits import held_out_count, is_saved
from training.tasks.text.row_files import row_files, rows_of

Kind = Literal["causal", "classification", "seq2seq", "tokens"]
"""What a row holds: a text; texts with a class; a text with its answer; or the numbers that the model takes."""
Row = Mapping[str, Any]
_INPUTS = ("text", "sentence", "source", "input", "question", "document", "article", "content", "review", "prompt")
_TARGETS: Mapping[Kind, Sequence[str]] = {
    "classification": ("label", "labels", "class", "category", "score"),
    "seq2seq": ("target", "output", "summary", "answer", "translation", "response", "highlights"),
}
_KINDS: Mapping[str, Kind] = {"CausalLM": "causal", "SequenceClassification": "classification", "Seq2SeqLM": "seq2seq"}
TOKENS = "input_ids"


class RowColumns(NamedTuple):
    """The columns of a table that are read."""

    kind: Kind
    inputs: tuple[str, ...]
    """One, or two for pairs of texts."""
    target: str = ""


def kind_of(auto_class: str) -> Kind:
    """Return what the rows for a class of models hold."""
    return _KINDS.get(auto_class.removeprefix("AutoModelFor"), "tokens")


def choose_columns(names: Iterable[str], kind: Kind, inputs: str, target: str, source: str) -> RowColumns:
    """Return the columns to read.

    Args:
        names: of the table's columns.
        inputs: as set in the profile, separated by commas; empty: the usual names.
        target: likewise.
        source: names the data set in messages.

    Raises:
        BadInput: there is none; the message lists those that there are.
    """
    there = list(names)
    if TOKENS in there and not inputs:
        return RowColumns("tokens", (TOKENS,))
    if kind == "tokens":
        raise BadInput(f"{source}: no column '{TOKENS}', which this kind of model is given", _listed(there))
    chosen = [name.strip() for name in inputs.split(",") if name.strip()]
    chosen = chosen or [name for name in _INPUTS if name in there and name != target][:1]
    wanted = target or next((name for name in _TARGETS.get(kind, ()) if name in there), "")
    for missing in [name for name in (*chosen, target) if name and name not in there]:
        raise BadInput(f"{source}: no column '{missing}'", _listed(there))
    if not chosen or len(chosen) > 2:
        raise BadInput(f"{source}: which column is the text?", f"set hf.input_columns; {_listed(there)}")
    if kind in _TARGETS and not wanted:
        raise BadInput(f"{source}: which column is the {_MEANING[kind]}?", f"set hf.target_column; {_listed(there)}")
    return RowColumns(kind, tuple(chosen), wanted if kind in _TARGETS else "")


_MEANING = {"classification": "class", "seq2seq": "answer"}


def _listed(names: Sequence[str]) -> str:
    return f"it has: {', '.join(names)[:300] or 'none'}"


def read_rows(path: str) -> dict[str, Sequence[Row]]:
    """Return the rows of a data set by split: of tables on this machine, a folder of ``datasets``, or the hub.

    Without a validation split every tenth training row is held out.

    Raises:
        BadInput: it is not found, or cannot be read.
    """
    splits = _read(path)
    if not splits.get("train"):
        raise BadInput(f"data set {path}: no rows to train on", "name a table, or a folder with train.csv or the like")
    if "validation" not in splits and len(splits["train"]) > 1:
        rows = splits["train"]
        held = {*range(0, len(rows), -(-len(rows) // held_out_count(len(rows))))}
        others = [number for number in range(len(rows)) if number not in held]
        splits |= {"train": _select(rows, others), "validation": _select(rows, sorted(held))}
    return splits


def _read(path: str) -> dict[str, Sequence[Row]]:
    if not path:
        raise BadInput("no data set was given", "set dataset_path to a table, or a folder with train.csv or the like")
    source = Path(path).expanduser()
    if is_on_hub(path) or is_saved(source):
        from training.tasks.data_files.hub import load_hub_dataset, splits_of  # datasets takes 2 s to import

        loaded = load_hub_dataset(path)
        return {split: loaded[key] for split, key in splits_of(loaded).items()}
    if not source.exists():
        raise BadInput(f"data set {path}: no such file or folder", "check dataset_path")
    return {split: [row for file in files for row, _ in rows_of(file)] for split, files in row_files(path).items()}


def _select(rows: Any, numbers: Sequence[int]) -> Any:
    return rows.select(numbers) if hasattr(rows, "select") else [rows[number] for number in numbers]


def column_names(rows: Sequence[Row]) -> list[str]:
    """Return the columns of rows."""
    named = getattr(rows, "column_names", None)
    return list(named) if named is not None else list(dict.fromkeys(name for row in rows[:100] for name in row))
