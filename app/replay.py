"""A finished run once more, in its own time or faster: an :class:`app.event_source.EventSource` with a scaled clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from app.console import command_about
from app.follow import Follower
from app.report import Ended
from app.run_state import RunState
from profiles.errors import BadInput
from training.events import Event
from training.plan import RunPlan
from training.run_files import is_live

LONGEST_SILENCE = 60.0
"""Seconds of the run: a longer silence (the night between two attempts, a wrong clock) is shortened to this."""
_NAP = 0.1


class Replay:
    """Plays the events of a run when their time has come.

    Events keep their times, so that every speed that is worked out from them is the run's own; :meth:`now` is the
    present of the run. Events of machines whose clocks differ come in the order of the log.

    Args:
        path: the run folder.
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
        self.path = path
        self._follower = Follower(path)
        self._speed = speed
        self._clock = clock
        self._sleep = sleep
        self._present = 0.0
        """Time of the newest event that was due, by the clock of the run ..."""
        self._reached = clock()
        """... and when it was reached, by the clock of this process."""
        self._next = 0.0
        """Time of the event that is waited for: a display that lags behind must not see a later present."""

    @property
    def plan(self) -> RunPlan:
        return self._follower.plan

    def now(self) -> float:
        """Return the present of the run; it stands still after the last event."""
        return min(self._present + (self._clock() - self._reached) * self._speed, self._next)

    def events(self) -> Iterator[Event | None]:
        """Yield the events, each when it is due, and ``None`` while nothing is."""
        began = False
        for event in self._follower.events():  # they are all there, so none of them is waited for
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

    def ended(self, state: RunState) -> Ended:
        """Return how the run ended, with the state of the replay."""
        return self._follower.ended(state)
