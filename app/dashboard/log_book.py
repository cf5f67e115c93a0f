"""The lines of a run's logs, all machines together: the newest in bounded memory (:class:`LogBook`), or everything.

Of a file that grows too fast, a book shows only the newest part, and a line says how much was left out; behind that it
counts all lines by level (:class:`LogTotals`). :func:`log_lines` has everything.
"""

from __future__ import annotations

import heapq
import itertools
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from operator import itemgetter
from pathlib import Path
from time import sleep
from typing import Literal

from app.run_view.run_state import reduce_events
from app.run_view.timeline import Kind, TimelineEntry, TimelineTrack
from app.run_view.view import RunView
from profiles.errors import counted
from profiles.quantities import bytes_text
from training.records.event_log import follow_events, follow_lines
from training.records.events import ElectionEvent, ErrorEvent, MemberEvent, ProgressEvent, WarningEvent

KEPT_LINES = 1000
"""Most lines of one file, so that a verbose one does not displace the others."""
KEPT_IN_ALL = 16_000
BYTES_A_LOOK = 1 << 16
"""Most bytes of one file that are read in one poll to be shown."""
BYTES_COUNTED = 1 << 19
"""Most bytes of all files that are counted in one poll, in equal shares: 30 ms of a processor."""
LONGEST_LINE = 2000
MOST_FILES = 256
_POLL = 0.2
_NOTED = MemberEvent | ProgressEvent | ErrorEvent | WarningEvent | ElectionEvent
"""Events from which losses, returns, warnings and errors follow."""
_LEVELS: Mapping[Kind, str] = {"lost": "WARNING", "back": "WARNING", "warning": "WARNING", "error": "ERROR"}
"""The word at the beginning of a line, by the kind of its entry in the timeline."""

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
    is_notice: bool = False
    """Whether it is an event of the run, which no log has."""


@dataclass(frozen=True)
class LogTotals:
    """How many lines the logs have, whether they are kept or not."""

    by_machine: Mapping[str, Mapping[Level, int]] = field(default_factory=dict)
    is_complete: bool = True
    """Whether all that was written is counted."""

    def text(self, machine: str = "") -> str:
        """Return ``in all 60002 lines: 2 errors, 0 warnings``; of all machines where none is named."""
        chosen = [self.by_machine.get(machine, {})] if machine else self.by_machine.values()
        sums = {level: sum(levels.get(level, 0) for levels in chosen) for level in ("error", "warning", "info")}
        so_far = "" if self.is_complete else " counted so far"
        numbers = f"{counted(sums['error'], 'error')}, {counted(sums['warning'], 'warning')}"
        return f"in all {counted(sum(sums.values()), 'line')}{so_far}: {numbers}"


class LogBook:
    """Reads ``logs/*.log`` of a run folder incrementally."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _Tail] = {}
        self._lines: dict[str, deque[LogLine]] = {}
        self._counts: dict[Path, _LineCount] = {}
        self._notices: dict[str, Counter[Level]] = {}
        self._number = 0
        self.lines: tuple[LogLine, ...] = ()
        """The kept lines, oldest first; a new tuple at every change, so that other threads may read it."""
        self.omits_lines = False
        """Whether older lines were dropped, or not read at all."""
        self.totals = LogTotals()

    def look(self, notices: Iterable[tuple[str, str]] = ()) -> bool:
        """Read and count new lines; return whether there were any.

        Args:
            notices: machine and text of what its own log lacks (:class:`RunNotices`), since the last call.
        """
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._files and len(self._files) < MOST_FILES:
                self._files[path], self._counts[path] = _Tail(path), _LineCount(path)
        noted = list(notices)
        new_lines = list(_by_time([*self._sources(), *_each(noted)]))
        for machine, line in new_lines:
            self._number += 1
            time, text = time_of(line)
            machine_lines = self._lines.setdefault(machine, deque(maxlen=KEPT_LINES))
            self.omits_lines |= len(machine_lines) == KEPT_LINES
            machine_lines.append(LogLine(self._number, machine, text, level_of(text), time, (machine, line) in noted))
        if new_lines:
            all_lines = sorted(
                (line for machine_lines in self._lines.values() for line in machine_lines), key=lambda line: line.number
            )
            self.lines = tuple(all_lines[-KEPT_IN_ALL:])
            self.omits_lines |= len(all_lines) > KEPT_IN_ALL or any(tail.skips for tail in self._files.values())
        for machine, line in noted:
            self._notices.setdefault(machine, Counter())[level_of(line)] += 1
        return self._count() or bool(new_lines)

    def _count(self) -> bool:
        """Count new lines; return whether the totals have changed."""
        for count in self._counts.values():
            count.look(BYTES_COUNTED // len(self._counts))
        by_machine = {machine: Counter(levels) for machine, levels in self._notices.items()}
        for count in self._counts.values():
            by_machine.setdefault(count.machine, Counter()).update(count.levels)
        before, self.totals = self.totals, LogTotals(by_machine, not any(c.is_behind for c in self._counts.values()))
        return before != self.totals

    def _sources(self) -> Iterator[_Source]:
        for tail in self._files.values():
            lines = tail.look()
            yield tail.machine, lines, sum(len(line) + 1 for line in lines)


class RunNotices:
    """The warnings, errors, losses and returns of a run as lines of its logs: a machine that is lost writes none of its
    own, and warnings are events."""

    def __init__(self) -> None:
        self._noted: set[TimelineEntry] = set()

    def since_last(self, view: RunView) -> list[tuple[str, str]]:
        """Return machine, or ``run``, and line of each of them since the last call."""
        tracks = [view.state.timeline.get(kind, TimelineTrack()) for kind in _LEVELS]
        entries = {entry for track in tracks for entry in track.entries} - self._noted
        self._noted |= entries
        return [(name, _notice_line(entry, name)) for entry in sorted(entries) if (name := view.name(entry.member))]


def _notice_line(entry: TimelineEntry, name: str) -> str:
    moment = datetime.fromtimestamp(entry.time, timezone.utc).isoformat(timespec="milliseconds")
    text = entry.text.removeprefix(f"{name} ").removeprefix(f"{name}: ")
    hint = f" ({entry.hint})" if entry.kind == "error" and entry.hint else ""
    return f"{moment.removesuffix('+00:00')}Z {_LEVELS[entry.kind]} {' '.join(text.split())}{hint}"


class _Tail:
    """The end of one growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.machine = path.stem
        self.skips = False
        """Whether a part was not read."""
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
        self.skips |= bool(skipped)
        lines = [_text(line) for line in newest if line.strip()]
        remark = [f"... {bytes_text(skipped)} of this log were too quick to show; they are in {self._path.name}"]
        return remark + lines if skipped else lines


class _LineCount:
    """Counts the lines of one growing file by level, a bounded part of it in each poll."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.machine = path.stem
        self.levels = Counter[Level]()
        self.is_behind = False
        """Whether lines are left for the next poll."""
        self._position = 0
        self._partial = b""

    def look(self, most: int) -> None:
        """Count the complete lines since the last poll, in the next ``most`` bytes."""
        try:
            size = self._path.stat().st_size
            if size < self._position:
                self._position, self._partial = 0, b""  # truncated
            if size == self._position:
                return
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                data = stream.read(most)
                self._position = stream.tell()
        except OSError:
            return
        self.is_behind = self._position < size
        *complete, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-LONGEST_LINE:]
        self.levels.update(level_of(_text(line)) for line in complete if line.strip())


def level_of(text: str) -> Level:
    """Return the level of a line, by its words."""
    if _ERROR.search(text):
        return "error"
    return "warning" if _WARNING.search(text) else "info"


def _text(line: bytes) -> str:
    shown = line.rsplit(b"\r", 1)[-1] if b"\r" in line.rstrip(b"\r") else line.rstrip(b"\r")
    text = shown[:LONGEST_LINE].decode(errors="replace")
    return text + "..." if len(shown) > LONGEST_LINE else text


def log_lines(view: RunView, goes_on: Callable[[], bool], notices: bool = True) -> Iterator[tuple[str, str]]:
    """Yield machine and text of all lines in a run's logs, those of several machines by their times, and wait for more.

    Args:
        goes_on: whether to wait.
        notices: whether warnings, errors, losses and returns stand among them.
    """
    readers: dict[Path, Iterator[bytes]] = {}
    events, noted = follow_events(view.path / "events.jsonl", goes_on), RunNotices()
    while True:
        is_last = not goes_on()
        for path in sorted((view.path / "logs").glob("*.log")):
            readers.setdefault(path, follow_lines(path, goes_on))
        if notices:
            # the lambda is used up in this turn of the loop, with its value of is_last
            new_events = itertools.takewhile(lambda event: event is not None or is_last, events)  # noqa: B023
            view = replace(view, state=reduce_events((e for e in new_events if isinstance(e, _NOTED)), view.state))
        sources = [
            (path.stem, map(_whole_text, itertools.takewhile(bool, lines)), path.stat().st_size)
            for path, lines in readers.items()
        ]
        yield from _by_time([*sources, *_each(noted.since_last(view))])
        if is_last:
            return
        sleep(_POLL)


_Source = tuple[str, Iterable[str], int]
"""Machine, lines and size in bytes of a file, or of a part of one."""


def _each(notices: Iterable[tuple[str, str]]) -> list[_Source]:
    return [(machine, [text], len(text)) for machine, text in notices]


def _whole_text(line: bytes) -> str:
    """Return what a terminal would show of a line."""
    return line.decode(errors="replace").rstrip().rpartition("\r")[2]


def _by_time(sources: Iterable[_Source]) -> Iterator[tuple[str, str]]:
    """Merge the lines of several machines by their times; yield machine and line. It holds one line of each.

    A line without a time follows the last one of its machine that has one. Where there is none, as in what scripts
    print, the files stand side by side from their beginnings to their ends.
    """
    streams = [_timed(*source) for source in sources]
    return (row[1:] for row in heapq.merge(*streams, key=itemgetter(0)))


def _timed(machine: str, lines: Iterable[str], size: int) -> Iterator[tuple[tuple[float, float], str, str]]:
    latest, passed = 0.0, 0
    for line in lines:
        time, _ = time_of(line)
        latest = latest if time is None else time
        yield (latest, 0.0 if latest else passed / max(1, size)), machine, line
        passed += len(line) + 1


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
