"""What a data set holds, without training on it: ``python -m training.data_findings PROFILE.json``.

Standard input is a profile's document (:class:`profiles.schema.Profile`). Standard output is one JSON object::

    {"splits": {"train": 6400}, "hours": 1.9, "columns": ["id", ...], "broken": ["a.wav: ..."], "broken_count": 1, ...}
    {"error": ..., "hint": ...}

The tables are read as a run reads them. Of the recordings only the headers are read, for :data:`PATIENCE` seconds at
most; ``looked_at`` says how many that were.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import soundfile

from profiles.errors import BadInput, MusterError
from profiles.schema import Profile
from training.recordings.workplace import LEFT_OUT
from training.tasks.patches import BLACKLIST, PSEUDO
from training.tasks.speech_clips import SPLITS, Clip, FileSource
from training.tasks.speech_dataset import SpeechTables, is_on_hub, present, read_tables
from training.tasks.tables import read_table
from training.tasks.texts import read_texts

PATIENCE = 20.0
SHOWN_BROKEN = 5


def findings(profile: Profile) -> dict[str, Any]:
    """Return what the data set of a profile holds.

    Raises:
        BadInput: it cannot be used; the message says what, where and what to do.
    """
    data = profile.data
    if profile.model.task == "custom":
        return {"splits": {}, "note": f"made by {profile.model.model_path}"}
    path = Path(data.dataset_path).expanduser()
    if is_on_hub(data.dataset_path):
        return {"splits": {}, "note": "on the hub: it is downloaded when the run begins"}
    if profile.model.task == "causal_lm":
        texts = read_texts(data.dataset_path, data.text_column)
        characters = {split: sum(map(len, documents)) for split, documents in texts.items()}
        return {"splits": characters, "unit": "characters"}
    tables = read_tables(data.dataset_path, data.text_column)
    splits = present(tables)
    counts = {split: len(clips) for split, clips in splits.items()}
    found = {"splits": counts, "unit": "recordings", "columns": _columns(path), "history": _history(tables)}
    return {**found, **_listen([clip for clips in splits.values() for clip in clips])}


def _history(tables: SpeechTables) -> dict[str, int]:
    """Return what commands and people did to the data set, by what it is: those that are 0 are not in it."""
    kinds = Counter(change.kind for change in tables.changes)
    listed = sum(change.kind == "delete" and BLACKLIST in Path(change.where).name for change in tables.changes)
    counts = {"corrected": kinds["override_text"], "deleted": kinds["delete"] - listed, "blacklisted": listed}
    counts["protected"] = kinds["protect"]
    if tables.folder is not None:
        with suppress(BadInput):  # what others wrote under these names says nothing here
            counts["not_prepared"] = _lines(tables.folder / LEFT_OUT)
            counts["pseudo"] = _lines(tables.folder / PSEUDO)
    return {name: count for name, count in counts.items() if count}


def _lines(table: Path) -> int:
    return len(read_table(table).rows) if table.is_file() else 0


def _columns(path: Path) -> list[str]:
    tables = [path] if path.is_file() else [*sorted(path.glob("*.csv")), *sorted(path.glob("*.jsonl"))]
    names = {name for names in SPLITS.values() for name in names} | {"metadata"}
    tables = [table for table in tables if path.is_file() or table.stem in names]
    return list(read_table(tables[0]).columns) if tables else []


def _listen(clips: list[Clip]) -> dict[str, Any]:
    """Read the headers: how long the recordings are, and which cannot be read."""
    seconds, looked_at, broken = 0.0, 0, list[str]()
    end = time.monotonic() + PATIENCE
    for clip in clips:
        if time.monotonic() > end:
            break
        looked_at += 1
        if not isinstance(clip.audio, FileSource):
            continue
        try:
            info = soundfile.info(str(clip.audio.path))
            seconds += info.duration
        except (RuntimeError, OSError, TypeError) as error:
            broken.append(f"{clip.audio.path}: {' '.join(str(error).split())}")
    whole = seconds * len(clips) / looked_at if looked_at else 0.0
    return {"hours": whole / 3600, "looked_at": looked_at, "broken": broken[:SHOWN_BROKEN], "broken_count": len(broken)}


def main() -> int:
    """Answer the profile on standard input."""
    try:
        found = findings(Profile.model_validate_json(sys.stdin.buffer.read()))
    except MusterError as error:
        found = {"error": error.message, "hint": error.hint}
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
