"""Who is missing while a run starts, and why."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from training.events import Event, MemberEvent, ProgressEvent, RunEvent


class StartWatch:
    """Takes the events of a start, from any thread.

    Args:
        names: of the members, by rank.
        engine: ``hub`` or ``torch``.
    """

    def __init__(self, names: Sequence[str], engine: str) -> None:
        self._names = names
        self._engine = engine
        self._lock = threading.Lock()
        self._started: set[int] = set()
        self._joined: set[int] = set()
        self._work: dict[int, ProgressEvent] = {}
        self.begun = False
        """Whether the members have come together."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case RunEvent(status="running"):
                    self.begun = True
                case MemberEvent(status="started", member=int(rank)):
                    self._started.add(rank)
                case MemberEvent(status="joined", member=int(rank)):
                    self._joined.add(rank)
                case ProgressEvent(member=int(rank)):
                    self._work[rank] = event

    def missing(self) -> list[str]:
        """Return a line for every member that the others wait for."""
        with self._lock:
            return [self._line(rank) for rank in range(len(self._names)) if rank not in self._joined]

    def _line(self, rank: int) -> str:
        name, work = self._names[rank], self._work.get(rank)
        if rank not in self._started:
            return f"waiting for {name}: its worker has not started yet"
        if work is not None and (work.total is None or work.done < work.total):
            total = f" of {work.total}" if work.total else ""
            return f"waiting for {name}: it is preparing ({work.phase}: {work.done}{total})"
        if self._engine == "torch":
            return f"waiting for {name}: its worker runs; it has not joined the others yet"
        return f"waiting for {name}: its worker runs and has not reached the hub here; does a firewall block it?"
