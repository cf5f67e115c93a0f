"""The weighted mean by owners, over a :class:`~training.exchange.mesh.Mesh`.

Every member owns a share of the vector. Contributions to it go to its owner encoded; the owner decodes them, averages
in fp32 **in rank order** (:func:`~training.exchange.base.weighted_mean`), encodes the outcome and sends it to all. All
pieces begin on a multiple of the codec's block, so a share's bounds change no bit: members hold the same mean for every
choice of shares, one owner with everything (a star) included. What the owner's encoding loses stays with the owner
(:class:`~training.exchange.error_feedback.MeanResiduals`).

Weight, flags and whether the values are numbers at all travel behind each piece. An owner that finds values that are no
numbers leaves them out and names their sender to all.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from training.exchange.base import LARGEST_WEIGHT, ExchangeError, MeanResult, joined, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.mesh import Mesh
from training.exchange.reduction import Reduction

_LEAST_PIECE = 65_536
"""Elements of a piece at least: each costs a message."""
_TAIL = struct.Struct("<dI?")
"""Weight, the operation's name as CRC-32, and whether the sender's values are not numbers."""
_OUTCOME = struct.Struct("<d")
"""Sum of the weights in a piece; ranks follow as bits: those in it, those refused; then the flags."""


def share_bounds(elements: int, shares: Mapping[int, float], block: int) -> dict[int, tuple[int, int]]:
    """Cut a vector into the members' shares, on multiples of ``block``.

    Args:
        shares: how much each member owns, by rank, relative to one another; 0 or more, not all 0.

    Returns:
        Start and stop by rank, ascending and without gaps.
    """
    blocks, total, bounds, before, start = -(-elements // block), math.fsum(shares.values()), {}, 0.0, 0
    for rank in sorted(shares):
        before += shares[rank]
        stop = min(round(blocks * before / total) * block, elements)
        bounds[rank] = (start, stop)
        start = stop
    bounds[max(shares)] = (bounds[max(shares)][0], elements)
    return bounds


@dataclass(frozen=True)
class Contribution:
    """What one member has for a mean.

    Args:
        name: equal on all members; a member that is elsewhere is found out.
        values: flat fp32 of the CPU, of this operation alone; :meth:`MeanReduction.complete` makes it the mean.
        flags: beside the values; as many bytes on all members.
        stream: which residuals go with the mean.
        fit: whether the values are numbers that the codec can carry; if not, they, the weight and the flags are zero.
    """

    name: str
    values: torch.Tensor
    weight: float
    codec: Codec
    flags: bytes = b""
    stream: str = ""
    fit: bool = True

    @classmethod
    def of(
        cls, name: str, values: torch.Tensor, weight: float, codec: Codec, flags: bytes = b"", stream: str = ""
    ) -> Contribution:
        """Look at the values, which are the operation's own from now on."""
        if codec.carries(values):
            return cls(name, values, weight, codec, flags, stream)
        return cls(name, values.zero_(), 0.0, codec, bytes(len(flags)), stream, fit=False)


@dataclass(frozen=True)
class Outcome:
    """The result of an operation as it came: the same bytes on all members, so any of them can hand it to another."""

    members: tuple[int, ...]
    parts: tuple[tuple[int, int, memoryview], ...]
    """Of a mean: start, stop and message of every piece. Of a gather: rank twice, and what it gave."""

    @functools.cached_property
    def size(self) -> int:
        """Bytes of its parts."""
        return sum(len(data) for *_, data in self.parts)

    def to_bytes(self) -> bytes:
        """Return it as it is handed over."""
        head = {"members": self.members, "parts": [[start, stop, len(data)] for start, stop, data in self.parts]}
        return b"".join((json.dumps(head).encode(), b"\n", *(data for *_, data in self.parts)))

    @classmethod
    def from_bytes(cls, data: bytearray) -> Outcome:
        """Read what :meth:`to_bytes` wrote.

        Raises:
            ExchangeError: it is something else.
        """
        try:
            end = data.index(b"\n")
            head = json.loads(data[:end])
            members = tuple(int(rank) for rank in head["members"])
            bounds = [(int(start), int(stop), int(size)) for start, stop, size in head["parts"]]
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            raise ExchangeError(f"a result that was handed over cannot be read: {error}") from error
        if not members or list(members) != sorted(set(members)) or members[0] < 0:
            raise ExchangeError("a result that was handed over cannot be read: its members are none")
        sizes = [size for *_, size in bounds]
        if min(sizes, default=0) < 0 or end + 1 + sum(sizes) != len(data):
            raise ExchangeError("a result that was handed over cannot be read: its parts do not fit its size")
        starts = itertools.accumulate(sizes, initial=end + 1)
        whole = memoryview(data)
        parts = tuple((a, b, whole[at : at + size]) for (a, b, size), at in zip(bounds, starts))
        return cls(members, parts)


def completed(own: Contribution, rank: int, outcome: Outcome) -> MeanResult:
    """Put the outcome of a mean into the place of the contribution, and return what it says to member ``rank``.

    Raises:
        ExchangeError: the outcome is not that of such a contribution.
    """
    weight, flags, refused, left_out, at = 0.0, b"", set[int](), list[tuple[int, int]](), 0
    for number, (start, stop, message) in enumerate(outcome.parts):
        mask = -(-len(outcome.members) // 8)
        split = len(message) - _OUTCOME.size - 2 * mask - len(own.flags)
        if split < 0 or start != at or not start <= stop <= own.values.numel():
            raise ExchangeError(f"the outcome of '{own.name}' is not one of {own.values.numel()} values")
        if stop > start:
            try:
                own.values[start:stop] = own.codec.reply.decode(_tensor(message[:split]), stop - start)
            except (ValueError, RuntimeError, IndexError) as error:
                raise ExchangeError(f"the outcome of '{own.name}' cannot be decoded: {error}") from error
        masks = bytes(message[split + _OUTCOME.size :])
        refused |= _ranks(outcome.members, masks[mask : 2 * mask])
        if rank not in _ranks(outcome.members, masks[:mask]) and stop > start:
            left_out.append((start, stop))
        if not number:
            weight, flags = _OUTCOME.unpack_from(message, split)[0], masks[2 * mask :]
            if not 0.0 <= weight < math.inf:
                raise ExchangeError(f"the outcome of '{own.name}' has the weight {weight:g}")
        at = stop
    if at != own.values.numel() or not outcome.parts:
        raise ExchangeError(f"the outcome of '{own.name}' has {at} of {own.values.numel()} values")
    return MeanResult(own.values, weight, outcome.members, tuple(left_out), tuple(sorted(refused)), flags, own.fit)


class MeanReduction(Reduction):
    """One weighted mean on one mesh. Until :meth:`complete` the contribution stays as it is, so that it can be tried
    again on another mesh; so does what is kept of encoding.

    Args:
        own: this member's contribution.
        shares: see :func:`share_bounds`.
    """

    def __init__(self, mesh: Mesh, own: Contribution, residuals: MeanResiduals, shares: Mapping[int, float]) -> None:
        self._mesh, self._own, self._codec, self._residuals = mesh, own, own.codec, residuals
        self._owed: dict[tuple[str, int], torch.Tensor] = {}
        self._tail = _TAIL.pack(own.weight, zlib.crc32(own.name.encode()), not own.fit) + own.flags
        self._bounds = share_bounds(own.values.numel(), shares, self._codec.block)
        widest = max(stop - start for start, stop in self._bounds.values())
        step = min(CHUNK_ELEMENTS, max(_LEAST_PIECE, widest // 16))
        self._step = max(self._codec.block, step // self._codec.block * self._codec.block)
        # A vector that is empty still tells weight and flags: its last owner sends one empty piece.
        self.pieces = {rank: -(-(stop - start) // self._step) for rank, (start, stop) in self._bounds.items()}
        if not any(self.pieces.values()):
            self.pieces[max(self.pieces)] = 1
        start, stop = self._bounds[mesh.rank]
        self._room = max(self._codec.max_encoded_bytes(min(self._step, max(stop - start, 1))) + len(self._tail), 1)
        self._rooms = {peer: mesh.rooms.take(self._room * self.pieces[mesh.rank]) for peer in mesh.peers}
        self._replies: dict[tuple[int, int], memoryview] = {}
        self._bits = -(-len(mesh.members) // 8)
        self._lock = threading.Lock()

    def outcome(self) -> Outcome:
        """Return what all owners have sent; when the operation is complete."""
        pieces = ((*self._piece(*key), self._replies[key]) for key in sorted(self._replies))
        return Outcome(tuple(self._mesh.members), tuple(pieces))

    def settle(self) -> None:
        """The mean stands: keep what encoding this member's share of it lost."""
        self._residuals.settle(self._own.stream, self._owed)

    def complete(self) -> MeanResult:
        """Put the mean into the place of the contribution; when the operation is complete."""
        self.settle()
        return completed(self._own, self._mesh.rank, self.outcome())

    # --------------------------------------------------------------------------------------------------- contributions

    def _piece(self, owner: int, piece: int) -> tuple[int, int]:
        start, stop = self._bounds[owner]
        return min(start + piece * self._step, stop), min(start + (piece + 1) * self._step, stop)

    def _encoded(self, owner: int, piece: int) -> torch.Tensor:
        start, stop = self._piece(owner, piece)
        return (
            self._codec.encode_view(self._own.values[start:stop]) if stop > start else torch.empty(0, dtype=torch.uint8)
        )

    def contribution(self, owner: int, piece: int) -> memoryview:
        return memoryview(b"".join((self._encoded(owner, piece).numpy().data, self._tail)))

    def room(self, rank: int, piece: int) -> memoryview:
        return memoryview(self._rooms[rank])[piece * self._room : (piece + 1) * self._room]

    def add_up(self, piece: int, sizes: Mapping[int, int]) -> memoryview:
        start, stop = self._piece(self._mesh.rank, piece)
        terms: list[tuple[float, torch.Tensor]] = []
        flags: list[bytes] = []
        contributors, refused = [], []
        for rank in self._mesh.members:
            if rank == self._mesh.rank:
                data, weight, unfit, said = (
                    self._encoded(rank, piece),
                    self._own.weight,
                    not self._own.fit,
                    self._own.flags,
                )
            else:
                data, weight, unfit, said = self._open(rank, self.room(rank, piece)[: sizes[rank]])
            decoded = self._codec.decode(data, stop - start) if stop > start else torch.empty(0)
            if unfit or (rank != self._mesh.rank and not self._codec.carries(decoded)):
                refused.append(rank)
                continue
            terms.append((weight, decoded))
            contributors.append(rank)
            flags.append(said)
        mean = weighted_mean(terms) if terms else torch.zeros(stop - start)
        reply = self._codec.reply
        payload = torch.empty(0, dtype=torch.uint8)
        if stop > start:
            back = functools.partial(reply.decode, elements=stop - start)
            payload = self._residuals.encode(self._own.stream, start, mean, reply, reply.encode_view, back, self._owed)
        head = _OUTCOME.pack(sum(weight for weight, _ in terms)) + self._mask(contributors) + self._mask(refused)
        outcome = memoryview(bytearray(b"".join((payload.numpy().data, head, joined(flags, len(self._own.flags))))))
        with self._lock:
            self._replies[self._mesh.rank, piece] = outcome
        return outcome

    def _open(self, rank: int, message: memoryview) -> tuple[torch.Tensor, float, bool, bytes]:
        """Split a contribution into its bytes, weight, whether it is unfit, and flags."""
        split = len(message) - len(self._tail)
        if split < 0:
            raise ExchangeError(f"{self._who(rank)} sent {len(message)} bytes in '{self._own.name}', which are too few")
        weight, tag, unfit = _TAIL.unpack_from(message, split)
        if tag != zlib.crc32(self._own.name.encode()):
            raise ExchangeError(f"{self._who(rank)} is at another exchange than '{self._own.name}' of this machine")
        if not 0.0 <= weight <= LARGEST_WEIGHT:
            raise ExchangeError(f"{self._who(rank)} gave its values in '{self._own.name}' the weight {weight:g}")
        flags = bytes(message[split + _TAIL.size :])
        return _tensor(message[:split]), weight, unfit, flags

    # -------------------------------------------------------------------------------------------------------- outcomes

    def outcome_room(self, owner: int, piece: int) -> memoryview:
        start, stop = self._piece(owner, piece)
        size = self._codec.reply.max_encoded_bytes(stop - start) if stop > start else 0
        room = memoryview(bytearray(size + _OUTCOME.size + 2 * self._bits + len(self._own.flags)))
        with self._lock:
            self._replies[owner, piece] = room
        return room

    def take(self, owner: int, piece: int, size: int) -> None:
        with self._lock:
            self._replies[owner, piece] = self._replies[owner, piece][:size]

    def end(self) -> None:
        self._mesh.rooms.give_back(list(self._rooms.values()), 4 * len(self._mesh.members))

    def _mask(self, ranks: Sequence[int]) -> bytes:
        bits = sum(1 << self._mesh.members.index(rank) for rank in ranks)
        return bits.to_bytes(self._bits, "little")

    def _who(self, rank: int) -> str:
        return self._mesh.names[rank]


def _ranks(members: Sequence[int], mask: bytes) -> set[int]:
    bits = int.from_bytes(mask, "little")
    return set(itertools.compress(members, (bits >> place & 1 for place in range(len(members)))))


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
