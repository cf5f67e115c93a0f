"""A run as its folder tells it, followed while it goes on or played again; the run does not notice its readers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from app.console import command_about
from app.report import EndedRun
from app.run_state import RunState, at_its_end
from profiles.errors import BadInput
from training.event_log import follow_events
from training.events import Event
from training.outcome import NewestAttempt
from training.plan import RunPlan
from training.run_files import is_live
from training.run_folder import RunFolder

LONGEST_SILENCE = 60.0
"""Seconds of a replayed run: a longer silence (the night between two attempts, a wrong clock) is shortened to this."""
_NAP = 0.1


class Follower:
    """Where a display takes a live or finished run from: its events, its plan, and how it ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan: RunPlan = RunFolder.open(path).plan()
        self._events = follow_events(path / "events.jsonl", lambda: is_live(path))
        self._attempt = NewestAttempt()

    def events(self) -> Iterator[Event | None]:
        """Yield the events from the first one on, and ``None`` every now and then while nothing happens.

        May wait for a moment between two of them, so a display reads it in a thread.
        """
        for event in self._events:
            if event is not None:
                self._attempt.note(event)
            yield event

    def now(self) -> float:
        """Return the present by the clock of the events, in seconds since the epoch: for ages and elapsed times."""
        return time.time()

    def ended(self, state: RunState) -> EndedRun:
        """Return how the run ended; to be called after the last event."""
        outcome = self._attempt.outcome(self.path)
        return EndedRun(**vars(outcome), plan=self.plan, state=at_its_end(state, outcome.status, outcome.message))


class Replay(Follower):
    """A finished run once more, in its own time or faster: each event comes when it is due.

    Events keep their times, so that every speed that is worked out from them is the run's own; :meth:`now` is the
    present of the run, and stands still after the last event. Events of machines whose clocks differ come in the order
    of the log.

    Args:
        speed: how much faster than it was.
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
            raise BadInput(f"{path.name} is still going on", f"watch it with: {command_about(path, 'attach')}")
        super().__init__(path)
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._present = 0.0
        """Time of the newest event that was due, by the clock of the run ..."""
        self._reached = clock()
        """... and when it was reached, by the clock of this process."""
        self._next = 0.0
        """Time of the event that is waited for: a display that lags behind must not see a later present."""

    def now(self) -> float:
        return min(self._present + (self._clock() - self._reached) * self._speed, self._next)

    def events(self) -> Iterator[Event | None]:
        began = False
        for event in super().events():  # they are all there, so none of them is waited for
            if event is None:
                continue
            if not began:
                began, self._present, self._next, self._reached = True, event.time, event.time, self._clock()
            yield from self._wait_for(event.time)
            yield event

    def _wait_for(self, moment: float) -> Iterator[None]:
        if moment <= self._present:
            return  # of a clock that is behind
        silence = min(moment - self._present, LONGEST_SILENCE)
        due, self._next = self._reached + silence / self._speed, self._present + silence
        while (left := due - self._clock()) > 0:
            yield None
            self._sleep(min(left, _NAP))
        self._present, self._next, self._reached = moment, moment, due
