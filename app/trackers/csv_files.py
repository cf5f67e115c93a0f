"""CSV: one file a kind of event, for spreadsheets and scripts."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, get_args

from app.console import visible
from app.trackers.base import TrackedRun
from training.events import EvaluationEvent, Event, KnownEvent, UnknownEvent

_FIRST = ("seq", "time", "member", "name")
_EVALUATION = ("step", "split", "metric", "value", "samples", "seconds")
_FORMULA = ("=", "+", "-", "@")


def columns() -> Mapping[str, tuple[str, ...]]:
    """Return the columns of every file."""
    found: dict[str, tuple[str, ...]] = {"evaluation": (*_FIRST, *_EVALUATION)}
    for model in get_args(get_args(KnownEvent)[0]):
        if model is EvaluationEvent:
            continue
        own = [name for name in model.model_fields if name not in (*_FIRST, "v", "kind")]
        found[model.model_fields["kind"].default] = (*_FIRST, *own)
    return found


class CsvFiles:
    """``step.csv``, ``evaluation.csv`` and so on, appended to."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self._run = run
        self._folder = folder
        self._columns = columns()
        self._files: dict[str, TextIO] = {}

    def log(self, event: Event, newest_step: int) -> None:
        if isinstance(event, UnknownEvent):
            return
        wanted = self._columns[event.kind]
        writer = csv.writer(self._file(event.kind))
        for row in self._rows(event):
            writer.writerow([cell(row.get(name)) for name in wanted])

    def _rows(self, event: Event) -> Iterator[Mapping[str, Any]]:
        row = event.model_dump()
        if event.member is not None:
            row.setdefault("name", "")
            row["name"] = row["name"] or self._run.name(event.member)
        if not isinstance(event, EvaluationEvent):
            yield row
            return
        for metric, value in {"loss": event.loss, **event.metrics}.items():
            yield {**row, "metric": metric, "value": value}

    def _file(self, kind: str) -> TextIO:
        if kind not in self._files:
            path = self._folder / f"{kind}.csv"
            fresh = not path.exists() or path.stat().st_size == 0
            self._files[kind] = path.open("a", newline="", encoding="utf-8")
            if fresh:
                csv.writer(self._files[kind]).writerow(self._columns[kind])
        return self._files[kind]

    def flush(self) -> None:
        for stream in self._files.values():
            stream.flush()

    def close(self, status: str) -> str:
        for stream in self._files.values():
            stream.close()
        return str(self._folder)


def cell(value: object) -> object:
    """Return a value for a cell: text from outside must not become a formula of a spreadsheet."""
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    text = visible(value)
    return f"'{text}" if text.startswith(_FORMULA) else text
