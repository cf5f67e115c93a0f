"""A run as its folder tells it, followed while it goes on: readers come and go, the run does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from app.report import Ended
from app.run_state import RunState, at_its_end
from training.event_log import follow_events
from training.event_log import follow_lines as follow_lines
from training.events import Event
from training.outcome import NewestAttempt
from training.plan import RunPlan
from training.run_files import is_live
from training.run_folder import RunFolder


class Follower:
    """Reads the events of a run and remembers how it ended.

    Args:
        path: the run folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan: RunPlan = RunFolder.open(path).plan()
        self._events = follow_events(path / "events.jsonl", lambda: is_live(path))
        self._attempt = NewestAttempt()

    def events(self) -> Iterator[Event | None]:
        """Yield the events from the first one on, and ``None`` every now and then while nothing happens."""
        for event in self._events:
            if event is not None:
                self._attempt.note(event)
            yield event

    def now(self) -> float:
        """Return the present, in seconds since the epoch."""
        return time.time()

    def ended(self, state: RunState) -> Ended:
        """Return how the run ended; to be called after the last event."""
        outcome = self._attempt.outcome(self.path)
        return Ended(**vars(outcome), plan=self.plan, state=at_its_end(state, outcome.status, outcome.message))
