"""What members that train at their own pace hold alike: who takes which part of the work, and the anchor that their
deltas move in the order in which they arrive.

A run is cut into *stretches*, between which all members meet. The work of a stretch from step ``a`` to ``b`` is cut
into *places*: place ``j`` of ``n`` members is what the ``j mod n``-th of them would take of the data in step
``a + j // n``, if all went in lockstep. So every sample of an epoch is taken once, whoever takes it, and a stretch ends
when its samples are used up. Whenever a delta of a member is applied, it takes the next places: ``H_i`` of them by its
speed, fewer where the others would have to wait for it at the end of the stretch. The places of a member that is lost
are taken by the others.

Everything here follows from the deltas and speeds in their order, so all members have the same without a message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from training.lazy import torch

_LEAST_SHARE = 4
"""At the end of a stretch a member takes no less than this part of its usual work, so that it sends not much more."""
_AT_ONCE = 1 << 18


class WorkUnit(NamedTuple):
    """One step's work."""

    step: int
    """Steps of the whole run before it."""
    rank: int
    """Whose part of that step's samples it is."""


@dataclass
class WorkAssignment:
    """Who takes which places.

    Args:
        interval: places that the fastest member takes at once, ``H``.
    """

    interval: int
    speeds: dict[int, float] = field(default_factory=dict)
    """Steps a second, or in any other unit, of the members; 0: not known yet."""
    taken: dict[int, deque[WorkUnit]] = field(default_factory=dict)
    """What every member has taken and not given its delta for."""
    _owed: deque[WorkUnit] = field(default_factory=deque)
    """Those of members that are gone; they are taken first."""
    _begin: int = 0
    _owners: tuple[int, ...] = ()
    _next: int = 0
    _end: int = 0

    def open(self, begin: int, end: int, owners: Sequence[int], speeds: Mapping[int, float]) -> None:
        """Begin a stretch; all members take their first places, in the order of their ranks.

        Args:
            begin: steps before it.
            end: steps after it.
            owners: ranks among whom the samples of a step are divided.
            speeds: of all members.
        """
        self._begin, self._owners, self._next, self._end = begin, tuple(owners), 0, (end - begin) * len(owners)
        self.speeds, self.taken, self._owed = dict(sorted(speeds.items())), {}, deque()
        for rank in self.speeds:
            self.take(rank)

    def usual(self, rank: int) -> int:
        """Return ``H_i = H v_i / max v``, at least 1 (dynamic local updates, eq. 5 of the paper)."""
        fastest = max(self.speeds.values())
        speed = self.speeds[rank]
        return max(1, math.floor(self.interval * speed / fastest + 1e-9)) if speed and fastest else 1

    def take(self, rank: int) -> None:
        """Let a member take its next places, if any are left."""
        usual_count, remaining = self.usual(rank), self.left
        assigned_to_others = sum(len(units) for other_rank, units in self.taken.items() if other_rank != rank)
        total_speed = sum(self.speeds.values())
        share = (
            math.ceil((remaining + assigned_to_others) * self.speeds[rank] / total_speed - 1e-9)
            if total_speed
            else usual_count
        )
        count = min(usual_count, max(share, math.ceil(usual_count / _LEAST_SHARE)), remaining)
        self.taken[rank] = deque(self._following() for _ in range(count))

    def _following(self) -> WorkUnit:
        if self._owed:
            return self._owed.popleft()
        step, index = divmod(self._next, len(self._owners))
        self._next += 1
        return WorkUnit(self._begin + step, self._owners[index])

    def keep(self, ranks: Collection[int]) -> list[int]:
        """Take the places of members that are gone back; return who has none and is to take some, ascending."""
        for rank in self.speeds.keys() - set(ranks):
            del self.speeds[rank]
            self._owed.extend(self.taken.pop(rank, ()))
        self._owed = deque(sorted(self._owed))
        return [rank for rank, units in self.taken.items() if not units] if self.left else []

    @property
    def reached(self) -> int:
        """Steps of the run that the places up to now belong to: there the stretch ends at the soonest."""
        return self._begin - -self._next // len(self._owners)

    def cut(self) -> int:
        """End the stretch as soon as that can be; return the steps of the run before its end."""
        self._end = (self.reached - self._begin) * len(self._owners)
        return self.reached

    @property
    def left(self) -> int:
        return self._end - self._next + len(self._owed)

    @property
    def over(self) -> bool:
        """Whether the stretch is at its end: nothing is left, and nobody has taken anything; or nobody is there."""
        return not any(self.taken.values()) and not (self.left and self.taken)


class DelayedNesterov:
    """The anchor and how deltas move it (algorithm 3 of the paper, with its usual c = 0).

    Args:
        anchor: flat fp32 of the host, taken over.
        rate: outer learning rate, epsilon.
        momentum: beta.
        period: deltas from one update of the momentum to the next, N.
        damping: exponent by which a delta counts less for the deltas that came before it while it was made; 0: not.
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
        """Apply one delta, which is given away.

        Args:
            delta: flat fp32, anchor of then minus weights.
            age: deltas that were applied since then.
        """
        if self._damping:
            delta.mul_((1.0 + age) ** -self._damping)
        self.version += 1
        self._collected += 1
        is_momentum_step = self._collected >= self.period
        delta_rate, mean_factor = self._rate / self.period, 1.0 / self._collected
        for start in range(0, delta.numel(), _AT_ONCE):
            anchor_tile, delta_tile = self.anchor[start : start + _AT_ONCE], delta[start : start + _AT_ONCE]
            if self._mu:
                momentum_tile, sum_tile = self.speed[start : start + _AT_ONCE], self._sum[start : start + _AT_ONCE]
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
        """Return the rest of it."""
        return {"version": self.version, "collected": self._collected, "period": self.period}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        """Take back what :meth:`tensors` and :meth:`state` gave."""
        for name, vector in self.tensors().items():
            vector.copy_(tensors[name])
        self.version, self._collected = int(state["version"]), int(state["collected"])
        self.period = int(state["period"])
