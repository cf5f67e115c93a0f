"""Readers of a run folder: follow a live run, or replay a finished one; neither affects the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from app.console import command_about
from app.run_view.run_state import RunState
from app.run_view.view import EndedRun
from profiles.errors import BadInput
from training.records.event_log import follow_events
from training.records.events import Event
from training.records.plan import RunPlan
from training.records.run_files import is_live
from training.records.run_folder import RunFolder
from training.run.outcome import NewestAttempt, RunOutcome

LONGEST_SILENCE = 60.0
"""Longest pause in a replay, seconds; longer ones (a night between attempts, a wrong clock) are shortened to it."""
_NAP = 0.1


class Follower:
    """Source of a live or finished run for a display: its events, its plan, and its outcome."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan: RunPlan = RunFolder.open(path).plan()
        self._events = follow_events(path / "events.jsonl", lambda: is_live(path))
        self._attempt = NewestAttempt()

    def events(self) -> Iterator[Event | None]:
        """Yield the events from the first one on, and ``None`` regularly while there are none.

        It blocks for a moment between events, so a display reads it in a thread.
        """
        for event in self._events:
            if event is not None:
                self._attempt.note(event)
            yield event

    def now(self) -> float:
        """Return the current Unix time by the clock of the events, for ages and elapsed times."""
        return time.time()

    def outcome(self) -> RunOutcome:
        """Return how the newest attempt of the run ended; to be called after the last event."""
        return self._attempt.outcome(self.path)

    def ended(self, state: RunState) -> EndedRun:
        """Return the outcome of the run with its state; to be called after the last event."""
        return EndedRun.of(self.outcome(), self.plan, state)


class Replay(Follower):
    """A finished run, replayed in real time or faster.

    Events keep their times, so that speeds computed from them are the run's own; :meth:`now` is the time within the
    run, and stands still after the last event. Events of machines whose clocks differ come in the order of the log.

    Args:
        speed: factor over real time.
        clock: seconds, for tests.
        sleep: waits so many seconds.

    Raises:
        BadInput: no run, one without a plan, or one that is still going on.
    """

    def __init__(
        self,
        path: Path,
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if is_live(path):
            raise BadInput(f"{path.name} is still going on", f"watch it with: {command_about(path, 'runs', 'attach')}")
        super().__init__(path)
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._present = 0.0
        """Time of the newest event that was due, by the clock of the run."""
        self._reached = clock()
        """When that event was due, by the clock of this process."""
        self._next = 0.0
        """Time of the next event: :meth:`now` must not pass it where the display lags behind."""

    def now(self) -> float:
        return min(self._present + (self._clock() - self._reached) * self._speed, self._next)

    def events(self) -> Iterator[Event | None]:
        began = False
        for event in super().events():  # the log is complete, so this does not block
            if event is None:
                continue
            if not began:
                began, self._present, self._next, self._reached = True, event.time, event.time, self._clock()
            yield from self._wait_for(event.time)
            yield event

    def _wait_for(self, moment: float) -> Iterator[None]:
        if moment <= self._present:
            return  # the clock of its machine is behind
        silence = min(moment - self._present, LONGEST_SILENCE)
        due, self._next = self._reached + silence / self._speed, self._present + silence
        while (left := due - self._clock()) > 0:
            yield None
            self._sleep(min(left, _NAP))
        self._present, self._next, self._reached = moment, moment, due
