"""The exchange of members that share a process: the mesh's arithmetic without a wire."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from training.exchange.base import (
    JOINING_DEADLINE,
    Contribution,
    Exchange,
    ExchangeError,
    Group,
    JoiningState,
    Later,
    MeanResult,
    Pending,
    Traffic,
    joined,
    weighted_mean,
)
from training.exchange.codecs import chunk_bounds, roundtrip
from training.exchange.payloads import state_from_bytes, state_to_bytes
from training.exchange.residuals import MeanResiduals, Residual
from training.simulated.baton import Baton

T = TypeVar("T")


def average(contributions: Collection[Contribution], residuals: MeanResiduals) -> torch.Tensor:
    """Return the weighted mean, flat fp32 on the CPU, of contributions in rank order as it reaches every member of a
    mesh: each was encoded, and so was the mean, piece by piece.

    Args:
        residuals: what encoding the means before has lost.
    """
    first = next(iter(contributions))
    given = [(one.weight, one.values.to("cpu")) for one in contributions]
    mean, codec, reply = torch.zeros(first.values.numel()), first.codec, first.codec.reply
    owed: dict[int, torch.Tensor] = {}
    for start, stop in chunk_bounds(mean.numel()):
        if stop == start:
            continue
        terms = [(weight, roundtrip(codec, values[start:stop])) for weight, values in given]
        back = functools.partial(reply.decode, elements=stop - start)
        part = weighted_mean(terms)
        mean[start:stop] = back(residuals.encode(first.stream, start, part, reply, reply.encode, back, owed))
    residuals.settle(first.stream, owed)
    return mean


@dataclass
class _Operation:
    """What members say under one name, until the last of them has heard it."""

    number: int
    group: Group
    said: dict[int, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    heard: set[int] = field(default_factory=set)


class AnotherFailed(ExchangeError):
    """A member's training failed, and with it that of all; or it is over for all others."""


Meet = Callable[[int], tuple[int, int, tuple[int, ...]]]
"""A member, by its rank, has come to where all meet: gives the step, who lets others in there, and whom."""


class SimulatedGroup:
    """Where the members meet.

    Args:
        members: how many there are.
        baton: lent while one waits for others.
        meet: says who comes back; nobody where nobody is ever lost.
    """

    def __init__(self, members: int, baton: Baton, meet: Meet = lambda rank: (0, 0, ())) -> None:
        self.members = tuple(range(members))
        self.residuals = MeanResiduals()
        self._baton, self._meet = baton, meet
        self._lock = threading.Lock()
        self._operations: dict[str, _Operation] = {}
        self._waiting: dict[int, str] = {}
        """What each member that waits waits for."""
        self._there = dict.fromkeys(self.members, 0)
        """Who was not lost, and takes part in no operation up to this number."""
        self._left: set[int] = set()
        self._away: dict[int, threading.Event] = {}
        """Who was lost, and what says that it may go on."""
        self._let_in: set[int] = set()
        """Steps after which those who came back were let in."""
        self._states: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._broken: ExchangeError | None = None

    def give(self, name: str, rank: int, value: Any, group: Group) -> None:
        """Say something under ``name``.

        Raises:
            ExchangeError: a member is gone, or all wait for one another.
        """
        with self._lock:
            self._check()
            number = int(name.rpartition(":")[2])
            operation = self._operations.setdefault(name, _Operation(number, group or self.members))
            operation.said[rank] = value
            if not self._missing(operation):
                operation.complete.set()

    def hear(self, name: str, rank: int, form: Callable[[Mapping[int, Any]], T]) -> T:
        """Wait until all have said something under ``name``; return what is formed of it, once, by rank.

        Raises:
            ExchangeError: that will never be.
        """
        with self._lock:
            operation = self._operations[name]
            if waits := not operation.complete.is_set():
                self._waiting[rank] = name
                self._look()
        if waits:
            with self._baton.lent():
                operation.complete.wait()
        with self._lock:
            self._waiting.pop(rank, None)
            if self._missing(operation):
                self._check()
            if operation.result is None:
                operation.result = form(dict(sorted(operation.said.items())))
            found: T = operation.result
            operation.heard.add(rank)
            self._forget(name)
            return found

    def leave(self, rank: int, failed: bool = False) -> None:
        """A member is gone: what it has not said the others will never hear."""
        with self._lock:
            self._left.add(rank)
            if failed and self._broken is None:
                self._broken = AnotherFailed("another member failed")
            self._look()

    # ------------------------------------------------------------------------------------- who is lost and comes back

    def lose(self, rank: int) -> None:
        """A member is lost: the others go on with what was said without it."""
        with self._lock:
            self._there.pop(rank, None)
            self._away[rank] = threading.Event()
            for name, operation in list(self._operations.items()):
                if not self._missing(operation):
                    operation.complete.set()
                    self._forget(name)
            self._look()

    def enter(self, rank: int) -> bool:
        """Return whether a member was away; wait until it is let in.

        Raises:
            ExchangeError: that will never be.
        """
        with self._lock:
            gate = self._away.get(rank)
        if gate is None:
            return False
        with self._baton.lent():
            gate.wait()
        with self._lock:
            self._check()
            if rank not in self._states:
                raise AnotherFailed("the training ended while it was away")
        return True

    def meet(self, rank: int, operations: int) -> tuple[bool, tuple[int, ...]]:
        """Members meet after so many operations; return whether this one is to tell others where they are, and whom."""
        with self._lock:
            step, first, back = self._meet(rank)
            if step not in self._let_in:
                self._let_in.add(step)
                self._there.update(dict.fromkeys(back, operations))
            return rank == first and bool(back), back

    def publish(self, joining: bytes, ranks: tuple[int, ...], members: tuple[int, ...]) -> None:
        """Let members in: where the others are, and who all take part then."""
        with self._lock:
            for rank in ranks:
                self._states[rank] = joining, members
                self._away[rank].set()

    def joining(self, rank: int) -> tuple[bytes, tuple[int, ...]]:
        """Return what was published for a member."""
        with self._lock:
            del self._away[rank]
            return self._states.pop(rank)

    # ------------------------------------------------------------------------------------------------------- the state

    def _missing(self, operation: _Operation) -> set[int]:
        """Return those who still have to say something; who takes no part in it need not."""
        there = {rank for rank in operation.group if self._there.get(rank, operation.number) < operation.number}
        return there - operation.said.keys()

    def _forget(self, name: str) -> None:
        """Forget an operation that all who are there have heard."""
        operation = self._operations[name]
        if not operation.said.keys() & self._there.keys() - operation.heard:
            del self._operations[name]

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _look(self) -> None:
        """Let nobody wait for what never comes."""
        waits = {rank: name for rank, name in self._waiting.items() if not self._operations[name].complete.is_set()}
        missing = {rank for name in set(waits.values()) for rank in self._missing(self._operations[name])}
        present = self._there.keys() - self._left
        if missing - present or (waits and waits.keys() >= present):
            said = ", ".join(sorted({name.rpartition(":")[0] for name in waits.values()})[:3])
            self._broken = self._broken or ExchangeError(f"the members wait for one another: {said}")
            for name in waits.values():
                self._operations[name].complete.set()
        if self._broken is not None or not present:
            for gate in self._away.values():
                gate.set()


class SimulatedExchange(Exchange):
    """One member's end. Its traffic is what it would send over a mesh whose members own equal shares."""

    engine = "simulated"
    shares_process = True

    def __init__(self, room: SimulatedGroup, rank: int) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self._room = room
        self._came_back = room.enter(rank)
        self._members = room.members
        self._guests: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def is_newcomer(self) -> bool:
        return self._came_back

    @property
    def state_wanted(self) -> bool:
        """Whether this member is to tell where it is: asked by every member where all meet."""
        wanted, self._guests = self._room.meet(self.rank, self.operations)
        self._members = tuple(sorted({*self._members, *self._guests}))
        return wanted

    def publish_state(self, joining: JoiningState) -> None:
        self._room.publish(state_to_bytes(replace(joining, operations=self.operations)), self._guests, self._members)

    def fetch_state(self, timeout: float = JOINING_DEADLINE) -> JoiningState:
        data, self._members = self._room.joining(self.rank)
        joining = state_from_bytes(data)
        self.operations = joining.operations
        return joining

    def _start_mean(self, given: Contribution, waits: bool = False) -> Pending[MeanResult]:
        own = replace(given, values=given.values.detach().clone()).checked()
        self._room.give(own.name, self.rank, own, own.group)
        return Later(lambda: self._mean(own))

    def _mean(self, own: Contribution) -> MeanResult:
        said, mean = self._hear(own.name, self._averaged)
        self._members = self._members if own.group else tuple(said)
        fit = [rank for rank, one in said.items() if one.fit]
        elements, codec = own.values.numel(), own.codec
        there_and_back = codec.expected_bytes(elements) + codec.expected_reply_bytes(elements, len(said))
        size = math.ceil((len(said) - 1) / len(said) * (there_and_back + 2 * len(own.flags)))
        self.traffic.bytes_sent += size
        self.traffic.bytes_received += size
        return MeanResult(
            mean.to(own.values.device, copy=True),
            sum(said[rank].weight for rank in fit),
            tuple(said),
            () if own.fit else ((0, mean.numel()),),
            tuple(rank for rank, one in said.items() if not one.fit),
            joined([said[rank].flags for rank in fit], len(own.flags)),
            own.fit,
        )

    def _averaged(self, said: Mapping[int, Contribution]) -> tuple[dict[int, Contribution], torch.Tensor]:
        fit = [one for one in said.values() if one.fit]
        mean = average(fit, self._room.residuals) if fit else torch.zeros(len(next(iter(said.values())).values))
        bare = {rank: replace(one, values=torch.empty(0)) for rank, one in said.items()}
        return bare, mean

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        self._room.give(name, self.rank, payload, group)
        return Later(lambda: self._gathered(name, len(payload), group))

    def _gathered(self, name: str, size: int, group: Group) -> dict[int, bytes]:
        said = self._hear(name, dict)
        self._members = self._members if group else tuple(said)
        self.traffic.bytes_sent += size * (len(said) - 1)
        self.traffic.bytes_received += sum(map(len, said.values())) - size
        return dict(said)

    def _hear(self, name: str, form: Callable[[Mapping[int, Any]], T]) -> T:
        start = time.monotonic()
        try:
            return self._room.hear(name, self.rank, form)
        finally:
            self.traffic.wait_seconds += time.monotonic() - start

    def residual(self, stream: str) -> Residual | None:
        return self._room.residuals.whole_vector(stream) if self.rank == 0 else None

    def restore_residual(self, stream: str, kept: Residual) -> None:
        self._room.residuals.restore(stream, kept)
