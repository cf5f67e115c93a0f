"""The exchange seam: what a strategy may ask of the other members.

Both engines (the hub and ``torch.distributed``) implement :class:`Exchange` with the same arithmetic - contributions
are decoded, averaged in fp32 **in rank order** by :func:`weighted_mean`, and encoded again - so a strategy gives the
same bits on both.

Operations have a ``name`` that must be equal on all members and unique in the run, for example
``"grad/120/3"``. Members start operations in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:
    from training.exchange.codecs import Codec

T = TypeVar("T", covariant=True)


class ExchangeError(Exception):
    """The exchange cannot go on; the message says which machine or what is missing and what to do."""


class ExchangeTimeout(ExchangeError):
    """An operation passed its deadline."""


class Pending(Protocol, Generic[T]):
    """A started operation."""

    def wait(self, timeout: float | None = None) -> T:
        """Block until the result is there.

        Raises:
            ExchangeTimeout: the deadline passed.
            ExchangeError: the operation can not finish.
        """
        ...

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        ...


@dataclass(frozen=True)
class MeanResult:
    """Outcome of a weighted mean."""

    mean: torch.Tensor
    """Flat fp32, on the device of the contribution; the same bits on every member."""
    weight: float
    """Sum of the contributors' weights."""
    members: tuple[int, ...]
    """Ranks of the live members when the operation closed, ascending."""
    included: bool
    """Whether this member's own contribution is in the mean (it is not when it came after the deadline)."""


@dataclass
class Traffic:
    """What one member has exchanged since the start. Bytes count payload plus our own headers and encryption-free
    framing; seconds are wall time."""

    bytes_sent: int = 0
    bytes_received: int = 0
    wait_seconds: float = 0.0
    """The training stood still in ``wait``."""
    transfer_seconds: float = 0.0
    """At least one operation was under way."""

    def since(self, before: Traffic) -> Traffic:
        """Return the difference to an earlier copy."""
        return Traffic(
            self.bytes_sent - before.bytes_sent,
            self.bytes_received - before.bytes_received,
            self.wait_seconds - before.wait_seconds,
            self.transfer_seconds - before.transfer_seconds,
        )

    def copy(self) -> Traffic:
        return Traffic(self.bytes_sent, self.bytes_received, self.wait_seconds, self.transfer_seconds)


@dataclass(frozen=True)
class Anchor:
    """What a newcomer needs to go on with the others: named tensors and a JSON document (step, cursor, ...)."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, object] = field(default_factory=dict)


class Exchange(ABC):
    """One member's end of the group."""

    engine: str
    rank: int
    traffic: Traffic

    @property
    @abstractmethod
    def members(self) -> tuple[int, ...]:
        """Ranks of the live members as of the last closed operation, ascending; contains this member."""

    @property
    @abstractmethod
    def is_newcomer(self) -> bool:
        """Whether this member joined a group that was already training and must :meth:`fetch_anchor` first."""

    @property
    @abstractmethod
    def anchor_wanted(self) -> bool:
        """Whether a newcomer waits for an anchor and this member is the one to publish it."""

    @abstractmethod
    def start_mean(self, name: str, values: torch.Tensor, weight: float, codec: Codec) -> Pending[MeanResult]:
        """Start the weighted mean of flat fp32 ``values`` over the live members.

        The contribution is copied before this returns, so ``values`` may be overwritten at once.
        ``weight`` is 0 or more; a member with weight 0 still takes part and gets the result.
        """

    @abstractmethod
    def start_gather(self, name: str, payload: bytes) -> Pending[dict[int, bytes]]:
        """Start collecting one small payload (at most 4 MiB) of every live member, keyed by rank."""

    @abstractmethod
    def publish_anchor(self, anchor: Anchor) -> None:
        """Hand the state after the last synchronisation to the waiting newcomers, who then are members."""

    @abstractmethod
    def fetch_anchor(self, timeout: float | None = None) -> Anchor:
        """Wait for the anchor as a newcomer."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group with a good-bye. Idempotent."""

    def mean(self, name: str, values: torch.Tensor, weight: float, codec: Codec) -> MeanResult:
        """Blocking form of :meth:`start_mean`."""
        return self.start_mean(name, values, weight, codec).wait()

    def gather(self, name: str, payload: bytes) -> dict[int, bytes]:
        """Blocking form of :meth:`start_gather`."""
        return self.start_gather(name, payload).wait()


def weighted_mean(contributions: Sequence[tuple[float, torch.Tensor]]) -> torch.Tensor:
    """Return ``sum(w_i x_i) / sum(w_i)`` of flat fp32 tensors, in the order given.

    Multiplication and addition stay separate operations: each is correctly rounded by IEEE 754, so every operating
    system and processor gives the same bits. All weights 0 give zeros.
    """
    total = sum(weight for weight, _ in contributions)
    if total <= 0.0:
        return torch.zeros_like(contributions[0][1])
    mean: torch.Tensor | None = None
    for weight, values in contributions:
        if weight == 0.0:
            continue
        scaled = values * (weight / total)
        mean = scaled if mean is None else mean.add_(scaled)
    assert mean is not None
    return mean
