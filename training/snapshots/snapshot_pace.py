"""When all members write their next snapshot: after the same step, from which a run is resumed, and by time.

A step lasts as long as its slowest member needs, and clocks differ. So members look together: each says how long ago
its last snapshot was, how long its steps take, and what a snapshot costs it. From the same figures all decide the same:
to write one now, or after which step they look next. They look where they meet anyway, and between two meetings only
where these are rare. What they agree on (:meth:`SnapshotPace.state`) goes to newcomers.

Two snapshots are apart by the time that is set, and in a run that takes less than ten times as long by a tenth of that,
as far as training waits for them for no more than a hundredth of it. No one begins before the disk was left alone for
as long as the last one took.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from profiles.optimisation import SnapshotSettings
from training.exchange.base import Exchange
from training.exchange.payloads import figures_by_rank

MOST_COST = 0.01
"""Share of the time that training waits for snapshots at most, where these are not as rare as they may be."""
_LOOK, _LOOK_BETWEEN = 15.0, 60.0
"""Seconds between two looks where members meet, and where they have to wait for one another."""
_LONGEST = 1e9


class SnapshotCost(NamedTuple):
    """What the last snapshot of a member cost, whoever has asked for it."""

    waited: float = 0.0
    """Seconds that training waited for it."""
    written: float = 0.0
    """Seconds until it was on the disk."""
    begun: float = -math.inf
    """When it was begun, by the clock of the pace."""


class Writer(Protocol):
    """What writes a member's snapshots."""

    def cost(self) -> SnapshotCost:
        """Return what the last one cost."""


class _Figures(NamedTuple):
    """What a member says, or the largest of what all say."""

    since: float
    """Seconds since its last snapshot, or since it began."""
    step: float
    """Seconds of a step, mean since the last look."""
    waited: float
    written: float


class SnapshotPace:
    """The pace of one member.

    Args:
        writer: of this member's snapshots.
        exchange: with the other members.
        largest: see :meth:`training.layouts.base.Layout.largest`.
        clock: seconds that only increase; no two members need the same.
        total_steps: of the run; 0: not known, or set later.
    """

    looks_at_every_meeting = False
    """Whether it does so before the agreed step, too: meetings are rare, or were asked for by :meth:`is_overdue`."""

    def __init__(
        self,
        settings: SnapshotSettings,
        writer: Writer,
        exchange: Exchange,
        largest: Callable[[int], int] = int,
        clock: Callable[[], float] = time.monotonic,
        total_steps: int = 0,
    ) -> None:
        self._settings, self._clock, self.total_steps = settings, clock, total_steps
        self._writer, self._exchange, self._largest = writer, exchange, largest
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin after ``step`` steps: nothing is known of how long they take on these machines."""
        self._begun, self._next_meeting, self._next_look = step, step + 1, step + 1
        self._start = self._looked_at = self._clock()
        self._looked_after, self._agreed = step, 0.0

    def is_due(self, step: int, meets: bool) -> bool:
        """Return whether all members write a snapshot after ``step`` steps. A collective call of all, after each step
        that all make, or after each meeting; newcomers take part from the next one on.

        Args:
            meets: whether members meet after this step.

        Raises:
            ExchangeError: the group cannot go on.
        """
        if self.total_steps and step >= self.total_steps:
            return False
        if not self._settings.seconds:
            return self._settings.steps > 0 and step % self._settings.steps == 0
        if step < (self._next_meeting if meets else self._next_look) and not self.looks_at_every_meeting:
            return False
        mine = json.dumps(self._figures(step)._asdict()).encode()
        gathered = figures_by_rank(self._exchange.gather(f"snapshots/{step}", mine)).values()
        return self._decide(step, [_valid(figures) for figures in gathered])

    def is_overdue(self, step: int) -> bool:
        """Return whether a snapshot is due by this member's clock alone, in a run that is at ``step``; any thread may
        ask. Members that go at their own pace ask for a meeting then."""
        if not self._settings.seconds or step <= self._looked_after:
            return False
        figures = self._figures(step)
        return figures.since >= max(self._agreed, self._apart(step, figures))

    def _figures(self, step: int) -> _Figures:
        now, steps, cost = self._clock(), step - self._looked_after, self._writer.cost()
        seconds = (now - self._looked_at) / steps if steps > 0 else 0.0
        return _Figures(now - max(self._start, cost.begun), seconds, cost.waited, cost.written)

    def _decide(self, step: int, gathered: list[_Figures]) -> bool:
        """Return whether to write one now, and set the next looks: the same on all devices of all members."""
        figures = _Figures(*map(max, zip(*gathered, strict=True)))
        seconds = max(figures.step, 1e-6)
        apart = self._apart(step, figures)
        self._agreed, left = apart, apart - figures.since
        is_due = self._largest(int(left <= seconds / 2)) > 0
        until_due = max(1, math.ceil((apart if is_due else left) / seconds))
        trusted = max(1, step - self._begun)  # the first steps tell little of the others
        at_meetings, between = (
            step + self._largest(min(until_due, trusted, math.ceil(most / seconds))) for most in (_LOOK, _LOOK_BETWEEN)
        )
        self._next_meeting, self._next_look = at_meetings, between
        self._looked_at, self._looked_after = self._clock(), step
        return is_due

    def _apart(self, step: int, figures: _Figures) -> float:
        """Return the seconds between two snapshots."""
        by_length = self._settings.seconds_in((self.total_steps or step) * figures.step)
        cheap = min(self._settings.seconds, max(by_length, figures.waited / MOST_COST))
        return max(cheap, 2 * figures.written)

    def state(self) -> dict[str, Any]:
        """JSON-able part for newcomers."""
        return {"next_meeting": self._next_meeting, "next_look": self._next_look, "begun": self._begun}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from ``step`` with what :meth:`state` of a member returned; without it as if all began there."""
        self.begin(step)
        if state:
            self._begun = int(state["begun"])
            self._next_meeting, self._next_look = int(state["next_meeting"]), int(state["next_look"])


def _valid(figures: Mapping[str, float]) -> _Figures:
    """Return a member's figures; one that is no duration counts as 0."""
    values = (figures.get(name, 0.0) for name in _Figures._fields)
    return _Figures(*(value if 0 <= value < _LONGEST else 0.0 for value in values))
