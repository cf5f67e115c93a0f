"""The exchange of members that share a process: the mesh's arithmetic without a wire."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from training.exchange.base import (
    JOINING_DEADLINE,
    Confirm,
    Contribution,
    Exchange,
    ExchangeError,
    Group,
    JoiningState,
    LazyResult,
    MeanResult,
    Pending,
    Traffic,
    combine_flags,
    weighted_mean,
)
from training.exchange.codecs import chunk_bounds, roundtrip
from training.exchange.payloads import state_from_bytes, state_to_bytes
from training.exchange.residuals import MeanEncoder, MeanResiduals, Residual
from training.simulated.baton import Baton

T = TypeVar("T")


def average(contributions: Collection[Contribution], residuals: MeanResiduals) -> torch.Tensor:
    """Return the weighted mean of contributions in rank order, flat fp32 on the CPU, as members of a mesh get it.

    Each contribution is encoded and decoded, and so is the mean, chunk by chunk.

    Args:
        residuals: encoding errors of earlier means; updated.
    """
    any_contribution = next(iter(contributions))
    inputs = [(contribution.weight, contribution.values.to("cpu")) for contribution in contributions]
    mean, codec = torch.zeros(any_contribution.values.numel()), any_contribution.codec
    encoder = MeanEncoder(residuals, any_contribution.stream, codec.reply)
    for start, stop in chunk_bounds(mean.numel()):
        if stop > start:
            terms = [(weight, roundtrip(codec, values[start:stop])) for weight, values in inputs]
            mean[start:stop] = codec.reply.decode(encoder.encode(start, weighted_mean(terms)), stop - start)
    encoder.settle()
    return mean


@dataclass
class _Operation:
    """An operation: the members' values under one name, until the last member has read the result."""

    number: int
    group: Group
    values: dict[int, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    readers: set[int] = field(default_factory=set)


class OtherMemberFailed(ExchangeError):
    """Another member failed, which ends the run for all; or training is over for all others."""


Meet = Callable[[int], tuple[int, int, tuple[int, ...]]]
"""Called with the rank of a member at a meeting; returns the step, the host's rank, and the newcomers' ranks."""


class SimulatedGroup:
    """The shared state of members in one process.

    Args:
        members: number of members.
        baton: lent while a member waits for others.
        meet: tells which members return; by default none.
    """

    def __init__(self, members: int, baton: Baton, meet: Meet = lambda rank: (0, 0, ())) -> None:
        self.members = tuple(range(members))
        self.residuals = MeanResiduals()
        self._baton, self._meet = baton, meet
        self._lock = threading.Lock()
        self._operations: dict[str, _Operation] = {}
        self._waiting: dict[int, str] = {}
        """Name of the operation that each waiting member waits for, by rank."""
        self._present_since = dict.fromkeys(self.members, 0)
        """Number of the last operation before each present member joined, by rank."""
        self._left: set[int] = set()
        self._absent: dict[int, threading.Event] = {}
        """Absent members by rank, with the event that lets them join again."""
        self._joining_steps: set[int] = set()
        """Steps after which newcomers joined."""
        self._states: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self._broken: ExchangeError | None = None

    def contribute(self, name: str, rank: int, value: Any, group: Group) -> None:
        """Contribute ``value`` to the operation ``name``.

        Raises:
            ExchangeError: the group is broken.
        """
        with self._lock:
            self._check()
            number = int(name.rpartition(":")[2])
            operation = self._operations.setdefault(name, _Operation(number, group or self.members))
            operation.values[rank] = value
            if not self._missing(operation):
                operation.complete.set()

    def wait_for(self, name: str, rank: int, form: Callable[[Mapping[int, Any]], T]) -> T:
        """Wait until all members have contributed to ``name``; return its result.

        Args:
            form: computes the result from the values by rank; called once.

        Raises:
            ExchangeError: the group is broken.
        """
        with self._lock:
            operation = self._operations[name]
            if waits := not operation.complete.is_set():
                self._waiting[rank] = name
                self._detect_deadlock()
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
            operation.readers.add(rank)
            self._forget(name)
            return result

    def leave(self, rank: int, failed: bool = False) -> None:
        """Note that a member left: its missing contributions will never arrive."""
        with self._lock:
            self._left.add(rank)
            if failed and self._broken is None:
                self._broken = OtherMemberFailed("another member failed")
            self._detect_deadlock()

    # ------------------------------------------------------------------------------------- failures and newcomers

    def lose(self, rank: int) -> None:
        """Note that a member is lost: the others continue without it."""
        with self._lock:
            self._present_since.pop(rank, None)
            self._absent[rank] = threading.Event()
            for name, operation in list(self._operations.items()):
                if not self._missing(operation):
                    operation.complete.set()
                    self._forget(name)
            self._detect_deadlock()

    def join(self, rank: int) -> bool:
        """Return whether a member was absent, after waiting until it may join.

        Raises:
            ExchangeError: the group is broken, or the training ended.
        """
        with self._lock:
            gate = self._absent.get(rank)
        if gate is None:
            return False
        with self._baton.lent():
            gate.wait()
        with self._lock:
            self._check()
            if rank not in self._states:
                raise OtherMemberFailed("the training ended while it was away")
        return True

    def meet(self, rank: int, operations: int) -> tuple[bool, tuple[int, ...]]:
        """Called by every member at a meeting; return whether this one hosts newcomers, and their ranks.

        Args:
            operations: number of operations so far.
        """
        with self._lock:
            step, host, returning = self._meet(rank)
            if step not in self._joining_steps:
                self._joining_steps.add(step)
                self._present_since.update(dict.fromkeys(returning, operations))
            return rank == host and bool(returning), returning

    def publish(self, joining: bytes, ranks: tuple[int, ...], members: tuple[int, ...]) -> None:
        """Publish a joining state for newcomers.

        Args:
            ranks: of the newcomers.
            members: all ranks that take part from now on.
        """
        with self._lock:
            for rank in ranks:
                self._states[rank] = joining, members
                self._absent[rank].set()

    def joining(self, rank: int) -> tuple[bytes, tuple[int, ...]]:
        """Return the joining state and members that were published for a newcomer."""
        with self._lock:
            del self._absent[rank]
            return self._states.pop(rank)

    # --------------------------------------------------------------------------------------------------- bookkeeping

    def _missing(self, operation: _Operation) -> set[int]:
        """Return the ranks whose contribution to an operation is missing."""
        expected = {
            rank for rank in operation.group if self._present_since.get(rank, operation.number) < operation.number
        }
        return expected - operation.values.keys()

    def _forget(self, name: str) -> None:
        """Drop an operation whose result all present members have read."""
        operation = self._operations[name]
        if not operation.values.keys() & self._present_since.keys() - operation.readers:
            del self._operations[name]

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _detect_deadlock(self) -> None:
        """Break the group if members wait for contributions that cannot arrive."""
        waits = {rank: name for rank, name in self._waiting.items() if not self._operations[name].complete.is_set()}
        missing = {rank for name in set(waits.values()) for rank in self._missing(self._operations[name])}
        present = self._present_since.keys() - self._left
        if missing - present or (waits and waits.keys() >= present):
            operation_names = ", ".join(sorted({name.rpartition(":")[0] for name in waits.values()})[:3])
            self._broken = self._broken or ExchangeError(f"the members wait for one another: {operation_names}")
            for name in waits.values():
                self._operations[name].complete.set()
        if self._broken is not None or not present:
            for gate in self._absent.values():
                gate.set()


class SimulatedExchange(Exchange):
    """One member's exchange. Its traffic is that of a mesh whose members own equal shards."""

    engine = "simulated"
    shares_process = True

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self._group = group
        self._was_absent = group.join(rank)
        self._members = group.members
        self._newcomers: tuple[int, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def is_newcomer(self) -> bool:
        return self._was_absent

    @property
    def must_publish_state(self) -> bool:
        """Whether newcomers wait for this member's state; read by every member at a meeting."""
        is_wanted, self._newcomers = self._group.meet(self.rank, self.operations)
        self._members = tuple(sorted({*self._members, *self._newcomers}))
        return is_wanted

    def publish_state(self, joining: JoiningState) -> None:
        self._group.publish(
            state_to_bytes(replace(joining, operations=self.operations)), self._newcomers, self._members
        )

    def fetch_state(self, timeout: float = JOINING_DEADLINE, confirm: Confirm | None = None) -> JoiningState:
        data, self._members = self._group.joining(self.rank)
        joining = state_from_bytes(data)
        self.operations = joining.operations
        return joining

    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        checked = replace(contribution, values=contribution.values.detach().clone()).checked()
        self._group.contribute(checked.name, self.rank, checked, checked.group)
        return LazyResult(lambda: self._mean(checked))

    def _mean(self, contribution: Contribution) -> MeanResult:
        contributions, mean = self._wait_for(contribution.name, self._averaged)
        self._members = self._members if contribution.group else tuple(contributions)
        finite_ranks = [rank for rank, member_contribution in contributions.items() if member_contribution.is_finite]
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
            () if contribution.is_finite else ((0, mean.numel()),),
            tuple(rank for rank, member_contribution in contributions.items() if not member_contribution.is_finite),
            combine_flags([contributions[rank].flags for rank in finite_ranks], len(contribution.flags)),
            contribution.is_finite,
        )

    def _averaged(self, contributions: Mapping[int, Contribution]) -> tuple[dict[int, Contribution], torch.Tensor]:
        finite = [contribution for contribution in contributions.values() if contribution.is_finite]
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
        self._group.contribute(name, self.rank, payload, group)
        return LazyResult(lambda: self._gathered(name, len(payload), group))

    def _gathered(self, name: str, size: int, group: Group) -> dict[int, bytes]:
        payloads = self._wait_for(name, dict)
        self._members = self._members if group else tuple(payloads)
        self.traffic.bytes_sent += size * (len(payloads) - 1)
        self.traffic.bytes_received += sum(map(len, payloads.values())) - size
        return dict(payloads)

    def _wait_for(self, name: str, form: Callable[[Mapping[int, Any]], T]) -> T:
        start = time.monotonic()
        try:
            return self._group.wait_for(name, self.rank, form)
        finally:
            self.traffic.wait_seconds += time.monotonic() - start

    def residual(self, stream: str) -> Residual | None:
        return self._group.residuals.whole_vector(stream) if self.rank == 0 else None

    def restore_residual(self, stream: str, residual: Residual) -> None:
        self._group.residuals.restore(stream, residual)
