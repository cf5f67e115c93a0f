"""An exchange among threads of one process: the hub's arithmetic without a transport, and lateness by script."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import torch

from training.exchange import wire
from training.exchange.averaging import averaged
from training.exchange.base import Anchor, Exchange, Finished, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.operations import MeanOperation, Meter
from training.exchange.rounds import Closing, Contribution, Round
from training.exchange.wire import MeanChunk

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
        self._replies: dict[str, list[MeanChunk]] = {}
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

    def mean(self, name: str, said: dict[int, list[MeanChunk]]) -> list[MeanChunk]:
        """Return the chunks of the mean; the first who asks averages."""
        with self._changed:
            if name not in self._replies:
                self._replies[name] = [self._close(name, part, said) for part in range(len(said[0]))]
            return self._replies[name]

    def _close(self, name: str, part: int, said: dict[int, list[MeanChunk]]) -> MeanChunk:
        chunks = {rank: frames[part] for rank, frames in said.items() if rank not in self._late(_plain(name))}
        contributions = tuple((rank, Contribution(chunk.weight, chunk, 0)) for rank, chunk in chunks.items())
        result = averaged(Closing(Round(name, None, 1, 0.0), part, contributions, tuple(said)), self.residuals)
        assert not result.broken and not result.failure
        reply = wire.parse(result.frames[0])
        assert isinstance(reply, MeanChunk)
        return reply


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
        operation = MeanOperation(name, values, weight, codec, self.rank, Meter(), flags, stream)
        own = [wire.parse(frame) for frame in operation.frames()]
        return Later(lambda: self._mean(name, operation, own))

    def _mean(self, name: str, operation: MeanOperation, own: list[Any]) -> MeanResult:
        for chunk in self._room.mean(name, self._room.meet(name, self.rank, own)):
            if operation.receive(chunk):
                operation.finish()
        return operation.wait(0.0)

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
