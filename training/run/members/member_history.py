"""The members of a run that goes on, as its events tell of them."""

from __future__ import annotations

from collections.abc import Iterable

from training.records.events import ErrorEvent, Event, MemberEvent, RunEvent
from training.run.meeting_point import Elected


class MemberHistory:
    """The members of a live run as its events describe them."""

    def __init__(self) -> None:
        self.attached: dict[int, int] = {}
        """Ranks whose workers may still run, with the number of the last line at their agents that was recorded."""
        self.status: dict[int, str] = {}
        """The newest status of each member."""
        self.joining: set[int] = set()
        """Members that came after the run had begun, and have not joined yet."""
        self.run_status = "starting"
        self.newest = 0
        """Number of the newest event."""
        self.elected: Elected | None = None
        """The coordinator that the members follow instead of that of the run's supervisor."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> MemberHistory:
        """Return that of the newest attempt in the events of a run."""
        history = cls()
        for event in events:
            history = cls() if isinstance(event, RunEvent) and event.status == "starting" else history
            history._note(event)
        return history

    def _note(self, event: Event) -> None:
        self.newest = event.seq or 0
        self.elected = Elected.newest(event, self.elected)
        if isinstance(event, RunEvent):
            self.run_status = event.status
        if event.member is None:
            return
        rank = event.member
        if event.line is not None and rank in self.attached:
            self.attached[rank] = event.line
        if isinstance(event, ErrorEvent):
            self._note_end(rank, "failed")
        elif isinstance(event, MemberEvent):
            self._note_member(rank, event)

    def _note_member(self, rank: int, event: MemberEvent) -> None:
        if event.status == "started":
            self.attached[rank] = event.line or 0
            self.joining |= set() if self.run_status == "starting" else {rank}
        elif event.status == "left":
            return self._note_end(rank, "left")
        elif event.status == "joined":
            self.joining.discard(rank)
        self.status[rank] = event.status

    def _note_end(self, rank: int, status: str) -> None:
        self.attached.pop(rank, None)
        self.joining.discard(rank)
        self.status[rank] = status

    def ranks(self, *statuses: str) -> set[int]:
        """Return the members of which one of these statuses is the newest."""
        return {rank for rank, status in self.status.items() if status in statuses}
