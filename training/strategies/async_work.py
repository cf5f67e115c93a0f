"""State that asynchronous members replicate: who does which work, and the anchor that deltas move as they arrive.

A run is cut into *segments*, between which all members meet. The work of a segment from step ``a`` to ``b`` is cut into
*work units*: unit ``j`` of ``n`` members is what the ``j mod n``-th of them would take of the data in step
``a + j // n`` if all went in lockstep. So every sample of an epoch is used once, and a segment ends when its samples
are used up. Whenever a delta of a member is applied, that member takes the next units: ``H_i`` of them by its speed,
fewer if the others would have to wait for it at the end of the segment. The units of a lost member are taken by the
others.

Everything here is a function of the deltas and speeds in their order, so members stay equal without messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from training.lazy import torch

_SMALLEST_SHARE = 4
"""At the end of a segment a member takes at least a quarter of its usual work, so that it does not send much more."""
_TILE = 1 << 18


class WorkUnit(NamedTuple):
    """One member's work of one step."""

    step: int
    """Steps of the run before it."""
    rank: int
    """Rank to which these samples of the step are assigned."""


@dataclass
class WorkAssignment:
    """Assigns work units to members.

    Args:
        interval: units that the fastest member takes at once, ``H``.
    """

    interval: int
    speeds: dict[int, float] = field(default_factory=dict)
    """Speed by rank, in steps a second or any other unit; 0: not known yet."""
    taken: dict[int, deque[WorkUnit]] = field(default_factory=dict)
    """Units by rank whose delta was not applied yet."""
    _abandoned: deque[WorkUnit] = field(default_factory=deque)
    """Units of lost members; they are assigned first."""
    _begin: int = 0
    _owners: tuple[int, ...] = ()
    _next: int = 0
    _end: int = 0

    def begin_segment(self, begin: int, end: int, owners: Sequence[int], speeds: Mapping[int, float]) -> None:
        """Begin a segment: all members take their first units, in rank order.

        Args:
            begin: steps of the run before it.
            end: steps of the run after it.
            owners: ranks among which the samples of a step are divided.
            speeds: by rank, of all members.
        """
        self._begin, self._owners, self._next, self._end = begin, tuple(owners), 0, (end - begin) * len(owners)
        self.speeds, self.taken, self._abandoned = dict(sorted(speeds.items())), {}, deque()
        for rank in self.speeds:
            self.take(rank)

    def units_at_once(self, rank: int) -> int:
        """Return ``H_i = H v_i / max v``, at least 1 (dynamic local updates, eq. 5 of the paper)."""
        fastest = max(self.speeds.values())
        speed = self.speeds[rank]
        return max(1, math.floor(self.interval * speed / fastest + 1e-9)) if speed and fastest else 1

    def take(self, rank: int) -> None:
        """Assign the next units to a member, if any are left."""
        full_count, remaining = self.units_at_once(rank), self.units_left
        assigned_to_others = sum(len(units) for other_rank, units in self.taken.items() if other_rank != rank)
        total_speed = sum(self.speeds.values())
        share = (
            math.ceil((remaining + assigned_to_others) * self.speeds[rank] / total_speed - 1e-9)
            if total_speed
            else full_count
        )
        count = min(full_count, max(share, math.ceil(full_count / _SMALLEST_SHARE)), remaining)
        self.taken[rank] = deque(self._following() for _ in range(count))

    def _following(self) -> WorkUnit:
        if self._abandoned:
            return self._abandoned.popleft()
        step, index = divmod(self._next, len(self._owners))
        self._next += 1
        return WorkUnit(self._begin + step, self._owners[index])

    def reassign_lost(self, ranks: Collection[int]) -> list[int]:
        """Take back the units of members other than ``ranks``; return the ranks that are idle and can take some."""
        for rank in self.speeds.keys() - set(ranks):
            del self.speeds[rank]
            self._abandoned.extend(self.taken.pop(rank, ()))
        self._abandoned = deque(sorted(self._abandoned))
        return [rank for rank, units in self.taken.items() if not units] if self.units_left else []

    @property
    def reached_step(self) -> int:
        """Step of the run that the assigned units reach: the earliest end of the segment."""
        return self._begin - -self._next // len(self._owners)

    def end_early(self) -> int:
        """End the segment as early as possible; return the steps of the run before its end."""
        self._end = (self.reached_step - self._begin) * len(self._owners)
        return self.reached_step

    @property
    def units_left(self) -> int:
        return self._end - self._next + len(self._abandoned)

    @property
    def is_over(self) -> bool:
        """Whether the segment is over: no units are left and none are assigned, or no member is left."""
        return not any(self.taken.values()) and not (self.units_left and self.taken)


class DelayedNesterov:
    """The anchor, moved by one delta at a time (algorithm 3 of the paper, with its default c = 0).

    Args:
        anchor: flat fp32 on the host; moved in place.
        rate: outer learning rate, epsilon.
        momentum: beta.
        period: deltas between two updates of the momentum, N.
        damping: exponent that lowers the weight of a delta with its age; 0: no damping.
    """

    def __init__(self, anchor: torch.Tensor, rate: float, momentum: float, period: int, damping: float) -> None:
        self.anchor, self.period = anchor, period
        self._rate, self._mu, self._damping = rate, momentum, damping
        self.speed = torch.zeros_like(anchor) if momentum else torch.empty(0)
        self._sum = torch.zeros_like(self.speed)
        self._collected = 0
        self.version = 0
        """Deltas that were applied."""

    def apply(self, delta: torch.Tensor, age: int) -> None:
        """Apply one delta, which may be overwritten.

        Args:
            delta: flat fp32, the anchor it started from minus the weights.
            age: deltas that were applied since that anchor.
        """
        if self._damping:
            delta.mul_((1.0 + age) ** -self._damping)
        self.version += 1
        self._collected += 1
        is_momentum_step = self._collected >= self.period
        delta_rate, mean_factor = self._rate / self.period, 1.0 / self._collected
        for start in range(0, delta.numel(), _TILE):
            anchor_tile, delta_tile = self.anchor[start : start + _TILE], delta[start : start + _TILE]
            if self._mu:
                momentum_tile, sum_tile = self.speed[start : start + _TILE], self._sum[start : start + _TILE]
                sum_tile.add_(delta_tile)
                if is_momentum_step:
                    momentum_tile.mul_(self._mu).add_(sum_tile.mul_(mean_factor))
                    anchor_tile.sub_(momentum_tile * (self._rate * self._mu))
                    sum_tile.zero_()
            anchor_tile.sub_(delta_tile.mul_(delta_rate))
        if is_momentum_step:
            self._collected = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a snapshot."""
        return {"anchor": self.anchor} | ({"momentum": self.speed, "sum": self._sum} if self._mu else {})

    def state(self) -> dict[str, Any]:
        """Return the JSON-able state of a snapshot."""
        return {"version": self.version, "collected": self._collected, "period": self.period}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Restore what :meth:`tensors` and :meth:`state` returned."""
        for name, vector in self.tensors().items():
            vector.copy_(tensors[name])
        self.version, self._collected = int(state["version"]), int(state["collected"])
        self.period = int(state["period"])
