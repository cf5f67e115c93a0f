"""What a hub must know of its group, and one of its members as the hub sees it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from training.exchange import wire
from training.exchange.outbox import Outbox
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
