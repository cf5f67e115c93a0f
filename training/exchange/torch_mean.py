"""The collective operations of the torch engine: weighted mean and gather, over frames whose bytes are counted.

The mean of ``n`` members is a reduce-scatter and an all-gather (Thakur et al. 2005, "Optimization of Collective
Communication Operations in MPICH", section 4.5): each member averages its slice of the vector and sends the outcome to
the others, ``2 (n - 1) / n`` of the payload in each direction. A stock all-reduce adds in ring order and only whole
numbers of a dtype; here the owner of a slice adds decoded contributions in rank order, as on the mesh: the bits are the
same. A vector travels in pieces whose arithmetic overlaps the transfer of the next ones.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.exchange.base import LARGEST_WEIGHT, MAX_GATHER_BYTES, ExchangeError, joined, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, CastCodec, Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.operations import Meter


@dataclass(frozen=True)
class Transfer:
    """Frames under way."""

    work: dist.Work
    received: torch.Tensor
    sizes: list[int]

    def wait(self) -> list[torch.Tensor]:
        """Return one frame of every peer, in rank order.

        Raises:
            RuntimeError: a peer is gone, or the group's time-out passed.
        """
        self.work.wait()
        return list(torch.split(self.received, self.sizes))


class Wire:
    """The process group as a way for bytes.

    All transfers are ``all_to_all_single`` with unequal splits: the one collective that gloo and NCCL both carry out
    without copies of their own, whose size on the wire is exactly what is given to it.

    Args:
        device: CPU for gloo, this member's GPU for NCCL.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, meter: Meter) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.peers = [peer for peer in range(world_size) if peer != rank]
        self.meter = meter

    def piece_elements(self, codec: Codec) -> int:
        """Elements of one frame: small enough to overlap its arithmetic with the next transfer on a CPU.

        A collective ends with its slowest flow. Between more than two members smaller frames leave links idle for a
        shorter time then; two have one flow each way, and each frame costs processor time (docs/performance.md).
        """
        usual = CHUNK_ELEMENTS if self.world_size < 3 else CHUNK_ELEMENTS // 2
        return max(usual, codec.block) if self.device.type == "cpu" else 256 * CHUNK_ELEMENTS

    def exchange(self, frames: Sequence[torch.Tensor], receive: Sequence[int]) -> Transfer:
        """Start to send one frame to every peer and to receive one of ``receive`` bytes of each, in rank order."""
        data = torch.cat(list(frames)) if len(frames) != 1 else frames[0]
        received = torch.empty(sum(receive), dtype=torch.uint8, device=self.device)
        send = [frame.numel() for frame in frames]
        work = dist.all_to_all_single(received, data, self._splits(receive), self._splits(send), async_op=True)
        assert work is not None
        self.meter.sent(sum(send))
        self.meter.received(sum(receive))
        return Transfer(work, received, list(receive))

    def encode(self, codec: Codec, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` of this wire's device as bytes on it; fp32 shares memory with ``values``."""
        if values.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if isinstance(codec, CastCodec):
            return values.to(codec.dtype).view(torch.uint8)
        return codec.encode(values).to(self.device)

    def decode(self, codec: Codec, data: torch.Tensor, elements: int) -> torch.Tensor:
        """Return the fp32 values of :meth:`encode`; may share memory with ``data``."""
        if elements == 0:
            return torch.empty(0, device=self.device)
        if isinstance(codec, CastCodec) and data.is_cuda:
            return data.clone().view(codec.dtype).to(torch.float32)
        return codec.decode(data.to("cpu"), elements).to(self.device)

    def size(self, codec: Codec, elements: int) -> int:
        """Return the bytes of :meth:`encode`."""
        return codec.max_encoded_bytes(elements) if elements else 0

    def _splits(self, sizes: Sequence[int]) -> list[int]:
        return [*sizes[: self.rank], 0, *sizes[self.rank :]]


SMALL = 16_384
"""Payloads up to this many bytes take one round instead of two: there a round trip costs more than the bytes."""
_DEPTH = 3
"""Pieces under way at the same time."""
_HEAD = struct.Struct("<dQ?")
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
        values: flat fp32 on the wire's device; replaced by the mean.
        weight: of this member's contribution.
        codec: of the contributions.
        flags: beside the values.
        stream: which residuals go with the mean.
        residuals: what encoding the slices that this member averages has lost.
    """

    def __init__(
        self,
        wire: Wire,
        name: str,
        values: torch.Tensor,
        weight: float,
        codec: Codec,
        flags: bytes,
        stream: str,
        residuals: MeanResiduals,
    ) -> None:
        self._wire = wire
        self._name = name
        self._values = values
        self._codec = codec
        self._stream = stream
        self._residuals = residuals
        fit = codec.carries(values)
        if not fit:
            values.zero_()
            weight, flags = 0.0, bytes(len(flags))
        self._head = _HEAD.pack(weight, zlib.crc32(name.encode()), not fit) + flags
        self._weights = {wire.rank: weight}
        self._refused = set() if fit else {wire.rank}
        self._flags = [flags]

    @property
    def total_weight(self) -> float:
        return sum(self._weights[rank] for rank in sorted(self._weights))

    @property
    def refused(self) -> tuple[int, ...]:
        """Ranks whose values are not finite."""
        return tuple(sorted(self._refused))

    @property
    def flags(self) -> bytes:
        return joined(self._flags, len(self._flags[0]))

    def run(self) -> None:
        """Exchange, and put the mean into ``values``."""
        run_stages(self._pieces())

    def _pieces(self) -> Iterator[Stages]:
        n, elements = self._wire.world_size, self._values.numel()
        step = self._wire.piece_elements(self._codec) * (1 if self._takes_one_round() else n)
        stages = self._one_round if self._takes_one_round() else self._two_rounds
        for start in range(0, max(elements, 1), step):
            yield stages(start, min(start + step, elements))

    def _takes_one_round(self) -> bool:
        """Whether everybody sends all to all. Two members send the same bytes either way, and two rounds only pay off
        if they share out the work of a block codec. A sparse reply is the union of all contributions, as large as
        they are together: there is nothing to gain from a second round."""
        if self._codec.reply is not self._codec or self._wire.size(self._codec, self._values.numel()) <= SMALL:
            return True
        return self._wire.world_size == 2 and isinstance(self._codec, CastCodec)

    def _one_round(self, start: int, stop: int) -> Stages:
        """Everybody averages for itself."""
        wire, reply = self._wire, self._codec.reply
        own = wire.encode(self._codec, self._values[start:stop])
        contributions = self._exchange([own] * len(wire.peers), own.numel(), first=start == 0)
        yield
        mean = self._average(own, contributions(), stop - start)
        self._values[start:stop] = wire.decode(reply, self._encode(mean, start), stop - start)

    def _two_rounds(self, start: int, stop: int) -> Stages:
        """The owner of a slice averages it and sends the outcome to everybody."""
        wire, codec = self._wire, self._codec
        offsets = slice_bounds(stop - start, wire.world_size, codec.block)
        slices = [(start + a, start + b) for a, b in itertools.pairwise(offsets)]
        frames = [wire.encode(codec, self._values[a:b]) for a, b in slices]
        own, elements = frames.pop(wire.rank), slices[wire.rank][1] - slices[wire.rank][0]
        contributions = self._exchange(frames, own.numel(), first=start == 0)
        yield
        outcome = self._encode(self._average(own, contributions(), elements), slices[wire.rank][0])
        sizes = [wire.size(codec, b - a) for a, b in slices]
        transfer = wire.exchange([outcome] * len(wire.peers), [sizes[peer] for peer in wire.peers])
        yield
        received = transfer.wait()
        received.insert(wire.rank, outcome)
        for (a, b), data in zip(slices, received):
            self._values[a:b] = wire.decode(codec, data, b - a)

    def _exchange(self, frames: list[torch.Tensor], receive: int, first: bool) -> Callable[[], list[torch.Tensor]]:
        """Start to exchange contributions of ``receive`` bytes; the first ones go with weight and name behind them,
        where they move no number off its alignment."""
        wire = self._wire
        if not first:
            return wire.exchange(frames, [receive] * len(frames)).wait
        head = _bytes(self._head, wire)
        transfer = wire.exchange([torch.cat([frame, head]) for frame in frames], [receive + len(head)] * len(frames))
        return lambda: [self._open(peer, frame) for peer, frame in zip(wire.peers, transfer.wait())]

    def _open(self, peer: int, frame: torch.Tensor) -> torch.Tensor:
        """Note the sender's weight and return the contribution."""
        payload, head = frame[: -len(self._head)], _raw(frame[-len(self._head) :])
        weight, tag, not_finite = _HEAD.unpack_from(head)
        if not 0.0 <= weight <= LARGEST_WEIGHT:
            raise ExchangeError(f"rank {peer} gave its values in '{self._name}' the impossible weight {weight:g}")
        self._weights[peer] = weight
        if not_finite:
            self._refused.add(peer)
        self._flags.append(head[_HEAD.size :])
        if tag != zlib.crc32(self._name.encode()):
            raise ExchangeError(f"rank {peer} is at another exchange than '{self._name}' of rank {self._wire.rank}")
        return payload

    def _average(self, own: torch.Tensor, others: Sequence[torch.Tensor], elements: int) -> torch.Tensor:
        frames = list(others)
        frames.insert(self._wire.rank, own)
        decoded = [self._wire.decode(self._codec, frame, elements) for frame in frames]
        for rank, values in enumerate(decoded):
            if not self._codec.carries(values):  # a sound member sees to it itself, and none can be done without here
                raise ExchangeError(f"rank {rank} sent values that are not finite in '{self._name}'")
        return weighted_mean([(self._weights[rank], values) for rank, values in enumerate(decoded)])

    def _encode(self, mean: torch.Tensor, start: int) -> torch.Tensor:
        """Return a piece of the mean that begins at ``start`` of the vector as it goes to the members."""
        wire, codec, elements = self._wire, self._codec.reply, mean.numel()
        return self._residuals.encode(
            self._stream,
            start,
            mean,
            codec,
            lambda values: wire.encode(codec, values),
            lambda data: wire.decode(codec, data, elements),
        )


def gather(wire: Wire, name: str, payload: bytes) -> dict[int, bytes]:
    """Return the payload of every member by rank; a second round only where one is long."""
    tag = zlib.crc32(name.encode())
    head = _LENGTH.pack(len(payload), tag) + payload[:_INLINE].ljust(_INLINE, b"\0")
    peers = len(wire.peers)
    heads = wire.exchange([_bytes(head, wire)] * peers, [len(head)] * peers).wait()
    lengths: dict[int, int] = {wire.rank: len(payload)}
    gathered = {wire.rank: payload}
    for peer, data in zip(wire.peers, heads):
        raw = _raw(data)
        lengths[peer], other = _LENGTH.unpack_from(raw)
        if other != tag:
            raise ExchangeError(f"rank {peer} is at another exchange than '{name}' of rank {wire.rank}")
        if lengths[peer] > MAX_GATHER_BYTES:
            raise ExchangeError(f"rank {peer} has {lengths[peer]} bytes in '{name}', more than may be gathered")
        gathered[peer] = raw[_LENGTH.size : _LENGTH.size + lengths[peer]]
    rest = {rank: max(0, length - _INLINE) for rank, length in lengths.items()}
    if any(rest.values()):
        tails = wire.exchange([_bytes(payload[_INLINE:], wire)] * peers, [rest[peer] for peer in wire.peers]).wait()
        for peer, data in zip(wire.peers, tails):
            gathered[peer] += _raw(data)
    return dict(sorted(gathered.items()))


def _bytes(data: bytes, wire: Wire) -> torch.Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=wire.device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(wire.device)


def _raw(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()
