"""Bookkeeping of the hub's rounds: who has sent what, when a chunk may close, what is kept for the late.

A round is one named operation. It has one part per chunk of a mean, or a single part for a gather. Pure: no clock, no
lock, no network; payloads are opaque.

Members may disagree on what an operation is. Each version is then a round of its own, and whoever is outvoted is to
blame: the larger part of the members is right, and where there is none, the part with the lowest rank, whose weights
all members begin with. So nobody gains by being first.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from training.exchange.wire import HubLimits, WireError

_REMEMBERED_NAMES = 65_536


@dataclass(frozen=True)
class Contribution:
    """What one member sent for one part."""

    weight: float
    payload: Any
    size: int
    """Bytes that are held for it."""


@dataclass(eq=False)
class Round:
    """One named operation on its way."""

    name: str
    signature: Hashable
    """Kind, codec and length: equal for all members."""
    parts: int
    opened: float
    openers: set[int] = field(default_factory=set)
    """Ranks that have sent something, and so get the results."""
    weights: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, dict[int, Contribution]] = field(default_factory=dict)
    """By part, then rank."""
    results: dict[int, list[bytes]] = field(default_factory=dict)
    """Frames of the parts that are closed."""
    taken: set[int] = field(default_factory=set)
    """Parts that are being averaged or are closed."""
    seen: dict[int, bytearray] = field(default_factory=dict)
    """By rank: a flag for each part that came."""

    @property
    def finished(self) -> bool:
        return len(self.results) == self.parts

    @property
    def result_bytes(self) -> int:
        return sum(len(frame) for frames in self.results.values() for frame in frames)


@dataclass(frozen=True)
class Closing:
    """A part that closes now: its contributions in rank order."""

    round: Round
    part: int
    contributions: tuple[tuple[int, Contribution], ...]
    members: tuple[int, ...]


class RoundBook:
    """All rounds of a run.

    Args:
        quorum: share of the live members that closes a part once ``deadline`` has passed; at least one.
        deadline: seconds from the first contribution of a round.
        give_up: seconds after which a round that cannot close fails for all.
        limits: what one member may have under way and waiting, and what is kept for late members.
    """

    def __init__(self, quorum: float, deadline: float, give_up: float, limits: HubLimits) -> None:
        self._quorum = quorum
        self._deadline = deadline
        self._give_up = give_up
        self.limits = limits
        """They may change: they follow the model."""
        self._open: dict[str, list[Round]] = {}
        """By name: one round, or one for each version of it."""
        self._opened: Counter[int] = Counter()
        """Rounds under way in which a rank has a part."""
        self._kept: OrderedDict[str, Round] = OrderedDict()
        self._kept_size = 0
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._held: dict[int, int] = {}

    def add(
        self, rank: int, name: str, signature: Hashable, parts: int, part: int, contribution: Contribution, now: float
    ) -> Round:
        """Enter one contribution; one that is too late is only noted.

        Raises:
            WireError: sent twice, at odds with itself or with a result, over a limit, or for a round whose result is
                gone. Who is at odds with the others is told by :meth:`outvoted`.
        """
        current = self._find(rank, name, signature, parts, now)
        seen = current.seen.setdefault(rank, bytearray(current.parts))
        if seen[part]:
            raise WireError(f"{name}: chunk {part} came twice; a name belongs to one operation")
        if current.weights.setdefault(rank, contribution.weight) != contribution.weight:
            raise WireError(f"{name}: the weight changed within the operation")
        seen[part] = 1
        self._open_for(rank, current)
        if part not in current.taken:
            self._hold(rank, contribution.size)
            current.waiting.setdefault(part, {})[rank] = contribution
        return current

    def has_opened(self, name: str, rank: int) -> bool:
        """Return whether ``rank`` has sent something for the round."""
        return any(rank in current.openers for current in self._versions(name))

    def outvoted(self, live: Collection[int], now: float, name: str = "") -> list[tuple[int, str]]:
        """Return who is at odds with the others about an operation, and why; about any where no name is given."""
        found = []
        for versions in [self._open.get(name, [])] if name else list(self._open.values()):
            right = _elected(versions, set(live), now - versions[0].opened >= self._deadline) if versions else None
            for version in versions if right is not None else ():
                if version is not right:
                    reason = f"{version.name}: another codec or length than the others sent"
                    found += [(rank, reason) for rank in sorted(version.openers)]
        return found

    def take(self, current: Round, part: int, live: Collection[int], now: float) -> Closing | None:
        """Return ``part`` if it may close, and regard it as closing from then on."""
        waiting = current.waiting.get(part)
        if not waiting or part in current.taken:
            return None
        present = [rank for rank in sorted(live) if rank in waiting]
        overdue = now - current.opened >= self._deadline
        needed = max(1, math.ceil(self._quorum * len(live))) if overdue else max(1, len(live))
        if len(present) < needed:
            return None
        current.taken.add(part)
        del current.waiting[part]
        for rank, contribution in waiting.items():
            self._held[rank] -= contribution.size
        return Closing(current, part, tuple((rank, waiting[rank]) for rank in present), tuple(sorted(live)))

    def take_all(self, live: Collection[int], now: float) -> Iterator[Closing]:
        """Yield every part that may close: after a loss, or when time has passed."""
        for current in self._all_open():
            for part in sorted(current.waiting):
                closing = self.take(current, part, live, now)
                if closing is not None:
                    yield closing

    def reopen(self, closing: Closing) -> None:
        """Take back a closing that came to nothing."""
        closing.round.taken.discard(closing.part)

    def publish(self, closing: Closing, frames: list[bytes]) -> None:
        """Enter the result of a part; a finished round is kept for late members as long as there is room."""
        current = closing.round
        current.results[closing.part] = frames
        if not current.finished or not self._close(current):
            return
        self._kept[current.name] = current
        self._kept_size += current.result_bytes
        most = self.limits
        while self._kept and (self._kept_size > most.kept_bytes or len(self._kept) > most.open_operations):
            name, oldest = self._kept.popitem(last=False)
            self._kept_size -= oldest.result_bytes
            self._bury(name)

    def forget_member(self, rank: int) -> None:
        """Drop what a lost member has contributed to parts that are still open."""
        for current in [*self._all_open(), *self._kept.values()]:
            current.openers.discard(rank)
            current.seen.pop(rank, None)
            current.weights.pop(rank, None)
            for waiting in current.waiting.values():
                waiting.pop(rank, None)
        self._held.pop(rank, None)
        self._opened.pop(rank, None)
        for current in self._all_open():
            if not current.openers and not current.taken:
                self._close(current)

    def overdue(self, now: float) -> list[Round]:
        """Remove and return the rounds that could not close in ``give_up`` seconds."""
        failed = [current for current in self._all_open() if now - current.opened >= self._give_up]
        for current in failed:
            self.fail(current)
        return failed

    def fail(self, current: Round) -> None:
        """Remove a round that cannot finish."""
        if not self._close(current):
            return
        for waiting in current.waiting.values():
            for rank, contribution in waiting.items():
                self._held[rank] -= contribution.size
        current.waiting.clear()
        if current.name not in self._open:
            self._bury(current.name)

    def _versions(self, name: str) -> list[Round]:
        return self._open.get(name) or ([self._kept[name]] if name in self._kept else [])

    def _all_open(self) -> list[Round]:
        return [current for versions in self._open.values() for current in versions]

    def _find(self, rank: int, name: str, signature: Hashable, parts: int, now: float) -> Round:
        versions = self._versions(name)
        if not versions and name in self._gone:
            raise WireError(f"{name}: too late, its result is gone")
        for current in versions:
            if current.signature == signature:
                return current
        if any(rank in version.openers for version in versions):
            raise WireError(f"{name}: another codec or length than before")
        if any(version.taken for version in versions):
            raise WireError(f"{name}: another codec or length than the others sent")
        return Round(name, signature, parts, versions[0].opened if versions else now)

    def _open_for(self, rank: int, current: Round) -> None:
        """Let a member take part in a round, which is new if it is the first."""
        if rank in current.openers:
            return
        kept = current.name in self._kept
        if not kept and self._opened[rank] >= self.limits.open_operations:
            raise WireError(f"{current.name}: more than {self.limits.open_operations} operations under way")
        current.openers.add(rank)
        if not kept:
            self._opened[rank] += 1
            versions = self._open.setdefault(current.name, [])
            if current not in versions:
                versions.append(current)

    def _close(self, current: Round) -> bool:
        """Take a round out of those that are under way; return whether it was one."""
        versions = self._open.get(current.name, [])
        if current not in versions:
            return False
        versions.remove(current)
        if not versions:
            del self._open[current.name]
        self._opened.subtract({rank: 1 for rank in current.openers if rank in self._opened})
        return True

    def _hold(self, rank: int, size: int) -> None:
        held = self._held.get(rank, 0) + size
        if held > self.limits.member_bytes:
            raise WireError(f"more than {self.limits.member_bytes} bytes wait for the other members")
        self._held[rank] = held

    def _bury(self, name: str) -> None:
        self._gone[name] = None
        if len(self._gone) > _REMEMBERED_NAMES:
            self._gone.popitem(last=False)


def _elected(versions: list[Round], live: set[int], overdue: bool) -> Round | None:
    """Return the version of an operation that is right; ``None`` while that is open, or there is no other."""
    if len(versions) < 2:
        return None
    votes = [version.openers & live for version in versions]
    best = max(range(len(versions)), key=lambda number: (len(votes[number]), -min(votes[number], default=0)))
    sure = 2 * len(votes[best]) > len(live) or overdue or live <= set().union(*votes)
    return versions[best] if sure else None
