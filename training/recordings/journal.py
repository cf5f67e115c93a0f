"""What an earlier run of ``prepare`` has measured, so that the next one goes on: lines of JSON that are only added.

A line is written after the sound file that it tells of. A line that was cut short, or that no version of this program
wrote, counts as not written.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from training.recordings.checks import Measures

if TYPE_CHECKING:
    from typing_extensions import Self


class Journal:
    """Measures by key, and languages heard by model and key. Used by one thread."""

    def __init__(self, path: Path) -> None:
        self.measures: dict[str, Measures] = {}
        self.heard: dict[tuple[str, str], str] = {}
        self._path = path
        self._read()

    def _read(self) -> None:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            for line in file:
                with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                    self._take(json.loads(line))

    def _take(self, entry: dict[str, object]) -> None:
        key = str(entry["key"])
        if "heard" in entry:
            self.heard[str(entry["model"]), key] = str(entry["heard"])
            return
        values = {field.name: entry[field.name] for field in fields(Measures)}
        found = Measures(**values)  # type: ignore[arg-type]  # looked at below
        if math.isfinite(found.seconds + found.loudest + found.clipped + found.fetched):
            self.measures[key] = found

    def __enter__(self) -> Self:
        self._file = self._path.open("ab")
        if self._path.stat().st_size:
            self._file.write(b"\n")  # ends a line that was cut short
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, key: str, measures: Measures) -> None:
        """Remember what was measured."""
        self.measures[key] = measures
        self._write({"key": key, **asdict(measures)})

    def add_language(self, model: str, key: str, heard: str) -> None:
        """Remember the language that a model heard."""
        self.heard[model, key] = heard
        self._write({"key": key, "model": model, "heard": heard})

    def _write(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    @property
    def fetched(self) -> int:
        """Bytes that came over the network for all of them."""
        return sum(measures.fetched for measures in self.measures.values())
