"""The newest lines of a run's logs, all machines together, in bounded memory and with bounded work a poll.

Of a file that grows too fast, only the newest part is read, and a line says how much was left out. The files have
everything.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from profiles.quantities import bytes_text

KEPT_LINES = 1000
"""Most lines of one file, so that a verbose one does not displace the others."""
KEPT_IN_ALL = 16_000
BYTES_A_LOOK = 1 << 16
"""Most bytes of one file that are read in one poll."""
LONGEST_LINE = 2000
MOST_FILES = 256

Level = Literal["error", "warning", "info"]
_ERROR = re.compile(r"error\b|exception\b|\b(critical|fatal|traceback)\b", re.IGNORECASE)
_WARNING = re.compile(r"warn(ing)?\b", re.IGNORECASE)
_TIME = re.compile(r"^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?(?:(Z)|([+-]\d\d):?(\d\d))?\]?\s+")


@dataclass(frozen=True)
class LogLine:
    """One line of one machine's log."""

    number: int
    """Increasing number over all lines."""
    machine: str
    text: str
    level: Level
    time: float | None = None
    """Unix time at the beginning of the line; ``None``: it has none."""


class LogBook:
    """Reads ``logs/*.log`` of a run folder incrementally."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _Tail] = {}
        self._lines: dict[str, deque[LogLine]] = {}
        self._number = 0
        self.lines: tuple[LogLine, ...] = ()
        """The kept lines, oldest first; a new tuple at every change, so that other threads may read it."""

    def look(self, changes: Sequence[tuple[str, float, str]] = ()) -> bool:
        """Read new lines; return whether there were any.

        Args:
            changes: machine, Unix time and text of changes of members since the last call: a machine that is lost
                writes no line of its own.
        """
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._files and len(self._files) < MOST_FILES:
                self._files[path] = _Tail(path)
        new_lines = [(tail.machine, text) for tail in self._files.values() for text in tail.look()]
        for machine, at, text in changes:
            new_lines.append((machine, f"{datetime.fromtimestamp(at).astimezone().isoformat()} {text}"))
        noted = {(machine, text) for machine, _, text in changes}
        for machine, time, text in _by_time(new_lines):
            self._number += 1
            level: Level = "warning" if (machine, text) in noted else level_of(text)
            machine_lines = self._lines.setdefault(machine, deque(maxlen=KEPT_LINES))
            machine_lines.append(LogLine(self._number, machine, text, level, time))
        if new_lines:
            all_lines = sorted(
                (line for machine_lines in self._lines.values() for line in machine_lines), key=lambda line: line.number
            )
            self.lines = tuple(all_lines[-KEPT_IN_ALL:])
        return bool(new_lines)


class _Tail:
    """The end of one growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.machine = path.stem
        self._position = 0
        self._partial = b""

    def look(self) -> list[str]:
        """Return the complete lines since the last poll, after a remark where some were skipped."""
        try:
            size = self._path.stat().st_size
            if size < self._position:
                self._position, self._partial = 0, b""  # truncated
            if size == self._position:
                return []
            skipped = max(0, size - self._position - BYTES_A_LOOK)
            with self._path.open("rb") as stream:
                stream.seek(self._position + skipped)
                data = stream.read(BYTES_A_LOOK)
                self._position = stream.tell()
        except OSError:
            return []
        if skipped:
            data = data.partition(b"\n")[2]
            self._partial = b""
        *complete, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LONGEST_LINE:
            complete, self._partial = [*complete, self._partial], b""
        newest = complete[-(KEPT_LINES - 1) :]
        skipped += sum(map(len, complete)) - sum(map(len, newest))
        lines = [_text(line) for line in newest if line.strip()]
        remark = [f"... {bytes_text(skipped)} of this log were too quick to show; they are in {self._path.name}"]
        return remark + lines if skipped else lines


def level_of(text: str) -> Level:
    """Return the level of a line, by its words."""
    if _ERROR.search(text):
        return "error"
    return "warning" if _WARNING.search(text) else "info"


def _text(line: bytes) -> str:
    shown = line.rsplit(b"\r", 1)[-1] if b"\r" in line.rstrip(b"\r") else line.rstrip(b"\r")
    text = shown[:LONGEST_LINE].decode(errors="replace")
    return text + "..." if len(shown) > LONGEST_LINE else text


def _by_time(lines: Iterable[tuple[str, str]]) -> list[tuple[str, float | None, str]]:
    """Sort the lines of several files by their times.

    A line without a time follows the last one of its machine that has one.
    """
    latest: dict[str, float] = {}
    keyed = []
    for machine, text in lines:
        time, message = time_of(text)
        latest[machine] = time if time is not None else latest.get(machine, 0.0)
        keyed.append((latest[machine], machine, time, message))
    return [(machine, time, text) for _, machine, time, text in sorted(keyed, key=lambda row: row[0])]


def time_of(text: str) -> tuple[float | None, str]:
    """Return the Unix time at the beginning of a line, and the rest; a time without a zone is local."""
    match = _TIME.match(text)
    if match is None:
        return None, text
    date_time, fraction, utc, hours, minutes = match.groups(default="")
    zone = "+00:00" if utc else f"{hours}:{minutes}" if hours else ""
    try:
        return datetime.fromisoformat(f"{date_time}.{fraction:0<6}{zone}").timestamp(), text[match.end() :]
    except (ValueError, OverflowError, OSError):  # an impossible zone or year
        return None, text
