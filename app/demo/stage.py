"""Writes a script's beats into a real run folder: the same files and the same vocabulary as a run that trains."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from app.demo.beats import Beat, LogLine
from training.events import (
    EvaluationEvent,
    Event,
    MemberEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    SyncEvent,
    TimingEvent,
)
from training.run_folder import RunFolder

if TYPE_CHECKING:
    from typing_extensions import Self

_DURATIONS = ("compute", "wait", "transfer", "seconds")
_WITH_DURATIONS = (StepEvent, SyncEvent, EvaluationEvent, SnapshotEvent, TimingEvent)


class Stage:
    """A run folder that is being written.

    Args:
        folder: held by this process.
        start: when the script begins, in seconds since the epoch.
        speed: how much faster than the script all goes; durations shrink with it, so that the figures fit together.
    """

    def __init__(self, folder: RunFolder, start: float, speed: float) -> None:
        self.folder = folder
        self.speed = speed
        self.steps: dict[int, int] = {}
        """Newest step of every member."""
        self.gone: set[int] = set()
        self.dropped: set[int] = set()
        """Members whose part in the script is left out, because a person let them go."""
        self.total_steps: int | None = None
        self._start = start
        self._logs: dict[str, TextIO] = {}
        self._open = ExitStack()

    def due(self, at: float) -> float:
        """Return when something of the script happens, in seconds since the epoch."""
        return self._start + at / self.speed

    def shift(self, seconds: float) -> None:
        """Let all that is still to come happen later."""
        self._start += seconds

    def write(self, beat: Beat) -> None:
        """Write a beat with the time at which it is due."""
        when = self.due(beat.at)
        if isinstance(beat.what, LogLine):
            self._write_line(beat.what, when)
        elif beat.what.member not in self.dropped:
            self.say(self._scaled(beat.what), when)

    def say(self, event: Event, when: float) -> None:
        """Append an event, and remember what a request needs to know."""
        self._note(event)
        self.folder.append(event.model_copy(update={"time": when}))
        if isinstance(event, RunEvent) and event.status in ("running", "paused"):
            self.folder.update_metadata(status=event.status)

    def _note(self, event: Event) -> None:
        if isinstance(event, RunEvent):
            self.total_steps = event.total_steps or self.total_steps
        elif isinstance(event, StepEvent) and event.member is not None:
            self.steps[event.member] = event.step
        elif isinstance(event, MemberEvent) and event.member is not None:
            away = event.status in ("lost", "left", "done")
            (self.gone.add if away else self.gone.discard)(event.member)

    def _scaled(self, event: Event) -> Event:
        if self.speed == 1.0 or not isinstance(event, _WITH_DURATIONS):
            return event
        durations = {name: getattr(event, name) / self.speed for name in _DURATIONS if hasattr(event, name)}
        return event.model_copy(update=durations)

    def _write_line(self, line: LogLine, when: float) -> None:
        if line.log not in self._logs:
            path = self.folder.log_path(line.log)
            self._logs[line.log] = self._open.enter_context(path.open("a", encoding="utf-8"))
        stream = self._logs[line.log]
        stream.write(f"{datetime.fromtimestamp(when, timezone.utc):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + f"Z {line.text}\n")
        stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def utc_text(when: float) -> str:
    """Return a time as ``metadata.json`` holds it."""
    return datetime.fromtimestamp(when, timezone.utc).isoformat(timespec="seconds")
