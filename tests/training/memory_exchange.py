"""An exchange among threads of one process: the mean of the mesh without a mesh, and lateness by script."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from training.exchange.base import Anchor, Exchange, Finished, MeanResult, Pending, Traffic, joined, weighted_mean
from training.exchange.codecs import Codec, chunk_bounds, roundtrip
from training.exchange.error_feedback import MeanResiduals
from training.exchange.owners import Contribution

Late = Callable[[str], Collection[int]]
"""``late(name)``: the ranks whose contribution to the mean of that name comes after its deadline."""


class Room:
    """Where the contributions of a group meet."""

    def __init__(self, members: int, late: Late, timeout: float = 30.0) -> None:
        self.members = members
        self.names: list[str] = []
        self.residuals = MeanResiduals()
        self._late = late
        self._timeout = timeout
        self._said: dict[str, dict[int, Any]] = {}
        self._replies: dict[str, tuple[torch.Tensor, list[int]]] = {}
        self._changed = threading.Condition()

    def meet(self, name: str, rank: int, value: Any) -> dict[int, Any]:
        """Return what all have said under ``name``, by rank."""
        with self._changed:
            if not self._said.setdefault(name, {}):
                self.names.append(_plain(name))
            assert rank not in self._said[name], f"{name} is used twice"
            self._said[name][rank] = value
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: len(self._said[name]) == self.members, self._timeout)
            assert there, f"member {rank} hangs in {name}"
            return dict(sorted(self._said[name].items()))

    def mean(self, name: str, said: dict[int, Contribution]) -> tuple[torch.Tensor, list[int]]:
        """Return the mean and who is in it; the first who asks averages."""
        with self._changed:
            if name not in self._replies:
                late = self._late(_plain(name))
                chosen = {r: one for r, one in said.items() if r not in late and one.fit}
                nothing = torch.zeros_like(next(iter(said.values())).values), list[int]()
                self._replies[name] = self._average(chosen) if chosen else nothing
            return self._replies[name]

    def _average(self, said: dict[int, Contribution]) -> tuple[torch.Tensor, list[int]]:
        first = next(iter(said.values()))
        mean, codec, reply = torch.zeros_like(first.values), first.codec, first.codec.reply
        for start, stop in chunk_bounds(mean.numel()):
            if stop > start:
                terms = [(one.weight, roundtrip(codec, one.values[start:stop])) for one in said.values()]
                back = functools.partial(reply.decode, elements=stop - start)
                average = weighted_mean(terms)
                mean[start:stop] = back(
                    self.residuals.encode(first.stream, start, average, reply, reply.encode_view, back)
                )
        return mean, sorted(said)


class RoomExchange(Exchange):
    """One member's end."""

    engine = "room"

    def __init__(self, room: Room, rank: int) -> None:
        self.rank = rank
        self.traffic = Traffic()
        self._room = room

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self._room.members))

    @property
    def is_newcomer(self) -> bool:
        return False

    @property
    def anchor_wanted(self) -> bool:
        return False

    def _start_mean(
        self, name: str, values: torch.Tensor, weight: float, codec: Codec, flags: bytes, stream: str
    ) -> Pending[MeanResult]:
        own = Contribution.of(name, values.detach().clone(), weight, codec, flags, stream)
        return Later(lambda: self._mean(name, own))

    def _mean(self, name: str, own: Contribution) -> MeanResult:
        said = self._room.meet(name, self.rank, own)
        mean, among = self._room.mean(name, said)
        return MeanResult(
            mean.clone(),
            sum(said[rank].weight for rank in among),
            tuple(said),
            () if self.rank in among else ((0, mean.numel()),),
            tuple(rank for rank, one in said.items() if not one.fit),
            joined([said[rank].flags for rank in among], len(own.flags)),
            own.fit,
        )

    def _start_gather(self, name: str, payload: bytes) -> Pending[dict[int, bytes]]:
        return Finished(self._room.meet(name, self.rank, payload))

    def residual(self, stream: str, elements: int) -> torch.Tensor | None:
        return self._room.residuals.part(stream, 0, elements) if self.rank == 0 else None

    def restore_residual(self, stream: str, values: torch.Tensor) -> None:
        self._room.residuals.restore(stream, 0, values)

    def publish_anchor(self, anchor: Anchor) -> None:
        raise NotImplementedError

    def fetch_anchor(self, timeout: float = 0.0) -> Anchor:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Later:
    """A mean that is formed when it is waited for: all start theirs in one order."""

    def __init__(self, form: Callable[[], MeanResult]) -> None:
        self._form = form

    def wait(self, timeout: float | None = None) -> MeanResult:
        return self._form()

    def done(self) -> bool:
        return False


def together(
    members: int, body: Callable[[RoomExchange], Any], late: Late = lambda name: ()
) -> tuple[dict[int, Any], Room]:
    """Let every member of a group do ``body``, a thread each; return their results by rank.

    What a member raises is its result.
    """
    room, found = Room(members, late), dict[int, Any]()

    def do(rank: int) -> None:
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
