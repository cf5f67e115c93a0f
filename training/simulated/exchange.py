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
    first_contribution = next(iter(contributions))
    inputs = [(contribution.weight, contribution.values.to("cpu")) for contribution in contributions]
    mean, codec, reply = (
        torch.zeros(first_contribution.values.numel()),
        first_contribution.codec,
        first_contribution.codec.reply,
    )
    updated_residuals: dict[int, torch.Tensor] = {}
    for start, stop in chunk_bounds(mean.numel()):
        if stop == start:
            continue
        terms = [(weight, roundtrip(codec, values[start:stop])) for weight, values in inputs]
        decode = functools.partial(reply.decode, elements=stop - start)
        mean_chunk = weighted_mean(terms)
        mean[start:stop] = decode(
            residuals.encode(
                first_contribution.stream, start, mean_chunk, reply, reply.encode, decode, updated_residuals
            )
        )
    residuals.settle(first_contribution.stream, updated_residuals)
    return mean


@dataclass
class _Operation:
    """What members say under one name, until the last of them has heard it."""

    number: int
    group: Group
    values: dict[int, Any] = field(default_factory=dict)
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
        self._present_since = dict.fromkeys(self.members, 0)
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
            operation.values[rank] = value
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
                operation.result = form(dict(sorted(operation.values.items())))
            result: T = operation.result
            operation.heard.add(rank)
            self._forget(name)
            return result

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
            self._present_since.pop(rank, None)
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
            step, host, returning = self._meet(rank)
            if step not in self._let_in:
                self._let_in.add(step)
                self._present_since.update(dict.fromkeys(returning, operations))
            return rank == host and bool(returning), returning

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
        expected = {
            rank for rank in operation.group if self._present_since.get(rank, operation.number) < operation.number
        }
        return expected - operation.values.keys()

    def _forget(self, name: str) -> None:
        """Forget an operation that all who are there have heard."""
        operation = self._operations[name]
        if not operation.values.keys() & self._present_since.keys() - operation.heard:
            del self._operations[name]

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _look(self) -> None:
        """Let nobody wait for what never comes."""
        waits = {rank: name for rank, name in self._waiting.items() if not self._operations[name].complete.is_set()}
        missing = {rank for name in set(waits.values()) for rank in self._missing(self._operations[name])}
        present = self._present_since.keys() - self._left
        if missing - present or (waits and waits.keys() >= present):
            operation_names = ", ".join(sorted({name.rpartition(":")[0] for name in waits.values()})[:3])
            self._broken = self._broken or ExchangeError(f"the members wait for one another: {operation_names}")
            for name in waits.values():
                self._operations[name].complete.set()
        if self._broken is not None or not present:
            for gate in self._away.values():
                gate.set()


class SimulatedExchange(Exchange):
    """One member's end. Its traffic is what it would send over a mesh whose members own equal shares."""

    engine = "simulated"
    shares_process = True

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self._group = group
        self._came_back = group.enter(rank)
        self._members = group.members
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
        is_wanted, self._guests = self._group.meet(self.rank, self.operations)
        self._members = tuple(sorted({*self._members, *self._guests}))
        return is_wanted

    def publish_state(self, joining: JoiningState) -> None:
        self._group.publish(state_to_bytes(replace(joining, operations=self.operations)), self._guests, self._members)

    def fetch_state(self, timeout: float = JOINING_DEADLINE) -> JoiningState:
        data, self._members = self._group.joining(self.rank)
        joining = state_from_bytes(data)
        self.operations = joining.operations
        return joining

    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        checked = replace(contribution, values=contribution.values.detach().clone()).checked()
        self._group.give(checked.name, self.rank, checked, checked.group)
        return Later(lambda: self._mean(checked))

    def _mean(self, contribution: Contribution) -> MeanResult:
        contributions, mean = self._hear(contribution.name, self._averaged)
        self._members = self._members if contribution.group else tuple(contributions)
        finite_ranks = [rank for rank, member_contribution in contributions.items() if member_contribution.fit]
        elements, codec = contribution.values.numel(), contribution.codec
        roundtrip_bytes = codec.expected_bytes(elements) + codec.expected_reply_bytes(elements, len(contributions))
        size = math.ceil(
            (len(contributions) - 1) / len(contributions) * (roundtrip_bytes + 2 * len(contribution.flags))
        )
        self.traffic.bytes_sent += size
        self.traffic.bytes_received += size
        return MeanResult(
            mean.to(contribution.values.device, copy=True),
            sum(contributions[rank].weight for rank in finite_ranks),
            tuple(contributions),
            () if contribution.fit else ((0, mean.numel()),),
            tuple(rank for rank, member_contribution in contributions.items() if not member_contribution.fit),
            joined([contributions[rank].flags for rank in finite_ranks], len(contribution.flags)),
            contribution.fit,
        )

    def _averaged(self, contributions: Mapping[int, Contribution]) -> tuple[dict[int, Contribution], torch.Tensor]:
        finite = [contribution for contribution in contributions.values() if contribution.fit]
        mean = (
            average(finite, self._group.residuals)
            if finite
            else torch.zeros(len(next(iter(contributions.values())).values))
        )
        without_values = {
            rank: replace(contribution, values=torch.empty(0)) for rank, contribution in contributions.items()
        }
        return without_values, mean

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        self._group.give(name, self.rank, payload, group)
        return Later(lambda: self._gathered(name, len(payload), group))

    def _gathered(self, name: str, size: int, group: Group) -> dict[int, bytes]:
        payloads = self._hear(name, dict)
        self._members = self._members if group else tuple(payloads)
        self.traffic.bytes_sent += size * (len(payloads) - 1)
        self.traffic.bytes_received += sum(map(len, payloads.values())) - size
        return dict(payloads)

    def _hear(self, name: str, form: Callable[[Mapping[int, Any]], T]) -> T:
        start = time.monotonic()
        try:
            return self._group.hear(name, self.rank, form)
        finally:
            self.traffic.wait_seconds += time.monotonic() - start

    def residual(self, stream: str) -> Residual | None:
        return self._group.residuals.whole_vector(stream) if self.rank == 0 else None

    def restore_residual(self, stream: str, residual: Residual) -> None:
        self._group.residuals.restore(stream, residual)
