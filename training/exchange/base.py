"""The exchange seam: the operations through which a strategy communicates with the other members.

Both engines (the mesh and ``torch.distributed``) implement :class:`Exchange` with the same arithmetic: contributions
are decoded, averaged in fp32 **in rank order** by :func:`weighted_mean`, and encoded again. A strategy therefore gets
the same bits from both.

All members start the same operations in the same order. The exchange numbers them, and the number is part of the name
on the wire: no name can collide, however the caller names an operation, and members at different operations never
match. A newcomer continues with the number of its joining state.

Non-finite values (NaN, infinity, or beyond the codec's range) never reach a mean: the member that has them takes part
with weight 0, and all members learn its rank.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from training.lazy import torch

if TYPE_CHECKING:
    from training.exchange.codecs import Codec, EncodedVector
    from training.exchange.halting import Halting
    from training.exchange.residuals import Residual

Group = tuple[int, ...]
"""Ranks that take part in an operation, ascending; empty: all members."""
T = TypeVar("T", covariant=True)
V = TypeVar("V")


STANDSTILL = 1800.0
"""Seconds without a byte and without a result after which a wait ends. A working coordinator acts earlier: it gives up
an operation after 900 s. While bytes move, a wait goes on, however slow they are."""
JOINING_DEADLINE = 6 * 3600.0
"""Seconds a newcomer waits to join: the next synchronisation may be hundreds of slow steps away, and the run may be
paused."""
MAX_GATHER_BYTES = 4 << 20
"""Largest payload of one member in a gather."""
LARGEST_WEIGHT = 1e18
MAX_FLAGS = 2048
"""Largest number of flag bytes that accompany a mean."""
_FIXED = "this engine accepts no new members while it trains; use engine = mesh for that"
_TILE = 65_536
"""Elements that stay in a processor's cache while several passes are made over them."""


class ExchangeError(Exception):
    """The exchange cannot continue; the message names the machine or what is missing, and what to do."""


class ExchangeDropped(ExchangeError):
    """The other members continued without this one; it can return as a newcomer."""


class ExchangeTimeout(ExchangeError):
    """An operation did not finish by its deadline."""


class Pending(Protocol, Generic[T]):
    """Handle of a started operation."""

    def wait(self, timeout: float | None = None) -> T:
        """Block until the result is there.

        Args:
            timeout: seconds; ``None`` waits as long as bytes move or operations end, and :data:`STANDSTILL` seconds
                more.

        Raises:
            ExchangeTimeout: the deadline passed.
            ExchangeError: the operation cannot finish.
        """
        ...


@dataclass(frozen=True)
class Contribution:
    """What one member gives to a mean."""

    name: str
    """Name of the operation, equal on all members; a member at another operation is detected."""
    values: torch.Tensor
    """Flat fp32."""
    weight: float
    codec: Codec
    flags: bytes = b""
    """Bytes that accompany the values; the same number on all members."""
    stream: str = ""
    """Name of the residuals that belong to the mean."""
    group: Group = ()
    is_finite: bool = True
    """Whether the values are numbers that the codec can carry; if not, values, weight and flags are zero."""
    is_borrowed: bool = False
    """Whether the values are the caller's, who waits for the mean: they must not be written."""
    vector: EncodedVector | None = None
    """The values as a device has encoded them, if it has: :attr:`values` are empty then."""

    @property
    def elements(self) -> int:
        """Number of values."""
        return self.values.numel() if self.vector is None else self.vector.elements

    def checked(self, is_finite: bool | None = None) -> Contribution:
        """Return the contribution as it is sent; ``is_finite``, if already known, saves the check."""
        if self.vector is not None or (self.codec.carries(self.values) if is_finite is None else is_finite):
            return self
        return replace(
            self, values=torch.zeros_like(self.values), weight=0.0, flags=bytes(len(self.flags)), is_finite=False
        )


@dataclass(frozen=True)
class MeanResult:
    """Outcome of a weighted mean."""

    mean: torch.Tensor
    """Flat fp32, on the device of the contribution; the same bits on every member."""
    weight: float
    """Sum of the contributors' weights; 0 if no member had anything to average, and then the mean is meaningless."""
    members: tuple[int, ...]
    """Ranks of the live members when the operation closed, ascending."""
    left_out: tuple[tuple[int, int], ...] = ()
    """Start and stop of the parts of this member's own contribution that are not in the mean: they arrived after the
    deadline, or were not finite."""
    refused: tuple[int, ...] = ()
    """Ranks whose contribution was not finite, ascending; the same on all members."""
    flags: bytes = b""
    """The contributors' flags, combined by bitwise "or"."""
    is_finite: bool = True
    """Whether this member's own contribution was finite; if not, none of it was sent."""

    @property
    def included(self) -> bool:
        """Whether this member's whole contribution is in the mean."""
        return not self.left_out


@dataclass
class Traffic:
    """What one member has exchanged since the start. Bytes are payload plus our own headers, without the overhead of
    encryption; seconds are wall time."""

    bytes_sent: int = 0
    bytes_received: int = 0
    wait_seconds: float = 0.0
    """Time the training was blocked in ``wait``."""
    transfer_seconds: float = 0.0
    """Time at least one operation was in flight."""

    def since(self, before: Traffic) -> Traffic:
        """Return the difference to an earlier copy."""
        return Traffic(*map(operator.sub, astuple(self), astuple(before)))

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum with that of another connection."""
        return Traffic(*map(operator.add, astuple(self), astuple(other)))

    def copy(self) -> Traffic:
        return replace(self)


@dataclass(frozen=True)
class JoiningState:
    """What a newcomer needs to continue with the others: named tensors and a JSON document (step, cursor, ...)."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    operations: int = 0
    """Number of operations the publisher had started; set by the exchange."""


Confirm = Callable[[JoiningState | None], bool]
"""Takes a joining state, or ``None`` where that did not arrive; returns whether to join with it."""


class Exchange(ABC):
    """One member's endpoint of the group."""

    engine: str
    shares_process: ClassVar[bool] = False
    """Whether other members take turns with this one in its process, so that nothing may run in the background."""
    sends_encoded: bool = False
    """Whether a vector that is encoded already is sent as it is; else it is decoded, and encoded again."""
    rank: int
    traffic: Traffic
    operations: int = 0
    """Operations started so far; equal on all members between two operations."""
    halting: Halting | None = None
    """How members agree on a last step when no supervisor names one."""

    @property
    @abstractmethod
    def members(self) -> tuple[int, ...]:
        """Ranks of the live members as of the last closed operation, ascending; contains this member."""

    @property
    def is_newcomer(self) -> bool:
        """Whether this member joined a group that was already training and must :meth:`fetch_state` first."""
        return False

    @property
    def must_publish_state(self) -> bool:
        """Whether a newcomer waits for a joining state that this member has to publish."""
        return False

    def note_agreed(self, members: tuple[int, ...]) -> None:
        """Note on which members the devices of this one have agreed, where each has a part of the model and an exchange
        of its own: these are :attr:`members` until the next call."""

    def expect_model(self, elements: int) -> None:
        """Announce the length of the longest vector, before the first operation; a member whose length differs from the
        majority's is dropped."""

    def start_mean(
        self,
        name: str,
        values: torch.Tensor | EncodedVector,
        weight: float,
        codec: Codec,
        flags: bytes = b"",
        stream: str = "",
        members: Collection[int] | None = None,
    ) -> Pending[MeanResult]:
        """Start the weighted mean of flat fp32 ``values`` over the live members.

        The contribution is copied before this returns, so ``values`` may be overwritten at once.

        Args:
            values: a vector that ``codec`` has encoded is not copied; its mean is fp32, where that is wanted.
            weight: 0 or more; a member with weight 0 still takes part and gets the result.
            flags: a few bytes that travel with the values, unchanged; the same number on all members, at most
                :data:`MAX_FLAGS`.
            stream: name of a sequence of means with error feedback: what encoding one of them lost is added to the
                next. Empty: it is dropped.
            members: ranks that average with one another, this one among them. All members start the operation, each
                with its own group, possibly alone in it; groups are disjoint and run side by side. Derive them from
                what all members know (:attr:`members` after an operation of all, a seed); lost members are left out
                automatically.

        Raises:
            ValueError: this member is not in ``members``.
        """
        name, group = self._next_operation(name, members)
        vector: EncodedVector | None = None
        if not isinstance(values, torch.Tensor):
            vector, values = (values, torch.empty(0)) if self.sends_encoded else (None, values.decode())
        return self._start_mean(Contribution(name, values, weight, codec, flags, stream, group, vector=vector))

    def start_gather(
        self, name: str, payload: bytes, members: Collection[int] | None = None
    ) -> Pending[dict[int, bytes]]:
        """Start collecting one small payload (at most 4 MiB) of every live member, or of ``members``, keyed by rank."""
        name, group = self._next_operation(name, members)
        return self._start_gather(name, payload, group)

    @abstractmethod
    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        """Start the mean of an unchecked ``contribution``; ``waits``: the caller waits for the result at once."""

    @abstractmethod
    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]: ...

    def residual(self, stream: str) -> Residual | None:
        """Return the part of the loss from encoding the means of ``stream`` that this member keeps, for its snapshot.

        ``None`` where other members keep it, nothing is lost, or the group has ended. Not a collective operation: one
        member may call it alone, while no mean of the stream is in flight.
        """
        return None

    def restore_residual(self, stream: str, residual: Residual) -> None:
        """Restore what :meth:`residual` returned, before the first mean of the stream.

        The member keeps what lies in its shard; what lies in another owner's shard is lost, once.
        """

    def publish_state(self, joining: JoiningState) -> None:
        """Hand the state after the last synchronisation to the waiting newcomers, which thereby become members."""
        raise ExchangeError(_FIXED)

    def fetch_state(self, timeout: float = JOINING_DEADLINE, confirm: Confirm | None = None) -> JoiningState:
        """Wait for the joining state, as a newcomer.

        Args:
            confirm: called once for each state that was handed over, whether it arrived or not, before this member
                joins; where it returns false, another one is waited for.

        Raises:
            ExchangeTimeout: none arrived within ``timeout`` seconds.
            ExchangeError: no member is left to publish one, or the engine accepts no newcomers.
        """
        raise ExchangeError(_FIXED)

    def give_up(self, why: str) -> None:
        """End operations in flight, and all later ones, with an :class:`ExchangeError`; callable from any thread."""

    def close(self) -> None:
        """Leave the group in an orderly way. Idempotent."""

    def mean(
        self,
        name: str,
        values: torch.Tensor,
        weight: float,
        codec: Codec,
        flags: bytes = b"",
        stream: str = "",
        members: Collection[int] | None = None,
    ) -> MeanResult:
        """Blocking form of :meth:`start_mean`."""
        name, group = self._next_operation(name, members)
        return self._start_mean(Contribution(name, values, weight, codec, flags, stream, group), True).wait()

    def gather(self, name: str, payload: bytes, members: Collection[int] | None = None) -> dict[int, bytes]:
        """Blocking form of :meth:`start_gather`."""
        name, group = self._next_operation(name, members)
        return self._start_gather(name, payload, group, True).wait()

    def _next_operation(self, name: str, members: Collection[int] | None) -> tuple[str, Group]:
        """Return name and group of the next operation."""
        if members is not None and self.rank not in members:
            raise ValueError(f"rank {self.rank} starts an operation of {sorted(members)}, which it is none of")
        self.operations += 1
        group = tuple(sorted(set(members or ())))
        among = f" among {', '.join(map(str, group))}" if group else ""
        return f"{name}{among}:{self.operations}", group


class LazyResult(Generic[V]):
    """An operation whose result is computed when it is first waited for."""

    def __init__(self, form: Callable[[], V]) -> None:
        self._form = functools.cache(form)

    def wait(self, timeout: float | None = None) -> V:
        return self._form()


class SoloExchange(Exchange):
    """A group of one: every mean is the member's own contribution, unencoded; nothing is sent."""

    engine = "solo"

    def __init__(self) -> None:
        self.rank = 0
        self.traffic = Traffic()

    @property
    def members(self) -> tuple[int, ...]:
        return (0,)

    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        result = MeanResult(contribution.values.clone(), contribution.weight, (0,), flags=contribution.flags)
        return LazyResult(lambda: result)

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        return LazyResult(lambda: {0: payload})


def weighted_mean(contributions: Sequence[tuple[float, torch.Tensor]], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``sum(w_i x_i) / sum(w_i)`` of flat fp32 tensors, in the order given.

    Multiplication and addition stay separate operations: each is correctly rounded by IEEE 754, so every operating
    system and processor gives the same bits. If all weights are 0, so is the mean.

    Args:
        out: destination of the mean; must not be one of the tensors.
    """
    total = sum(weight for weight, _ in contributions)
    mean = torch.empty_like(contributions[0][1]) if out is None else out
    if total <= 0.0:
        return mean.zero_()
    (first_factor, first_values), *other_terms = [
        (weight / total, values) for weight, values in contributions if weight != 0.0
    ]
    size = mean.numel()
    tile_size = min(size, _TILE) if mean.device.type == "cpu" else size
    scaled = torch.empty(tile_size if other_terms else 0, device=mean.device)
    for start in range(0, size, max(tile_size, 1)):
        tile = torch.mul(first_values[start : start + tile_size], first_factor, out=mean[start : start + tile_size])
        for factor, values in other_terms:
            tile.add_(torch.mul(values[start : start + tile_size], factor, out=scaled[: tile.numel()]))
    return mean


def combine_flags(flags: Sequence[bytes], size: int) -> bytes:
    """Return flags of ``size`` bytes each combined by bitwise "or"."""
    return functools.reduce(lambda left, right: bytes(map(operator.or_, left, right)), flags, bytes(size))
