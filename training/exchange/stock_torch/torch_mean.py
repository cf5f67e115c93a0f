"""A member of engine ``nccl``, and its weighted mean: by owners as on the mesh, over a process group of stock torch.

A stock all-reduce adds in ring order and supports only numbers of one dtype; here the owner of a shard adds decoded
contributions in rank order and sends the outcome to all (:mod:`training.exchange.mean.owners`): the bits equal the
mesh's, and so does the outcome that members hand to one another after a loss. Shards travel in pieces whose arithmetic
overlaps the transfer of the next ones.
"""

from __future__ import annotations

import functools
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from profiles.quantities import figure_text
from training.exchange.base import (
    LARGEST_WEIGHT,
    Contribution,
    ExchangeError,
    MeanResult,
    Pending,
    combine_flags,
    weighted_mean,
)
from training.exchange.codecs import CHUNK_ELEMENTS, SparseCodec
from training.exchange.group.join_config import JoinConfig
from training.exchange.links.link import PeerLost
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.mean.mesh_operations import Ended, MeshOperation, Meter
from training.exchange.mean.outcomes import (
    OperationResult,
    apply_outcome,
    describe_operation,
    description_crc,
    outcome_tail,
)
from training.exchange.mean.owners import shard_bounds, shards_of
from training.exchange.mean.reduction import AT_ONCE
from training.exchange.mean.transfer import PendingTransfer
from training.exchange.residuals import MeanEncoder, MeanResiduals
from training.exchange.staging import decode_there, encode_there
from training.exchange.stock_torch.torch_group import NcclFailed, TorchMesh, UnusableMember

_TRIES = 2
"""Attempts with NCCL: which member is at fault is not always known in time."""
_DEPTH = 3
"""Pieces in flight at the same time."""
_DEVICE_PIECE = 64 * CHUNK_ELEMENTS
"""Elements of a piece on a GPU."""
_HEAD = struct.Struct("<dIQ?H")
"""Weight, CRC-32 of the description, how many results the sender has, whether its values are non-finite, bytes of
flags."""
Frame = tuple[int, int, torch.Tensor]
"""Start, stop and data of a piece of an outcome."""


class Attempt:
    """One mean on one mesh; the contribution stays unchanged.

    Args:
        on_device: returns the contribution on a device; called in the group's thread.
        encoder: of this member's part of the mean.
    """

    def __init__(
        self,
        mesh: TorchMesh,
        on_device: Callable[[torch.device], Contribution],
        encoder: MeanEncoder,
        shards: Mapping[int, float],
    ) -> None:
        assert mesh.group is not None
        self._mesh, self._group, self._on_device = mesh, mesh.group, on_device
        self.encoder, self._shards = encoder, shards
        self._full = mesh.full
        self._frames: list[Frame] = []
        self._weights: dict[int, float] = {}
        self._flags: list[bytes] = []
        self._refused: list[int] = []

    def run(self) -> None:
        """Exchange contributions and outcomes.

        Raises:
            RuntimeError: the group is broken.
            PeerLost: a member sent something invalid.
        """
        contribution = self._contribution = self._on_device(self._group.device)
        shards = shards_of(self._shards, self._mesh.members)
        bounds = self._bounds = shard_bounds(contribution.values.numel(), shards, contribution.codec.block)
        self._exchange_headers()
        default_step = CHUNK_ELEMENTS if len(bounds) < 3 else CHUNK_ELEMENTS // 2
        step = max(default_step, contribution.codec.block) if self._group.device.type == "cpu" else _DEVICE_PIECE
        under_way: deque[Iterator[None]] = deque()
        for start in range(0, max(stop - start for start, stop in bounds.values()), step):
            piece = self._piece(start, step)
            next(piece)
            under_way.append(piece)
            if len(under_way) >= _DEPTH:
                self._resume(under_way)
        while under_way:
            self._resume(under_way)

    def result(self) -> tuple[MeanResult, OperationResult]:
        """Write the mean over the contribution's values and keep what encoding it lost; return it, and the outcome that
        can be handed to others."""
        contribution, members, flags = (
            self._contribution,
            tuple(self._mesh.members),
            combine_flags(self._flags, len(self._contribution.flags)),
        )
        weight = sum(self._weights[rank] for rank in members)
        self.encoder.settle()
        for start, stop, data in self._frames:
            contribution.values[start:stop] = decode_there(contribution.codec, data, stop - start)
        if contribution.values.is_cuda:
            torch.cuda.current_stream(contribution.values.device).synchronize()
        left_out = () if contribution.is_finite else ((0, contribution.values.numel()),)
        result = MeanResult(
            contribution.values, weight, members, left_out, tuple(self._refused), flags, contribution.is_finite
        )
        contributors = [rank for rank in members if rank not in self._refused]
        tail = outcome_tail(weight, members, contributors, self._refused, flags)
        return result, FrameOutcome(members, sorted(self._frames, key=lambda frame: frame[0]), tail)

    def _exchange_headers(self) -> None:
        """Exchange weights and flags, and check that all members are at the same mean: torch does not."""
        contribution, mesh, group = self._contribution, self._mesh, self._group
        description = describe_operation("mean", contribution.name, contribution)
        tag = description_crc(f"{description} {sorted(self._bounds.items())}")
        padding = bytes(-len(contribution.flags) % 64)
        header = (
            _HEAD.pack(contribution.weight, tag, self._full, not contribution.is_finite, len(contribution.flags))
            + contribution.flags
            + padding
        )
        data = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(group.device)
        headers = group.exchange([data] * len(mesh.peers), [len(header)] * len(mesh.peers)).wait()
        headers.insert(group.group_rank, data)
        settled = self._full
        for rank, reply in zip(mesh.members, headers):
            raw = reply.cpu().numpy().tobytes()
            weight, peer_tag, full, non_finite, flags = _HEAD.unpack_from(raw)
            if peer_tag != tag or flags != len(contribution.flags):
                raise PeerLost(rank, mesh.names[rank], f"it is at another exchange than {description} of this machine")
            if not 0.0 <= weight <= LARGEST_WEIGHT:
                raise PeerLost(
                    rank,
                    mesh.names[rank],
                    f"it gave its values in '{contribution.name}' the weight {figure_text(weight)}",
                )
            settled = min(settled, full)
            self._weights[rank] = 0.0 if non_finite else weight
            self._flags.append(bytes(flags) if non_finite else raw[_HEAD.size : _HEAD.size + flags])
            self._refused += [rank] if non_finite else []
        if 4 * contribution.values.numel() > AT_ONCE:
            mesh.on_settled(settled)

    def _resume(self, under_way: deque[Iterator[None]]) -> None:
        """Continue the oldest piece: transfers start in the same order on every member."""
        piece = under_way.popleft()
        for _ in piece:
            return under_way.append(piece)

    def _piece(self, start: int, step: int) -> Iterator[None]:
        """Owners average a piece of their shards and send the outcome to all; yields while a transfer is under way."""
        group, codec, values = self._group, self._contribution.codec, self._contribution.values
        slices = [(min(a + start, b), min(a + start + step, b)) for a, b in self._bounds.values()]
        frames = [encode_there(codec, values[a:b]) for a, b in slices]
        own_frame = frames.pop(group.group_rank)
        contributions = group.exchange(frames, [own_frame.numel()] * len(frames))
        yield
        gathered = contributions.wait()
        gathered.insert(group.group_rank, own_frame)
        outcome = self._averaged(gathered, *slices[group.group_rank])
        sizes = [codec.max_encoded_bytes(b - a) if b > a else 0 for a, b in slices]
        replies = group.exchange([outcome] * len(frames), [*sizes[: group.group_rank], *sizes[group.group_rank + 1 :]])
        yield
        received = replies.wait()
        received.insert(group.group_rank, outcome)
        self._frames += [(a, b, data) for (a, b), data in zip(slices, received) if b > a]

    def _averaged(self, frames: Sequence[torch.Tensor], start: int, stop: int) -> torch.Tensor:
        """Return the encoded mean of a piece of this member's shard."""
        if start == stop:
            return frames[0]
        contribution, terms = self._contribution, []
        for rank, frame in zip(self._mesh.members, frames):
            values = decode_there(contribution.codec, frame, stop - start)
            if not contribution.codec.carries(values):  # a correct member does not send them
                raise PeerLost(rank, self._mesh.names[rank], f"it sent no numbers in '{contribution.name}'")
            terms.append((self._weights[rank], values))
        return self.encoder.encode(start, weighted_mean(terms))


class FrameOutcome(OperationResult):
    """An outcome that stays on its device unless it is handed on.

    Args:
        frames: ascending.
        tail: of every message.
    """

    _frames: Sequence[Frame]
    _tail: bytes

    def __init__(self, members: tuple[int, ...], frames: Sequence[Frame], tail: bytes) -> None:
        self.__dict__.update(members=members, _frames=frames, _tail=tail)

    @functools.cached_property
    def size(self) -> int:
        return sum(data.numel() for *_, data in self._frames)

    @property
    def pieces(self) -> tuple[tuple[int, int, memoryview], ...]:
        return tuple((a, b, memoryview(data.cpu().numpy().tobytes() + self._tail)) for a, b, data in self._frames)


class TorchMean(MeshOperation[MeanResult]):
    """A weighted mean with a dense codec. The values are copied before the constructor returns.

    Args:
        shards: how much of the vector each member owns, by rank; default 1.
    """

    def __init__(
        self,
        number: int,
        contribution: Contribution,
        meter: Meter,
        residuals: MeanResiduals,
        shards: Mapping[int, float],
    ) -> None:
        copy = contribution.values.detach().clone()
        self._contribution = replace(contribution, values=copy)
        self._ready = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None
        self._residuals, self._shards = residuals, shards
        self._attempt: Attempt | None = None
        super().__init__(number, contribution.name, describe_operation("mean", contribution.name, contribution), meter)

    def begin(self, mesh: Mesh, on_done: Ended) -> PendingTransfer:
        assert isinstance(mesh, TorchMesh) and mesh.group is not None
        encoder = MeanEncoder(self._residuals, self._contribution.stream, self._contribution.codec)
        self._attempt = Attempt(mesh, self._on_device, encoder, self._shards)
        mesh.group.carry_out(self._attempt.run, on_done)  # at once, in the order of the operations
        return PendingTransfer(0)

    def complete(self) -> OperationResult:
        assert self._attempt is not None
        self._value, outcome = self._attempt.result()
        self._attempt = None
        return outcome

    def adopt(self, rank: int, outcome: OperationResult) -> None:
        contribution = self._on_device(torch.device("cpu"))
        self._value = apply_outcome(replace(contribution, values=torch.empty_like(contribution.values)), rank, outcome)
        if self._attempt is not None and rank in outcome.members:
            self._attempt.encoder.settle()
        self._attempt = None

    def _on_device(self, device: torch.device) -> Contribution:
        """Return a copy of the contribution on a device; the original stays unchanged for further attempts."""
        contribution = self._contribution
        if self._ready is not None:
            torch.cuda.current_stream(contribution.values.device).wait_event(self._ready)
        return replace(contribution, values=contribution.values.to(device)).checked()

    def _result(self) -> MeanResult:
        result, device = super()._result(), self._contribution.values.device
        if result.mean.is_cuda:
            result.mean.record_stream(torch.cuda.current_stream(result.mean.device))
        return result if result.mean.device == device else replace(result, mean=result.mean.to(device))


SMALL = 16_384
"""Bytes of an encoded contribution up to which it goes over the links of the mesh."""


class TorchMember(MeshMember):
    """A member of engine ``nccl``.

    Args:
        joining: as on the mesh; its ``interface`` is the one that torch uses, or loopback.
        device: of the contributions.
        notify: called with one line if gloo carries the exchange instead of NCCL.
    """

    engine = "nccl"
    mesh_kind = TorchMesh

    def __init__(
        self, joining: JoinConfig, device: torch.device, notify: Callable[[str], object] = lambda line: None
    ) -> None:
        self.device, self.interface = device, joining.interface
        self._notify, self._gloo_reported = notify, False
        self._nccl_failures = 0
        """Number of times NCCL did not come up."""
        super().__init__(joining)

    def _prepare(self, mesh: Mesh) -> None:
        assert isinstance(mesh, TorchMesh)
        try:
            group = mesh.open(self.device, self.interface)
            if group.backend == "gloo":
                self._report_gloo(mesh)
        except UnusableMember as error:  # nor can it use another one
            self._end(str(error), False)
            raise
        except NcclFailed as error:
            self._nccl_failures += 1
            if self._nccl_failures < _TRIES:
                raise
            self.device = torch.device("cpu")  # so the next group is one of gloo
            self._notify(f"engine = nccl: {error}")
            raise ExchangeError(f"{error}; gloo takes its place") from error

    def _report_gloo(self, mesh: Mesh) -> None:
        """Report it once for a group."""
        if not self._gloo_reported and mesh.rank == min(mesh.members):
            self._notify(
                "engine = nccl: gloo carries the exchange: NCCL needs a CUDA device of its own for each member"
            )
        self._gloo_reported = True

    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        values, codec = contribution.values, contribution.codec
        sparse = codec.reply is not codec or isinstance(codec, SparseCodec)  # the size of its reply is unknown
        flat = values.dim() == 1 and values.dtype == torch.float32
        if contribution.group or not flat or sparse or codec.max_encoded_bytes(values.numel()) <= SMALL:
            return super()._start_mean(contribution, waits)
        self._check()
        return self._start(TorchMean(self.operations, contribution, self._meter, self._residuals, self._shards), waits)
