"""What a hub must know of its group, and one of its members as the hub sees it, with what waits to be sent to it."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from training.exchange import wire
from training.exchange.wire import BytesChunk, HubLimits, WireError

MOST_NOT_FINITE = 3
"""Operations in which a member may send NaN or infinity before it is dropped."""


class HubConfig(BaseModel):
    """What a hub must know; also the document of ``--config``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str = Field(min_length=1, max_length=128)
    names: tuple[str, ...] = Field(min_length=1, max_length=wire.MAX_RANKS)
    """Machine names by rank; as many as there are members."""
    spare: int = Field(0, ge=0, le=64)
    """Ranks after those of ``names`` for members that come while the run is on."""
    local: frozenset[int] = frozenset()
    """Ranks on the hub's own machine: they are not lost by silence, but with their connections."""
    elements: int | None = Field(None, ge=0)
    """Elements of the longest vector of one exchange; ``None``: what the members say of their model."""
    address: str = "127.0.0.1"
    """Literal address to listen on; ``0.0.0.0`` or ``::`` for all."""
    port: int = Field(0, ge=0, le=65535)
    certificates: Path | None = None
    """Folder ``hub/`` of the run's certificates; without one the traffic goes in clear, on loopback only."""
    quorum: float = Field(1.0, ge=0, le=1)
    round_deadline: float = Field(60.0, gt=0)
    give_up: float = Field(900.0, gt=0)
    """Seconds after which a round that cannot close fails."""
    lease: float = Field(5.0, gt=0)
    """Seconds of silence after which a member is lost."""

    @property
    def limits(self) -> HubLimits | None:
        """What one member may make the hub hold; ``None``: that follows the model, of which the members tell."""
        return None if self.elements is None else HubLimits.for_model(self.elements, len(self.names) + self.spare)


@dataclass(eq=False)
class Seat:
    """One connected member."""

    rank: int
    name: str
    control: Outbox
    session: int = field(default_factory=lambda: secrets.randbits(63) + 1)
    bulk: Outbox | None = None
    newcomer: bool = False
    live: bool = False
    silent: float = 0.0
    """Seconds since the last sign of life."""
    pieces: list[memoryview] = field(default_factory=list)
    """Of the gather payload that is coming in; one at a time, in order."""
    arriving: str | None = None
    not_finite: list[str] = field(default_factory=list)
    """Operations in which it sent NaN or infinity."""

    def note_not_finite(self, name: str) -> bool:
        """Note that it sent NaN or infinity in an operation; return whether that is news."""
        if name in self.not_finite:
            return False
        self.not_finite.append(name)
        return True

    def allow(self, limits: HubLimits) -> None:
        """Bound what may wait for it; a newcomer is sent an anchor besides."""
        if self.bulk is not None:
            self.bulk.limit = limits.queued_bytes + (limits.anchor_bytes if self.newcomer else 0)

    def collect(self, frame: BytesChunk) -> list[memoryview] | None:
        """Add one piece; return all of them when the payload is whole.

        Raises:
            WireError: pieces come out of order.
        """
        if frame.chunk == 0 and self.arriving is None:
            self.arriving = f"{type(frame).__name__}/{frame.name}/{frame.size}"
        if self.arriving != f"{type(frame).__name__}/{frame.name}/{frame.size}" or frame.chunk != len(self.pieces):
            raise WireError("pieces of a payload out of order")
        self.pieces.append(frame.payload)
        if len(self.pieces) < frame.chunks:
            return None
        pieces, self.pieces, self.arriving = self.pieces, [], None
        return pieces


class Outbox:
    """A queue of messages for one stream; iterate it to send. Safe to use from several threads.

    Args:
        limit: bytes that may wait; :meth:`put` beyond it returns ``False`` and nothing is added.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self.reason = ""
        """Why the stream was ended; empty for a normal end."""

    def put(self, message: bytes) -> bool:
        """Add a message. Returns whether there was room; a closed outbox swallows everything."""
        with self._changed:
            if self._closed:
                return True
            if self._bytes + len(message) > self.limit:
                return False
            self._messages.append(message)
            self._bytes += len(message)
            self._changed.notify()
            return True

    def close(self, reason: str = "") -> None:
        """End the stream: with a ``reason`` at once, without one after what waits. The first reason stays."""
        with self._changed:
            self.reason = self.reason or reason
            self._closed = True
            if self.reason:
                self._messages.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                while not self._messages and not self._closed:
                    self._changed.wait()
                if not self._messages:
                    return
                message = self._messages.popleft()
                self._bytes -= len(message)
            yield message


class ModelSize:
    """The members' word on their model.

    Every member says what it has before its first operation, and nothing closes without one that has not spoken yet: it
    may have a large model to build. The first mean settles it: the size that most have is right, and where that is
    none, the one of the lowest rank, whose weights all members begin with.

    Args:
        limits: known beforehand; ``None``: they follow the model.
        ranks: members there may be.
    """

    def __init__(self, limits: HubLimits | None, ranks: int) -> None:
        self._ranks = ranks
        self._settled = limits is not None
        self._known = limits is not None
        self._said: dict[int, int] = {}
        self.limits = limits or HubLimits.for_model(0, ranks)

    def say(self, rank: int, elements: int) -> None:
        """Take a member's word.

        Raises:
            WireError: it has said so before, or it has another model than the others.
        """
        if rank in self._said:
            raise WireError("a model came twice")
        self._said[rank] = elements
        if self._settled and not self._known and elements != self.limits.elements:
            raise WireError(self._another(elements))

    def require(self, rank: int) -> None:
        """Raise ``WireError`` where a member begins an operation and has not reported its model."""
        if not self._known and rank not in self._said:
            raise WireError("an operation before its model is known")

    def settle(self, live: list[int]) -> dict[int, str] | None:
        """Let the limits follow the model from the first mean on.

        Returns:
            Who has another model, and what to tell it; ``None`` where it was settled before.

        Raises:
            WireError: not all have spoken yet.
        """
        if self._settled:
            return None
        if self.silent(live):
            raise WireError("a mean before all members have reported their model")
        self._settled = True
        said = {rank: self._said[rank] for rank in live}
        votes = Counter(said.values())
        right = max(said.items(), key=lambda item: (votes[item[1]], -item[0]))[1]
        self.limits = HubLimits.for_model(right, self._ranks)
        return {rank: self._another(elements) for rank, elements in self._said.items() if elements != right}

    def silent(self, live: list[int]) -> list[int]:
        """Return the members that have still to speak before it is settled."""
        return [] if self._settled else [rank for rank in live if rank not in self._said]

    def forget(self, rank: int) -> None:
        """A member is gone."""
        self._said.pop(rank, None)

    def _another(self, elements: int) -> str:
        return f"its model has {elements} numbers to exchange, the others' {self.limits.elements}"
