"""What the screens are given: one frozen picture of a run and of how far it was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.dashboard.log_book import LogLine
from app.report import Ended
from app.run_series import Series
from app.run_state import RunState
from app.verdict import Alone
from distributed.planning.document import Candidate, Planning
from training.plan import RunPlan
from training.run_metadata import RunMetadata


@dataclass(frozen=True)
class Former:
    """The curves of a former run, to be laid under."""

    name: str
    curves: Mapping[str, Series]


@dataclass(frozen=True)
class Picture:
    """A run at one moment."""

    path: Path
    state: RunState = field(default_factory=RunState)
    now: float = 0.0
    """The present by the clock of the events."""
    plan: RunPlan | None = None
    metadata: RunMetadata | None = None
    planning: Planning | None = None
    live: bool = True
    read: bool = False
    """Whether everything that was there at the start has been read."""
    events: int = 0
    heard: Mapping[int, float] = field(default_factory=dict)
    """Seconds since each member was last heard of, for those heard of while we watched."""
    lines: tuple[LogLine, ...] = ()
    former: Former | None = None
    ended: Ended | None = None
    damage: str = ""
    """What is wrong with the folder; empty if nothing is."""

    @property
    def expected(self) -> int:
        """How many members there should be."""
        return max(self.plan.world_size if self.plan else 0, len(self.state.members))

    @property
    def planned(self) -> Candidate | None:
        """What the planner predicted for the way that this run takes; ``None`` where it could not."""
        best = self.planning.best if self.planning else None
        return best if best is not None and best.predicted else None

    @property
    def alone(self) -> Alone | None:
        """The best single machine, as it was predicted."""
        singles = [one for one in self.planning.ranking if one.choice.alone and one.fits] if self.planning else []
        best = max(singles, key=lambda one: one.samples_per_second, default=None)
        return Alone(best.choice.members[0], best.samples_per_second) if best else None

    def name(self, rank: int) -> str:
        """Return the name of a member."""
        member = self.state.members.get(rank)
        if member is not None and member.name:
            return member.name
        if self.plan is not None and 0 <= rank < self.plan.world_size:
            return self.plan.members[rank].name
        return f"member {rank}" if rank >= 0 else "run"
