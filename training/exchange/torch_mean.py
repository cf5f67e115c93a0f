"""The collective operations of the torch engine: weighted mean and gather.

The mean of ``n`` members is a reduce-scatter and an all-gather (Thakur et al. 2005, "Optimization of Collective
Communication Operations in MPICH", section 4.5): each member averages its slice of the vector and sends the outcome to
the others, ``2 (n - 1) / n`` of the payload in each direction. A stock all-reduce adds in ring order and only whole
numbers of a dtype; here the owner of a slice adds decoded contributions in rank order, as the hub does, so the bits are
the hub's. A vector travels in pieces whose arithmetic overlaps the transfer of the next ones.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from training.exchange.base import ExchangeError, weighted_mean
from training.exchange.codecs import Codec
from training.exchange.torch_wire import Wire

SMALL = 16_384
"""Payloads up to this many bytes take one round instead of two: there a round trip costs more than the bytes."""
_DEPTH = 3
"""Pieces under way at the same time."""
_TRAILER = struct.Struct("<dQ")
_LENGTH = struct.Struct("<IQ")
_INLINE = 500
"""Bytes of a gathered payload that travel with its length."""

Stages = Iterator[None]
"""One piece: yields after the start of each transfer, and waits for it when it is continued."""


def slice_bounds(elements: int, parts: int, block: int) -> list[int]:
    """Return ``parts + 1`` bounds that cut a vector into nearly equal slices of whole blocks."""
    size = math.ceil(math.ceil(elements / parts) / block) * block
    return [min(part * size, elements) for part in range(parts + 1)]


def run_stages(pieces: Iterable[Stages]) -> None:
    """Carry pieces out, :data:`_DEPTH` at a time, starting transfers in the same order on every member."""
    under_way: deque[Stages] = deque()
    for piece in pieces:
        _continue(piece, under_way)
        if len(under_way) >= _DEPTH:
            _continue(under_way.popleft(), under_way)
    while under_way:
        _continue(under_way.popleft(), under_way)


def _continue(piece: Stages, under_way: deque[Stages]) -> None:
    try:
        next(piece)
    except StopIteration:
        return
    under_way.append(piece)


class WeightedMean:
    """One weighted mean.

    Args:
        wire: way to the other members.
        name: equal on all members; a member that is elsewhere is found out.
        values: flat fp32 on the wire's device.
        weight: of this member's contribution.
        codec: of the contributions.
    """

    def __init__(self, wire: Wire, name: str, values: torch.Tensor, weight: float, codec: Codec) -> None:
        self._wire = wire
        self._name = name
        self._tag = zlib.crc32(name.encode())
        self._values = values
        self._weight = weight
        self._codec = codec
        self._trailer = _bytes(_TRAILER.pack(weight, self._tag), wire)
        self.mean = torch.empty_like(values)
        self.total_weight = 0.0

    def run(self) -> None:
        """Exchange; then :attr:`mean` and :attr:`total_weight` are there."""
        run_stages(self._pieces())

    def _pieces(self) -> Iterator[Stages]:
        n, elements = self._wire.world_size, self._values.numel()
        # Two members send the same bytes either way. A sparse reply is the union of all contributions: as large as
        # they are together, so that there is nothing to gain from a second round.
        one_round = n == 2 or self._codec.reply is not self._codec or self._size(elements) <= SMALL
        step = self._wire.piece_elements * (1 if one_round else n)
        stages = self._one_round if one_round else self._two_rounds
        for start in range(0, max(elements, 1), step):
            yield stages(start, min(start + step, elements))

    def _one_round(self, start: int, stop: int) -> Stages:
        """Everybody sends all to all and averages for itself."""
        frame = self._frame(start, stop)
        peers = len(self._wire.peers)
        transfer = self._wire.exchange([frame] * peers, [frame.numel()] * peers)
        yield
        mean = self._average(frame, transfer.wait(), stop - start)
        reply = self._codec.reply
        self.mean[start:stop] = self._wire.decode(reply, self._encode(reply, mean), stop - start)

    def _two_rounds(self, start: int, stop: int) -> Stages:
        """The owner of a slice averages it and sends the outcome to everybody."""
        wire, codec = self._wire, self._codec
        offsets = slice_bounds(stop - start, wire.world_size, codec.block)
        slices = [(start + a, start + b) for a, b in itertools.pairwise(offsets)]
        own = slices[wire.rank]
        frame = self._frame(*own)
        transfer = wire.exchange([self._frame(*slices[peer]) for peer in wire.peers], [frame.numel()] * len(wire.peers))
        yield
        outcome = self._encode(codec, self._average(frame, transfer.wait(), own[1] - own[0]))
        sizes = [self._size(b - a) for a, b in slices]
        transfer = wire.exchange([outcome] * len(wire.peers), [sizes[peer] for peer in wire.peers])
        yield
        received = transfer.wait()
        received.insert(wire.rank, outcome)
        for (a, b), data in zip(slices, received):
            self.mean[a:b] = wire.decode(codec, data, b - a)

    def _size(self, elements: int) -> int:
        return self._codec.max_encoded_bytes(elements) if elements else 0

    def _encode(self, codec: Codec, values: torch.Tensor) -> torch.Tensor:
        if values.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._wire.device)
        return self._wire.encode(codec, values)

    def _frame(self, start: int, stop: int) -> torch.Tensor:
        return torch.cat([self._encode(self._codec, self._values[start:stop]), self._trailer])

    def _average(self, own: torch.Tensor, others: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
        frames = dict(zip(self._wire.peers, others))
        frames[self._wire.rank] = own
        contributions = [self._open(rank, frames[rank], elements) for rank in sorted(frames)]
        self.total_weight = sum(weight for weight, _ in contributions)
        return weighted_mean(contributions)

    def _open(self, rank: int, frame: torch.Tensor, elements: int) -> tuple[float, torch.Tensor]:
        payload, trailer = frame[: -_TRAILER.size], frame[-_TRAILER.size :]
        weight, tag = _TRAILER.unpack(trailer.cpu().numpy().tobytes())
        if tag != self._tag:
            raise ExchangeError(f"rank {rank} is at another exchange than '{self._name}' of rank {self._wire.rank}")
        if not elements:
            return weight, torch.empty(0, device=self._wire.device)
        return weight, self._wire.decode(self._codec, payload, elements)


def gather(wire: Wire, name: str, payload: bytes) -> dict[int, bytes]:
    """Return the payload of every member by rank; a second round only where one is long."""
    tag = zlib.crc32(name.encode())
    head = _LENGTH.pack(len(payload), tag) + payload[:_INLINE].ljust(_INLINE, b"\0")
    peers = len(wire.peers)
    heads = wire.exchange([_bytes(head, wire)] * peers, [len(head)] * peers).wait()
    lengths: dict[int, int] = {wire.rank: len(payload)}
    gathered = {wire.rank: payload}
    for peer, data in zip(wire.peers, heads):
        raw = data.cpu().numpy().tobytes()
        lengths[peer], other = _LENGTH.unpack_from(raw)
        if other != tag:
            raise ExchangeError(f"rank {peer} is at another exchange than '{name}' of rank {wire.rank}")
        gathered[peer] = raw[_LENGTH.size : _LENGTH.size + lengths[peer]]
    rest = {rank: max(0, length - _INLINE) for rank, length in lengths.items()}
    if any(rest.values()):
        tails = wire.exchange([_bytes(payload[_INLINE:], wire)] * peers, [rest[peer] for peer in wire.peers]).wait()
        for peer, data in zip(wire.peers, tails):
            gathered[peer] += data.cpu().numpy().tobytes()
    return dict(sorted(gathered.items()))


def _bytes(data: bytes, wire: Wire) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=wire.device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(wire.device)
