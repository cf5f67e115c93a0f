"""Bookkeeping of the hub's rounds: who has sent what, when a chunk may close, what is kept for the late.

A round is one named operation. It has one part per chunk of a mean, or a single part for a gather. Pure: no clock, no
lock, no network; payloads are opaque.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from training.exchange.wire import WireError

_REMEMBERED_NAMES = 65_536


@dataclass(frozen=True)
class Contribution:
    """What one member sent for one part."""

    weight: float
    payload: Any
    size: int
    """Bytes that are held for it."""


@dataclass
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
        open_rounds: rounds under way at most.
        member_bytes: contributions of one member that may wait.
        kept_bytes: results of finished rounds that are kept for late members.
    """

    def __init__(
        self, quorum: float, deadline: float, give_up: float, open_rounds: int, member_bytes: int, kept_bytes: int
    ) -> None:
        self._quorum = quorum
        self._deadline = deadline
        self._give_up = give_up
        self._open_rounds = open_rounds
        self._member_bytes = member_bytes
        self._kept_bytes = kept_bytes
        self._open: dict[str, Round] = {}
        self._kept: OrderedDict[str, Round] = OrderedDict()
        self._kept_size = 0
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._held: dict[int, int] = {}

    def add(
        self, rank: int, name: str, signature: Hashable, parts: int, part: int, contribution: Contribution, now: float
    ) -> Round:
        """Enter one contribution; one that is too late is only noted.

        Raises:
            WireError: sent twice, at odds with the others, over a limit, or for a round whose result is gone.
        """
        current = self._find(name, signature, parts, now)
        seen = current.seen.setdefault(rank, bytearray(current.parts))
        if seen[part]:
            raise WireError(f"{name}: chunk {part} came twice")
        if current.weights.setdefault(rank, contribution.weight) != contribution.weight:
            raise WireError(f"{name}: the weight changed within the operation")
        seen[part] = 1
        current.openers.add(rank)
        if part not in current.taken:
            self._hold(rank, contribution.size)
            current.waiting.setdefault(part, {})[rank] = contribution
        return current

    def has_opened(self, name: str, rank: int) -> bool:
        """Return whether ``rank`` has sent something for the round."""
        current = self._open.get(name) or self._kept.get(name)
        return current is not None and rank in current.openers

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
        for current in list(self._open.values()):
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
        if not current.finished or self._open.pop(current.name, None) is None:
            return
        current.seen.clear()
        self._kept[current.name] = current
        self._kept_size += current.result_bytes
        while self._kept_size > self._kept_bytes and self._kept:
            name, oldest = self._kept.popitem(last=False)
            self._kept_size -= oldest.result_bytes
            self._bury(name)

    def forget_member(self, rank: int) -> None:
        """Drop what a lost member has contributed to parts that are still open."""
        for current in [*self._open.values(), *self._kept.values()]:
            current.openers.discard(rank)
            current.seen.pop(rank, None)
            current.weights.pop(rank, None)
            for waiting in current.waiting.values():
                waiting.pop(rank, None)
        self._held.pop(rank, None)
        for name in [name for name, current in self._open.items() if not current.openers and not current.taken]:
            del self._open[name]

    def overdue(self, now: float) -> list[Round]:
        """Remove and return the rounds that could not close in ``give_up`` seconds."""
        failed = [current for current in self._open.values() if now - current.opened >= self._give_up]
        for current in failed:
            self.fail(current)
        return failed

    def fail(self, current: Round) -> None:
        """Remove a round that cannot finish."""
        if self._open.pop(current.name, None) is None:
            return
        for waiting in current.waiting.values():
            for rank, contribution in waiting.items():
                self._held[rank] -= contribution.size
        current.waiting.clear()
        self._bury(current.name)

    def _find(self, name: str, signature: Hashable, parts: int, now: float) -> Round:
        current = self._open.get(name) or self._kept.get(name)
        if current is None:
            if name in self._gone:
                raise WireError(f"{name}: too late, its result is gone")
            if len(self._open) >= self._open_rounds:
                raise WireError(f"{name}: more than {self._open_rounds} operations under way")
            current = self._open[name] = Round(name, signature, parts, now)
        if current.signature != signature:
            raise WireError(f"{name}: another codec or length than the others sent")
        return current

    def _hold(self, rank: int, size: int) -> None:
        held = self._held.get(rank, 0) + size
        if held > self._member_bytes:
            raise WireError(f"more than {self._member_bytes} bytes wait for the other members")
        self._held[rank] = held

    def _bury(self, name: str) -> None:
        self._gone[name] = None
        if len(self._gone) > _REMEMBERED_NAMES:
            self._gone.popitem(last=False)
