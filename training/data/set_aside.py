"""Members that are set aside because every step is longer with them than without.

Where shares follow speed, a slow member ends with the smallest one, a sample in a pass. If all wait even for that, it
costs more than it adds: it gets no samples for some minutes, while it stays in the group, takes every update and so
holds the same weights as all. Then it is tried again with the smallest share, and stays if that is no longer so. From
the same figures all members decide the same.

Setting aside takes :data:`LEAST_STEPS` steps and :data:`LEAST_SECONDS` seconds in a row in which a step would be
shorter by :data:`LEAST_GAIN`; after a trial a single report, and each pause is twice as long as the one before. One
member at a time is judged, and at least one always trains. A slow connection shows in no member's computing, so it is
no reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.data.even_split import longest, split_evenly

LEAST_STEPS, LEAST_SECONDS, LEAST_GAIN = 40, 10.0, 0.1
FIRST_PAUSE, MOST_PAUSE = 600.0, 9600.0
"""Seconds for which a member is set aside the first time, and at most."""


@dataclass
class AsideMembers:
    """Who is set aside, and for how long. All members hold the same."""

    left: dict[int, float] = field(default_factory=dict)
    """Seconds until a member is tried again, by rank."""
    pauses: dict[int, float] = field(default_factory=dict)
    """Seconds for which each was set aside last, by rank."""
    on_trial: int = -1
    """Rank of the member that is back for a report; -1: none."""
    suspect: int = -1
    """Rank of the member that the newest reports speak against; -1: none."""
    evidence: tuple[int, float] = (0, 0.0)
    """Steps and seconds of these reports."""

    def keep(self, live: Mapping[int, int]) -> None:
        """Forget members that are gone, and all pauses where nobody else is left to train.

        Args:
            live: micro-batches of the members that are here, by rank.
        """
        self.left = {rank: seconds for rank, seconds in self.left.items() if rank in live}
        self.on_trial = self.on_trial if self.on_trial in live else -1
        if len(self.left) == len(live):
            self.left.clear()

    def pass_time(self, seconds: float) -> int | None:
        """Let time pass; return the member that is to be tried again, if there is one."""
        self.left = {rank: left - seconds for rank, left in self.left.items()}
        if self.on_trial >= 0 or not self.left:
            return None
        rank = min(self.left, key=lambda rank: (self.left[rank], rank))
        if self.left[rank] > 0:
            return None
        del self.left[rank]
        self.on_trial = rank
        return rank

    def judge(
        self, sizes: Mapping[int, int], seconds: Mapping[int, float], step: float, steps: int
    ) -> tuple[int, float] | None:
        """Return the rank of the member that is set aside from now on, and what the others take for a micro-batch
        without it, in seconds; ``None``: nobody is.

        Args:
            sizes: micro-batch of each member that trains, by rank.
            seconds: that each computes for a sample, by rank.
            step: seconds of a step, as a part of which a gain counts, for one micro-batch of each.
            steps: that the figures are of.
        """
        slowest = max(sizes, key=lambda rank: (sizes[rank] * seconds[rank], rank))
        others = {rank: seconds[rank] for rank in sizes if rank != slowest}
        without = self._without(sizes, others, slowest)
        now = longest(sizes, seconds)
        is_costly = without is not None and now - without >= LEAST_GAIN * max(now, step)
        was_on_trial = self.on_trial == slowest
        if self.on_trial in sizes:
            self.on_trial = -1
        if not is_costly or without is None:
            self.suspect, self.evidence = -1, (0, 0.0)
            return None
        before = self.evidence if self.suspect == slowest else (0, 0.0)
        self.suspect, self.evidence = slowest, (before[0] + steps, before[1] + steps * max(now, step))
        if not was_on_trial and (self.evidence[0] < LEAST_STEPS or self.evidence[1] < LEAST_SECONDS):
            return None
        self.suspect, self.evidence = -1, (0, 0.0)
        self.pauses[slowest] = min(MOST_PAUSE, 2 * self.pauses.get(slowest, FIRST_PAUSE / 2))
        self.left[slowest] = self.pauses[slowest]
        return slowest, without

    @staticmethod
    def _without(sizes: Mapping[int, int], others: Mapping[int, float], slowest: int) -> float | None:
        """Return what the others take for all samples; ``None``: there are none, or its share may become smaller."""
        if not others or sizes[slowest] > 1:
            return None
        total = sum(sizes.values())
        return longest(split_evenly(total, others), others) if total >= len(others) else None

    def state(self) -> list[Any]:
        """JSON-able part for snapshots and newcomers."""
        return [[*self.left.items()], [*self.pauses.items()], self.on_trial, self.suspect, self.evidence]

    @classmethod
    def load(cls, state: Any) -> AsideMembers:
        """Restore from :meth:`state`; an empty one has nothing to restore."""
        if not state:
            return cls()
        left, pauses, on_trial, suspect, (steps, seconds) = state
        aside, last = ({int(rank): float(value) for rank, value in pairs} for pairs in (left, pauses))
        return cls(aside, last, int(on_trial), int(suspect), (int(steps), float(seconds)))
