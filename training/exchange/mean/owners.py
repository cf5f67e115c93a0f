"""The weighted mean by owners, over a :class:`~training.exchange.mean.mesh.Mesh`.

Every member owns a shard of the vector. Contributions to it go to its owner encoded; the owner decodes them, averages
in fp32 **in rank order** (:func:`~training.exchange.base.weighted_mean`), encodes the outcome and sends it to all. All
pieces begin on a multiple of the codec's block, so a shard's bounds change no bit: members hold the same mean for every
choice of shards, including a single owner of everything (a star). What the owner's encoding loses stays with the owner
(:class:`~training.exchange.residuals.MeanResiduals`).

Weight, flags and whether the values are finite follow the first piece. An owner that finds non-finite values leaves
them out and names their sender to all.

A small vector is averaged in one round instead (:class:`OneRoundMean`): the same arithmetic, the same bits.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from profiles.quantities import figure_text
from training.exchange.base import LARGEST_WEIGHT, Contribution, MeanResult, combine_flags, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, EncodedVector, is_short
from training.exchange.links.link import PeerLost
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.outcomes import (
    OperationResult,
    apply_outcome,
    as_tensor,
    decode_outcome,
    describe_operation,
    description_crc,
    encoded_piece,
    float_buffer,
    outcome_tail,
)
from training.exchange.mean.reduction import AT_ONCE, Reduction
from training.exchange.residuals import MeanEncoder, MeanResiduals

_PIECES, _PIECES_OF_UNEQUAL = 16, 48
"""Pieces of the widest shard. If shards differ, a slow member waits with every piece for the outcome of it, so they are
smaller (docs/inside/performance-lab.md)."""
_MIN_PIECE = 65_536
"""Minimum elements of a piece: each costs a message."""
_TAIL = struct.Struct("<dIQ?")
"""Weight, which operation it is, how many results the sender has, and whether its values are non-finite."""


def shard_bounds(elements: int, shards: Mapping[int, float], block: int) -> dict[int, tuple[int, int]]:
    """Cut a vector into the members' shards, on multiples of ``block``.

    Args:
        shards: how much each member owns, by rank, relative to one another; 0 or more, not all 0.

    Returns:
        Start and stop by rank, ascending and without gaps.
    """
    blocks, total, bounds, before, start = -(-elements // block), math.fsum(shards.values()), {}, 0.0, 0
    for rank in sorted(shards):
        before += shards[rank]
        stop = min(round(blocks * before / total) * block, elements)
        bounds[rank] = (start, stop)
        start = stop
    bounds[max(shards)] = (bounds[max(shards)][0], elements)
    return bounds


def shards_of(declared: Mapping[int, float], members: Sequence[int]) -> dict[int, float]:
    """Return how much each member owns: 1 unless declared, and for all if no member would own anything."""
    shards = {rank: declared.get(rank, 1.0) for rank in members}
    return shards if any(shards.values()) else dict.fromkeys(shards, 1.0)


@dataclass(frozen=True)
class _ContributionMetadata:
    """What follows the values of a contribution."""

    weight: float
    full: int
    non_finite: bool
    flags: bytes


class _MeanBase:
    """Contributions to a mean of some members of a mesh, and its outcome.

    Until the mean is final, the contribution and the residuals stay as they are, so that it can be repeated on another
    mesh.
    """

    def __init__(
        self, mesh: Mesh, contribution: Contribution, residuals: MeanResiduals, members: Sequence[int]
    ) -> None:
        self._mesh, self._contribution, self._codec = mesh, contribution, contribution.codec
        self.members = tuple(members)
        self.peers = [rank for rank in self.members if rank != mesh.rank]
        self.encoder = MeanEncoder(residuals, contribution.stream, contribution.codec.reply)
        """Of this member's shard of the mean."""
        self._description = describe_operation("mean", contribution.name, contribution)
        self._description_crc = description_crc(self._description)
        self._tail = memoryview(
            _TAIL.pack(contribution.weight, self._description_crc, mesh.full, not contribution.is_finite)
            + contribution.flags
        )
        self._metadata = {
            mesh.rank: _ContributionMetadata(
                contribution.weight, mesh.full, not contribution.is_finite, contribution.flags
            )
        }
        self._outcome_tail_bytes = len(outcome_tail(0.0, self.members, (), (), contribution.flags))

    def _note_settled(self) -> None:
        """Note which results all members have; call it when all contributions have arrived. What is kept of them for
        others can be used again."""
        if len(self.members) == len(self._mesh.members):
            self._mesh.on_settled(min(metadata.full for metadata in self._metadata.values()))

    def _open(self, rank: int, message: memoryview) -> memoryview:
        """Read the metadata of a contribution, and return its encoded values."""
        split = len(message) - len(self._tail)
        if split < 0:
            raise self._lost(rank, f"it sent {len(message)} bytes in '{self._contribution.name}', which are too few")
        weight, crc, full, non_finite = _TAIL.unpack_from(message, split)
        if crc != self._description_crc:
            raise self._lost(rank, f"it is at another exchange than {self._description} of this machine")
        if not 0.0 <= weight <= LARGEST_WEIGHT:
            raise self._lost(
                rank, f"it gave its values in '{self._contribution.name}' the weight {figure_text(weight)}"
            )
        self._metadata[rank] = _ContributionMetadata(weight, full, non_finite, bytes(message[split + _TAIL.size :]))
        return message[:split]

    def _outcome_size(self, elements: int) -> int:
        """Return the maximum size in bytes of a piece's outcome."""
        return (self._codec.reply.max_encoded_bytes(elements) if elements else 0) + self._outcome_tail_bytes

    def _outcome(self, start: int, stop: int, decoded: Mapping[int, torch.Tensor], buffer: memoryview) -> memoryview:
        """Average all contributions to a piece; return the part of ``buffer`` that holds the outcome."""
        reply, stream = self._codec.reply, self._contribution.stream
        into = as_tensor(buffer)
        direct = reply.exact and not stream and stop > start
        mean, contributors, refused = self._mean(
            decoded, into[: 4 * (stop - start)].view(torch.float32) if direct else None
        )
        size = 4 * (stop - start)
        if stop > start and not direct:
            if stream:
                data = self.encoder.encode(start, mean)
                into[: (size := data.numel())] = data
            else:
                size = reply.encode_into(mean, into)
        total = sum(self._metadata[rank].weight for rank in contributors)
        flags = combine_flags([self._metadata[rank].flags for rank in contributors], len(self._contribution.flags))
        tail = outcome_tail(total, self.members, contributors, refused, flags)
        buffer[size : size + len(tail)] = tail
        return buffer[: size + len(tail)]

    def _mean(
        self, decoded: Mapping[int, torch.Tensor], out: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """Return the mean of a piece, the ranks in it, and the ranks left out because their values are not finite."""
        own_rank, contributors = self._mesh.rank, [rank for rank in self.members if not self._metadata[rank].non_finite]
        while True:
            terms = [(self._metadata[rank].weight, decoded[rank]) for rank in contributors]
            mean = weighted_mean(terms, out) if terms else torch.zeros_like(decoded[own_rank])
            # Non-finite values show in the mean, unless their weight is 0.
            weightless = [rank for rank in contributors if self._metadata[rank].weight == 0.0]
            suspects = weightless if self._codec.carries(mean) else contributors
            refused = [rank for rank in suspects if rank != own_rank and not self._codec.carries(decoded[rank])]
            if not refused:
                break
            contributors = [rank for rank in contributors if rank not in refused]
        if not terms and out is not None:
            mean = out.zero_()
        return mean, contributors, [rank for rank in self.members if rank not in contributors]

    def _decode(self, rank: int, data: memoryview, elements: int) -> torch.Tensor:
        """Return the decoded values of a contribution; they may share memory with ``data``."""
        try:
            return self._codec.decode(as_tensor(data), elements) if elements else torch.empty(0)
        except (ValueError, RuntimeError, IndexError) as error:
            raise self._lost(rank, f"its values in '{self._contribution.name}' cannot be read: {error}") from error

    def _lost(self, rank: int, why: str) -> PeerLost:
        """Return the error that names the member at fault: the link whose thread finds it may be another's."""
        return PeerLost(rank, self._mesh.names[rank], why)


class OwnedMean(_MeanBase, Reduction):
    """One weighted mean by owners.

    Args:
        contribution: this member's.
        shards: see :func:`shard_bounds`; its keys are the members that take part.
    """

    def __init__(
        self, mesh: Mesh, contribution: Contribution, residuals: MeanResiduals, shards: Mapping[int, float]
    ) -> None:
        super().__init__(mesh, contribution, residuals, sorted(shards))
        elements = contribution.elements
        self._bounds = shard_bounds(elements, shards, self._codec.block)
        widest = max(stop - start for start, stop in self._bounds.values())
        pieces = _PIECES if len(set(shards.values())) == 1 else _PIECES_OF_UNEQUAL
        step = min(CHUNK_ELEMENTS, max(_MIN_PIECE, widest // pieces))
        self._step = max(self._codec.block, step // self._codec.block * self._codec.block)
        # An empty vector still has weight and flags: its last owner sends one empty piece.
        self.pieces = {rank: -(-(stop - start) // self._step) for rank, (start, stop) in self._bounds.items()}
        if not any(self.pieces.values()):
            self.pieces[max(self.pieces)] = 1
        start, stop = self._bounds[mesh.rank]
        self._max_message_bytes = self._codec.max_encoded_bytes(min(self._step, max(stop - start, 1))) + len(self._tail)
        self._buffers: dict[tuple[int, int], memoryview] = {}
        """Contributions that are arriving or wait for others, by rank and piece."""
        self._shards: dict[int, memoryview] = {}
        """Buffer of the outcomes of each owner's shard."""
        self._outcomes: dict[tuple[int, int], memoryview] = {}
        """Buffers of outcomes, then the outcomes, by owner and piece."""
        self._result: torch.Tensor | None = None
        """The mean as far as it is known, allocated with its first piece, since other operations may precede this one.
        For long vectors it is written over the contribution at the end instead, to save memory."""
        self._decodes_at_once = contribution.vector is None and (contribution.is_borrowed or 4 * elements <= AT_ONCE)
        self._lock = threading.Lock()

    def outcome(self) -> OperationResult:
        """Return what all owners have sent; call it when the operation is complete."""
        pieces = ((*self._piece(*key), self._outcomes[key]) for key in sorted(self._outcomes))
        return OperationResult(self.members, tuple(pieces))

    def complete(self, outcome: OperationResult, into: EncodedVector | None = None) -> MeanResult:
        """Return the mean; call it when the operation is complete. ``into`` takes it encoded."""
        self.encoder.settle()
        contribution = self._contribution if self._result is None else replace(self._contribution, values=self._result)
        return apply_outcome(contribution, self._mesh.rank, outcome, decode=self._result is None, into=into)

    # --------------------------------------------------------------------------------------------------- contributions

    def _piece(self, owner: int, piece: int) -> tuple[int, int]:
        start, stop = self._bounds[owner]
        return min(start + piece * self._step, stop), min(start + (piece + 1) * self._step, stop)

    def _encoded(self, owner: int, piece: int) -> torch.Tensor:
        start, stop = self._piece(owner, piece)
        return encoded_piece(self._contribution, start, stop) if stop > start else as_tensor(memoryview(b""))

    def contribution(self, owner: int, piece: int) -> Sequence[memoryview]:
        data = self._encoded(owner, piece).numpy().data
        return (data,) if piece else (data, self._tail)

    def contribution_buffer(self, rank: int, piece: int) -> memoryview:
        buffer = self._buffers[rank, piece] = self._mesh.buffer_pool.take(self._max_message_bytes)
        return buffer

    def reduce_piece(self, piece: int, sizes: Mapping[int, int]) -> memoryview:
        start, stop = self._piece(self._mesh.rank, piece)
        decoded = {}
        for rank in self.members:
            if rank == self._mesh.rank:
                data = self._encoded(rank, piece).numpy().data
            else:
                message = self._buffers.pop((rank, piece))[: sizes[rank]]
                data = message if piece else self._open(rank, message)
            decoded[rank] = self._decode(rank, data, stop - start)
        if not piece:
            self._note_settled()
        outcome = self._outcome(start, stop, decoded, self.outcome_buffer(self._mesh.rank, piece))
        self.take(self._mesh.rank, piece, len(outcome))
        return outcome

    # -------------------------------------------------------------------------------------------------------- outcomes

    def outcome_buffer(self, owner: int, piece: int) -> memoryview:
        start, stop = self._piece(owner, piece)
        stride = -(-self._outcome_size(self._step) // 64) * 64  # aligned for every number format
        if owner not in self._shards:
            last_start, last_stop = self._piece(owner, self.pieces[owner] - 1)
            size = (self.pieces[owner] - 1) * stride + self._outcome_size(last_stop - last_start)
            self._shards[owner] = self._mesh.buffer_pool.take(size)
        begin = piece * stride
        buffer = self._outcomes[owner, piece] = self._shards[owner][begin : begin + self._outcome_size(stop - start)]
        return buffer

    def take(self, owner: int, piece: int, size: int) -> None:
        message = self._outcomes[owner, piece] = self._outcomes[owner, piece][:size]
        start, stop = self._piece(owner, piece)
        if self._decodes_at_once and stop > start:  # while it is in the cache
            with self._lock:
                if self._result is None:
                    self._result = float_buffer(self._mesh.buffer_pool, self._contribution.elements)
            data = message[: max(size - self._outcome_tail_bytes, 0)]
            decode_outcome(self._contribution, data, start, stop, self._result)


class OneRoundMean(_MeanBase):
    """One weighted mean in one round: every member sends its contribution to all, and all average them.

    Every member computes the same outcome, byte for byte, so a lost member is handled as in a mean by owners. No member
    could keep what encoding the mean loses: means of a stream go by owners.
    """

    def __init__(
        self, mesh: Mesh, contribution: Contribution, residuals: MeanResiduals, members: Sequence[int]
    ) -> None:
        super().__init__(mesh, contribution, residuals, members)
        self._elements = contribution.elements
        size = self._codec.max_encoded_bytes(self._elements) if self._elements else 0
        self.message = mesh.buffer_pool.take(size + len(self._tail))
        encoded = self._encode_into(as_tensor(self.message)) if self._elements else 0
        self.message[encoded : encoded + len(self._tail)] = self._tail
        self.message = self.message[: encoded + len(self._tail)]
        self.buffers = {peer: mesh.buffer_pool.take(size + len(self._tail)) for peer in self.peers}
        self._decoded = {mesh.rank: self._decode(mesh.rank, self.message[:encoded], self._elements)}

    def _encode_into(self, buffer: torch.Tensor) -> int:
        if self._contribution.vector is None:
            return self._codec.encode_into(self._contribution.values, buffer)
        data = self._contribution.vector.read(0, self._elements)
        buffer[: data.numel()] = data
        return data.numel()

    def note_received(self, rank: int, size: int) -> None:
        """Record that a contribution of ``size`` bytes has arrived."""
        self._decoded[rank] = self._decode(rank, self._open(rank, self.buffers[rank][:size]), self._elements)

    def outcome(self) -> OperationResult:
        """Return the mean in the form that can be handed on; call it when all contributions have arrived."""
        self._note_settled()
        buffer = memoryview(bytearray(self._outcome_size(self._elements)))
        return OperationResult(
            self.members, ((0, self._elements, self._outcome(0, self._elements, self._decoded, buffer)),)
        )

    def complete(self, outcome: OperationResult, into: EncodedVector | None = None) -> MeanResult:
        """Return the mean; ``into`` takes it encoded."""
        contribution = replace(self._contribution, values=torch.empty_like(self._contribution.values))
        return apply_outcome(contribution, self._mesh.rank, outcome, into=into)


def takes_one_round(contribution: Contribution, members: int) -> bool:
    """Return whether a mean goes in one round: it is short, and needs no residual, which only its owner can keep."""
    return not contribution.stream and is_short(contribution.codec, contribution.elements, members)
