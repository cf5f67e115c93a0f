"""Where a display takes a run from: the folder of a live or finished one, or the replay of a finished one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from app.report import Ended
from app.run_state import RunState
from training.events import Event
from training.plan import RunPlan


class EventSource(Protocol):
    """What a display needs of a run; :class:`app.follow.Follower` and :class:`app.replay.Replay` are two."""

    @property
    def path(self) -> Path:
        """The run folder."""

    @property
    def plan(self) -> RunPlan: ...

    def events(self) -> Iterator[Event | None]:
        """Yield the events from the first one on, and ``None`` every now and then while nothing happens.

        May wait for a moment between two of them, so a display reads it in a thread.
        """

    def now(self) -> float:
        """Return the present by the clock of the events, in seconds since the epoch: for ages and elapsed times."""

    def ended(self, state: RunState) -> Ended:
        """Return how the run ended; to be called after the last event."""
