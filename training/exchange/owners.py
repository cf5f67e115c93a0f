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

import itertools
import math
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from training.exchange.base import ExchangeError, MeanResult, joined, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.mesh import Mesh, Reduction
from training.exchange.wire import LARGEST_WEIGHT

_LEAST_PIECE = 16_384
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


@dataclass
class _Outcome:
    """What the pieces of one mean said beside their values."""

    weight: float = 0.0
    contributors: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    flags: bytes = b""
    left_out: list[tuple[int, int]] = field(default_factory=list)


class MeanReduction(Reduction):
    """One weighted mean.

    Args:
        name: equal on all members; a member that is elsewhere is found out.
        values: flat fp32 of the CPU, of this operation alone; it becomes the mean.
        flags: beside the values; as many bytes on all members.
        stream: which residuals go with the mean.
        shares: see :func:`share_bounds`.
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        values: torch.Tensor,
        weight: float,
        codec: Codec,
        flags: bytes,
        stream: str,
        residuals: MeanResiduals,
        shares: Mapping[int, float],
    ) -> None:
        self._fit = codec.carries(values)
        if not self._fit:
            values.zero_()
            weight, flags = 0.0, bytes(len(flags))
        self._mesh, self._name, self._values, self._codec = mesh, name, values, codec
        self._stream, self._residuals = stream, residuals
        self._weight, self._flags = weight, flags
        self._tail = _TAIL.pack(weight, zlib.crc32(name.encode()), not self._fit) + flags
        self._bounds = share_bounds(values.numel(), shares, codec.block)
        widest = max(stop - start for start, stop in self._bounds.values())
        step = min(CHUNK_ELEMENTS, max(_LEAST_PIECE, widest // 16))
        self._step = max(codec.block, step // codec.block * codec.block)
        # A vector that is empty still tells weight and flags: its last owner sends one empty piece.
        self.pieces = {rank: -(-(stop - start) // self._step) for rank, (start, stop) in self._bounds.items()}
        self.pieces[max(self.pieces)] = max(1, self.pieces[max(self.pieces)])
        start, stop = self._bounds[mesh.rank]
        self._room = max(codec.max_encoded_bytes(min(self._step, max(stop - start, 1))) + len(self._tail), 1)
        self._rooms = {peer: mesh.rooms.take(self._room * self.pieces[mesh.rank]) for peer in mesh.peers}
        self._replies: dict[tuple[int, int], bytearray] = {}
        self._bits = -(-len(mesh.members) // 8)
        self._told = _Outcome()
        self._lock = threading.Lock()

    def result(self) -> MeanResult:
        """Return the mean; when the operation is complete."""
        told = self._told
        return MeanResult(
            self._values,
            told.weight,
            tuple(self._mesh.members),
            tuple(sorted(told.left_out)),
            tuple(sorted(told.refused)),
            told.flags,
            self._fit,
        )

    # --------------------------------------------------------------------------------------------------- contributions

    def _piece(self, owner: int, piece: int) -> tuple[int, int]:
        start, stop = self._bounds[owner]
        return min(start + piece * self._step, stop), min(start + (piece + 1) * self._step, stop)

    def _encoded(self, owner: int, piece: int) -> torch.Tensor:
        start, stop = self._piece(owner, piece)
        return self._codec.encode_view(self._values[start:stop]) if stop > start else torch.empty(0, dtype=torch.uint8)

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
                data, weight, unfit, said = self._encoded(rank, piece), self._weight, not self._fit, self._flags
            else:
                data, weight, unfit, said = self._open(rank, self.room(rank, piece)[: sizes[rank]])
            decoded = self._codec.decode(data, stop - start) if stop > start else torch.empty(0)
            if unfit or not self._codec.carries(decoded):
                refused.append(rank)
                continue
            terms.append((weight, decoded))
            contributors.append(rank)
            flags.append(said)
        mean = weighted_mean(terms) if terms else torch.zeros(stop - start)
        reply = self._codec.reply
        payload = torch.empty(0, dtype=torch.uint8)
        if stop > start:
            payload = self._residuals.encode(
                self._stream, start, mean, reply, reply.encode_view, lambda data: reply.decode(data, stop - start)
            )
        head = _OUTCOME.pack(sum(weight for weight, _ in terms)) + self._mask(contributors) + self._mask(refused)
        outcome = bytearray(b"".join((payload.numpy().data, head, joined(flags, len(self._flags)))))
        self.take_bytes(self._mesh.rank, piece, memoryview(outcome))
        return memoryview(outcome)

    def _open(self, rank: int, message: memoryview) -> tuple[torch.Tensor, float, bool, bytes]:
        """Split a contribution into its bytes, weight, whether it is unfit, and flags."""
        split = len(message) - len(self._tail)
        if split < 0:
            raise ExchangeError(f"{self._who(rank)} sent {len(message)} bytes in '{self._name}', which are too few")
        weight, tag, unfit = _TAIL.unpack_from(message, split)
        if tag != zlib.crc32(self._name.encode()):
            raise ExchangeError(f"{self._who(rank)} is at another exchange than '{self._name}' of this machine")
        if not 0.0 <= weight <= LARGEST_WEIGHT:
            raise ExchangeError(f"{self._who(rank)} gave its values in '{self._name}' the weight {weight:g}")
        flags = bytes(message[split + _TAIL.size :])
        return _tensor(message[:split]), weight, unfit, flags

    # -------------------------------------------------------------------------------------------------------- outcomes

    def outcome_room(self, owner: int, piece: int) -> memoryview:
        start, stop = self._piece(owner, piece)
        size = self._codec.reply.max_encoded_bytes(stop - start) if stop > start else 0
        room = bytearray(size + _OUTCOME.size + 2 * self._bits + len(self._flags))
        self._replies[owner, piece] = room
        return memoryview(room)

    def take(self, owner: int, piece: int, size: int) -> None:
        self.take_bytes(owner, piece, memoryview(self._replies.pop((owner, piece)))[:size])

    def take_bytes(self, owner: int, piece: int, message: memoryview) -> None:
        """Put the outcome of a piece into the mean."""
        start, stop = self._piece(owner, piece)
        split = len(message) - _OUTCOME.size - 2 * self._bits - len(self._flags)
        if split < 0:
            raise ExchangeError(f"{self._who(owner)} sent an outcome of {len(message)} bytes, which are too few")
        if stop > start:
            self._values[start:stop] = self._codec.reply.decode(_tensor(message[:split]), stop - start)
        (weight,) = _OUTCOME.unpack_from(message, split)
        masks = bytes(message[split + _OUTCOME.size :])
        contributors = self._ranks(masks[: self._bits])
        with self._lock:
            told = self._told
            told.refused |= self._ranks(masks[self._bits : 2 * self._bits])
            if self._mesh.rank not in contributors and stop > start:
                told.left_out.append((start, stop))
            if (owner, piece) == self._first():
                told.weight, told.contributors, told.flags = weight, contributors, masks[2 * self._bits :]

    def end(self) -> None:
        self._mesh.rooms.give_back(list(self._rooms.values()), 4 * len(self._mesh.members))

    def _first(self) -> tuple[int, int]:
        """The piece whose word on weight and flags counts: the same on all members."""
        return next(rank for rank in self._mesh.members if self.pieces[rank]), 0

    def _mask(self, ranks: Sequence[int]) -> bytes:
        bits = sum(1 << self._mesh.members.index(rank) for rank in ranks)
        return bits.to_bytes(self._bits, "little")

    def _ranks(self, mask: bytes) -> set[int]:
        bits = int.from_bytes(mask, "little")
        return set(
            itertools.compress(self._mesh.members, (bits >> place & 1 for place in range(len(self._mesh.members))))
        )

    def _who(self, rank: int) -> str:
        return self._mesh.names[rank]


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
