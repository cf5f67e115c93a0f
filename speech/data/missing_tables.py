"""The refusal of a folder without the tables of a data set: what is there instead, and what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

from profiles.errors import BadInput, counted
from profiles.installation import program
from speech.data.sound_containers import SOUND_ENDINGS
from training.tasks.data_files.splits import without_hidden

_SPREADSHEETS = (".csv", ".tsv", ".txt", ".xlsx", ".xls", ".ods", ".numbers")


def missing_tables(folder: Path) -> BadInput:
    """Return the error of a folder without tables."""
    return BadInput(f"data set {folder}: {_problem(folder)}", _hint(folder))


def _problem(folder: Path) -> str:
    """Return what is missing in a folder without tables, and what is there instead."""
    if not any(without_hidden(folder.glob("*"))):
        return "the folder is empty"
    recordings = sum(path.suffix.lower() in SOUND_ENDINGS for path in without_hidden(folder.rglob("*")))
    only = f", only {counted(recordings, 'recording')} without what was said" if recordings else ""
    return f"neither train.csv nor metadata.csv is there{only}"


def _hint(folder: Path) -> str:
    """Return a hint on what to do with a folder without tables."""
    hint = "write train.csv with the columns id, audio_path, text"
    spreadsheets = [path for path in sorted(without_hidden(folder.glob("*"))) if path.suffix.lower() in _SPREADSHEETS]
    if spreadsheets:
        hint = f"{spreadsheets[0].name} is there: {hint.replace('write', 'save it as')} (in a spreadsheet: 'CSV UTF-8')"
    if spreadsheets and spreadsheets[0].suffix.lower() in (".csv", ".tsv"):
        hint += f", or name it: --dataset {shlex.quote(str(spreadsheets[0]))}"
    command = program("data", "prepare", shlex.quote(str(folder)), "--out NEW")
    return f"{hint}; of other forms (LJSpeech, Kaldi, a text beside each sound, ...) a data set is made with: {command}"
