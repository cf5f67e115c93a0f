"""An exchange among threads of one process: the mean of the mesh without a mesh, and lateness by script."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from tests.waiting import PATIENCE
from training.exchange.base import (
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
)
from training.exchange.residuals import MeanResiduals, Residual
from training.simulated.exchange import average

Late = Callable[[str], Collection[int]]
"""``late(name)``: the ranks whose contribution to the mean of that name comes after its deadline."""


class Room:
    """Where the contributions of a group meet. Members leave, and others come, between two of their own operations.

    Args:
        newcomers: ranks that come when one of the others publishes a joining state.
    """

    def __init__(self, members: int, late: Late, timeout: float = PATIENCE, newcomers: Collection[int] = ()) -> None:
        self.names: list[str] = []
        self.newcomers = set(newcomers)
        """Those who are not let in yet."""
        self.came_later = frozenset(newcomers)
        self.waiting: set[int] = set()
        """Those of them that want a joining state."""
        self._joining: JoiningState | None = None
        self.residuals = MeanResiduals()
        self._late = late
        self._timeout = timeout
        self._since = dict.fromkeys(range(members), 0)
        """The live members, with the number of operations that began before they came."""
        self._said: dict[str, dict[int, Any]] = {}
        self._closed: dict[str, dict[int, Any]] = {}
        self._replies: dict[str, tuple[torch.Tensor, list[int]]] = {}
        self._wrong = ""
        """What members do differently."""
        self._changed = threading.Condition()

    @property
    def members(self) -> tuple[int, ...]:
        """The live ones."""
        with self._changed:
            return tuple(sorted(self._since))

    def leave(self, rank: int) -> None:
        """Let a member go; what it has given stays."""
        with self._changed:
            del self._since[rank]
            self._changed.notify_all()

    def admit(self, joining: JoiningState) -> None:
        """Let the newcomers in: they take part in what begins after the joining state."""
        with self._changed:
            self._joining = joining
            self._since |= dict.fromkeys(self.newcomers, joining.operations)
            self.newcomers, self.waiting = set(), set()
            self._changed.notify_all()

    def joining(self, rank: int) -> JoiningState:
        """Return what a newcomer is given when it is let in."""
        with self._changed:
            self.waiting.add(rank)
            assert self._changed.wait_for(lambda: rank not in self.newcomers, self._timeout), f"{rank} is not let in"
            assert self._joining is not None
            return self._joining

    def give(self, name: str, rank: int, value: Any) -> None:
        """Say something under ``name``."""
        with self._changed:
            if not self._said.setdefault(name, {}):
                self.names.append(_plain(name))
            assert rank not in self._said[name], f"{name} is used twice"
            self._check_same(name, rank)
            self._said[name][rank] = value
            self._changed.notify_all()

    def _check_same(self, name: str, rank: int) -> None:
        """Fail where members do different things in their operation of one number: they would wait for ever."""
        number = name.rpartition(":")[2]
        for other, said in self._said.items():
            if other != name and other.rpartition(":")[2] == number and " among " not in name + other:
                whose = f"member {min(said)} has begun '{_plain(other)}' as operation {number}"
                hint = "one that counts rounds itself hands its count to newcomers (docs/how-to/extending.md)"
                self._wrong = f"{whose}, member {rank} '{_plain(name)}': {hint}"

    def meet(self, name: str, rank: int, group: Group = ()) -> dict[int, Any]:
        """Return what all, or a group, have said under ``name``, by rank."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._wrong or self._complete(name, group), self._timeout)
            assert not self._wrong, self._wrong
            assert there, f"member {rank} hangs in {name}"
            return self._closed[name]

    def _complete(self, name: str, group: Group) -> bool:
        said, number = self._said[name], int(name.rpartition(":")[2])
        wanted = {one for one, since in self._since.items() if since < number and (not group or one in group)}
        if name not in self._closed and wanted <= said.keys():
            self._closed[name] = dict(sorted(said.items()))
        return name in self._closed

    def mean(self, name: str, said: dict[int, Contribution]) -> tuple[torch.Tensor, list[int]]:
        """Return the mean and who is in it; the first who asks averages."""
        with self._changed:
            if name not in self._replies:
                late = self._late(_plain(name))
                chosen = {r: one for r, one in said.items() if r not in late and one.is_finite}
                nothing = torch.zeros_like(next(iter(said.values())).values), list[int]()
                self._replies[name] = self._average(chosen) if chosen else nothing
            return self._replies[name]

    def _average(self, said: dict[int, Contribution]) -> tuple[torch.Tensor, list[int]]:
        return average(said.values(), self.residuals), sorted(said)


class RoomExchange(Exchange):
    """One member's end. Its traffic has the bytes that it gives, once, to however many others they go."""

    engine = "room"

    def __init__(self, room: Room, rank: int) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self.room = room
        self._members = room.members
        self._fetches = rank in room.came_later
        self.gone = False
        """Whether the group is lost for this member: no mean comes to its end."""

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def is_newcomer(self) -> bool:
        return self._fetches  # it may have been let in before its thread came to ask

    @property
    def must_publish_state(self) -> bool:
        return bool(self.room.waiting) and self.rank == min(self.room.members)

    def _start_mean(self, given: Contribution, waits: bool = False) -> Pending[MeanResult]:
        own = replace(given, values=given.values.detach().clone()).checked()
        self.traffic.bytes_sent += own.codec.encode(own.values).numel() + len(own.flags)
        self.room.give(own.name, self.rank, own)
        return LazyResult(lambda: self._mean(own))

    def _mean(self, own: Contribution) -> MeanResult:
        if self.gone:
            raise ExchangeError("lost the coordinator")
        said = self._meet(own.name, own.group)
        mean, among = self.room.mean(own.name, said)
        return MeanResult(
            mean.to(own.values.device, copy=True),
            sum(said[rank].weight for rank in among),
            tuple(said),
            () if self.rank in among else ((0, mean.numel()),),
            tuple(rank for rank, one in said.items() if not one.is_finite),
            combine_flags([said[rank].flags for rank in among], len(own.flags)),
            own.is_finite,
        )

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        self.traffic.bytes_sent += len(payload)
        self.room.give(name, self.rank, payload)
        return LazyResult(lambda: self._meet(name, group))

    def _meet(self, name: str, group: Group) -> dict[int, Any]:
        said = self.room.meet(name, self.rank, group)
        if not group:
            self._members = tuple(said)
        return said

    def residual(self, stream: str) -> Residual | None:
        return self.room.residuals.whole_vector(stream) if self.rank == 0 else None

    def restore_residual(self, stream: str, kept: Residual) -> None:
        self.room.residuals.restore(stream, kept)

    def publish_state(self, joining: JoiningState) -> None:
        copies = {name: tensor.detach().clone() for name, tensor in joining.tensors.items()}
        self.room.admit(JoiningState(copies, json.loads(json.dumps(joining.state)), self.operations))

    def fetch_state(self, timeout: float = 0.0, confirm: Confirm | None = None) -> JoiningState:
        joining = self.room.joining(self.rank)
        assert confirm is None or confirm(joining)
        self._fetches = False
        self.operations, self._members = joining.operations, self.room.members
        return joining

    def close(self) -> None:
        pass


def together(
    members: int, body: Callable[[RoomExchange], Any], late: Late = lambda name: (), newcomers: int = 0
) -> tuple[dict[int, Any], Room]:
    """Let every member of a group do ``body``, a thread each; return their results by rank.

    What a member raises is its result. The last ``newcomers`` of them are none before they have a joining state.
    """
    first = members - newcomers
    room, found = Room(first, late, newcomers=range(first, members)), dict[int, Any]()

    def do(rank: int) -> None:
        torch.get_num_threads()  # sets them for this thread, whose first convolution would take another number else
        try:
            found[rank] = body(RoomExchange(room, rank))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            found[rank] = error

    threads = [threading.Thread(target=do, args=(rank,), daemon=True) for rank in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a member hangs"
    return found, room


def _plain(name: str) -> str:
    """Return a name as its caller gave it, without the number."""
    return name.rpartition(":")[0]
