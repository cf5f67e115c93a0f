"""ZeRO stage 1: every member keeps the optimizer state of a shard of the weights, and updates that shard for all.

Rajbhandari et al. 2019 (arXiv 1910.02054), section 5.1: the mean gradient of each shard goes to its owner only
(reduce-scatter), ``g = sum_i (w_i / W) g_i`` in rank order as in per-step averaging; the owner makes the optimizer
step; the new weights go to all members (all-gather). A member sends ``2 (n - 1) / n`` times the weights in a step and
all hold the same bits, both as with per-step averaging. The optimizer's state shrinks to one ``n``-th.

A parameter is never split, so that optimizers of whole matrices stay exact; the largest are assigned first, so shards
are about even. Gradients are clipped by the norm over all shards. With loss scaling, a gradient that is not finite
makes all members skip the step; without it the mean is over the others' gradients. Nothing overlaps with backward.

At the begin of a step all members announce which parameters they own. If members joined or left, shards are divided
anew: an owner keeps a parameter as far as shards stay even, else its state moves to the new owner. State that was lost
with a member starts anew, with a warning. If an owner is lost in a step, its shard is not updated in it. A snapshot
holds the state of a member's own shard.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from profiles.quantities import share_text
from profiles.schema import StrategySettings
from training.exchange.base import (
    LARGEST_WEIGHT,
    MAX_GATHER_BYTES,
    Exchange,
    ExchangeDropped,
    ExchangeError,
    Group,
    JoiningState,
    MeanResult,
    Pending,
    combine_flags,
    weighted_mean,
)
from training.exchange.codecs import all_finite, codec_by_name
from training.exchange.mean.broadcast import broadcast
from training.exchange.staging import to_device, to_host
from training.lazy import lazy, nn, torch
from training.records.events import SyncEvent
from training.strategies.base import StrategyContext
from training.strategies.costs import CostModel, Learning, RunSpec, SyncSchedule
from training.strategies.parts.gradients import Bucket, GradientStrategy
from training.strategies.registry import register
from training.strategies.weights import flatten, unflatten_into

if TYPE_CHECKING:
    from training.exchange import payloads
    from training.snapshots import optimizer_state
else:
    optimizer_state, payloads = lazy("training.snapshots.optimizer_state"), lazy("training.exchange.payloads")

_MAX_IN_FLIGHT = 4
"""Pieces that are in flight at the same time."""
_FP32 = 4
_NORM = struct.Struct("<d?")
"""Sum of the squares of the owned part's mean gradient, and whether all gradients of this member were finite."""


class ZeRO1Costs(CostModel):
    """Gradients to their owners and weights back in every step, with nothing hidden. The predicted memory is too high:
    the division of the optimizer state is not counted."""

    codecs = ("fp32",)
    vectors = 3  # gradients, those sent to others, and those received
    on_device = False
    merge_ns = 18.0  # of 1.3 M weights: encoding and decoding of gradients and weights, and the handshakes of a step
    sources: ClassVar[Mapping[str, str]] = {
        "zero1": "zero1: the step of the joint batch, exact (Rajbhandari et al. 2019, section 5.1)"
    }

    def why_not_ranked(self, run: RunSpec) -> str:
        return "it sends what allreduce sends and hides none of it: ask for it where the optimizer does not fit"

    def longest(self, trainable: int) -> int:
        return min(trainable, MAX_GATHER_BYTES // _FP32)

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        return Learning(sources=("zero1",))


@dataclass(frozen=True)
class StepHandshake:
    """What a member announces at the begin of a step."""

    weight: float
    """Samples (or tokens) of its gradient."""
    took_part: bool
    """Whether it took part in the last division."""
    owned: frozenset[int]
    """Indices of the parameters that it owns."""

    def to_bytes(self, parameters: int) -> bytes:
        mask = sum(1 << index for index in self.owned)
        return struct.pack("<d?", self.weight, self.took_part) + mask.to_bytes(math.ceil(parameters / 8), "little")

    @classmethod
    def read(cls, data: bytes, parameters: int) -> StepHandshake | None:
        """Return the decoded handshake; ``None`` if it is malformed."""
        fixed = struct.calcsize("<d?")
        if len(data) != fixed + math.ceil(parameters / 8):
            return None
        weight, took_part = struct.unpack("<d?", data[:fixed])
        mask = int.from_bytes(data[fixed:], "little")
        owned = frozenset(index for index in range(parameters) if mask >> index & 1)
        return cls(weight, took_part, owned) if 0.0 <= weight <= LARGEST_WEIGHT else None


def assign_owners(sizes: Sequence[int], handshakes: Mapping[int, StepHandshake]) -> list[int]:
    """Return the owner of each parameter; members with the same handshakes get the same owners.

    The division stays if no member joined or left. Otherwise each parameter, the largest first, stays with its owner
    unless that exceeds its share, else goes to the least loaded member; parameters without an owner come last.
    """
    ranks = sorted(handshakes)
    owned = {index: rank for rank in reversed(ranks) for index in handshakes[rank].owned}
    owners_before = [owned.get(index, -1) for index in range(len(sizes))]
    are_disjoint = sum(len(handshakes[rank].owned) for rank in ranks) == len(sizes)
    if are_disjoint and -1 not in owners_before and all(handshakes[rank].took_part for rank in ranks):
        return owners_before
    load, share = dict.fromkeys(ranks, 0), math.ceil(sum(sizes) / len(ranks))
    owners = list(owners_before)
    for index in sorted(range(len(sizes)), key=lambda i: (owners_before[i] < 0, -sizes[i], i)):
        previous, size = owners_before[index], sizes[index]
        least_loaded = min(ranks, key=lambda rank: (load[rank], rank))
        stays = previous >= 0 and load[previous] + size <= max(share, load[least_loaded] + size)
        owners[index] = previous if stays else least_loaded
        load[owners[index]] += sizes[index]
    return owners


def _ownership(handshakes: Mapping[int, StepHandshake]) -> dict[int, tuple[bool, frozenset[int]]]:
    return {rank: (handshake.took_part, handshake.owned) for rank, handshake in handshakes.items()}


def opponent_of(position: int, round_index: int, size: int) -> int:
    """Return the opponent of ``position`` in a round of a round-robin tournament of ``size``; itself in a bye. There
    are ``size - 1`` rounds, or ``size`` if that is odd."""
    even = size + size % 2
    opponent = (round_index - position) % (even - 1) if position < even - 1 else round_index * (even // 2) % (even - 1)
    opponent = even - 1 if opponent == position else opponent
    return opponent if opponent < size else position


@register
class ZeRO1(GradientStrategy):
    """Average gradients at the owners of their weights, and gather the weights, in every step."""

    name: ClassVar[str] = "zero1"
    summary: ClassVar[str] = "allreduce with the optimizer's state divided among the machines; exact, and less memory"
    costs = ZeRO1Costs()
    survives_failed_exchange: ClassVar[bool] = False

    @classmethod
    def why_only_own_codecs(cls, settings: StrategySettings) -> str:
        return "with zero1: half of what it sends are the weights themselves"

    @classmethod
    def why_not_in_parts(cls, settings: StrategySettings) -> str:
        return "limits gradients by the norm over all members, of which a device has a part"

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        return "with zero1, which sends fp32"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._codec = codec_by_name(self.codec(context.settings))
        self._optimizer: torch.optim.Optimizer | None = None
        self._optimizer_order: list[nn.Parameter] = []
        """Parameters in the optimizer's order."""
        self._numbers: dict[int, int] = {}
        """Index of a parameter by its number in the optimizer."""
        self._owned: frozenset[int] = frozenset()
        self._took_part = False
        self._handshakes: dict[int, StepHandshake] = {}
        self._shards: dict[int, Bucket] = {}
        self._greeting: Pending[dict[int, bytes]] | None = None
        self._weight, self._scale = 0.0, 1.0
        self._scaled = False
        self._norm: float | None = None

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._optimizer_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        indices = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._numbers = {number: indices[p] for number, p in enumerate(self._optimizer_order) if p in indices}

    # ---------------------------------------------------------------------------------------------------------- a step

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        super().begin_step(step, weight, scale)
        self._weight, self._scale, self._scaled = weight, scale or 1.0, scale is not None
        if not self._alone:  # awaited only after backward
            handshake = StepHandshake(weight, self._took_part, self._owned).to_bytes(len(self._parameters))
            self._greeting = self._exchange.start_gather(f"zero1/{step}/greeting", handshake)

    @property
    def gradient_norm(self) -> float | None:
        return self._norm

    def gradients(self) -> None:
        if self._alone:
            return
        self._assign_shards()
        buckets = {rank: bucket for rank, bucket in self._shards.items() if bucket.parameters}
        packed = to_host([bucket.pack(self._scale) for bucket in buckets.values()], torch.float32)
        vectors = dict(zip(buckets, torch.split(packed, [bucket.elements for bucket in buckets.values()]), strict=True))
        non_finite = [buckets[rank] for rank, vector in vectors.items() if not all_finite(vector)]
        self._count_non_finite(non_finite, self._codec, self._scale if self._scaled else None)
        counts = self._weight > 0.0 and not non_finite
        encoded = {rank: buckets[rank].flags + _bytes(vector) for rank, vector in vectors.items()} if counts else {}
        for parameter in self._parameters:
            parameter.grad = None
        own_bucket = self._shards[self._exchange.rank]
        mean = self._mean_of(own_bucket, self._exchange_gradients(encoded))
        own_bucket.unpack(mean, self._scale)
        self._agree_on_norm(mean, not non_finite)

    def _exchange_gradients(self, gradient_bytes: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send every member its shard of this member's gradient; return what each sent of the own shard, by rank."""
        ranks, rank = sorted(self._shards), self._exchange.rank
        position, size = ranks.index(rank), len(ranks)
        partners = [ranks[opponent_of(position, round_index, size)] for round_index in range(size + size % 2 - 1)]
        pairs = [(rank,) if peer == rank else tuple(sorted((rank, peer))) for peer in partners]
        outgoing = [b"" if peer == rank else gradient_bytes.get(peer, b"") for peer in partners]
        parcels: list[tuple[Group | None, bytes]] = list(zip(pairs, outgoing, strict=True))
        longest = max(bucket.elements * _FP32 + len(bucket.flags) for bucket in self._shards.values())
        received = {rank: gradient_bytes.get(rank, b"")}
        for peer, replies in zip(partners, self._gather("gradients", parcels, longest), strict=True):
            if peer != rank:
                received[peer] = replies.get(peer, b"")
        return received

    def _gather(self, kind: str, parcels: Sequence[tuple[Group | None, bytes]], longest: int) -> list[dict[int, bytes]]:
        """Gather parcels one after another; return what the members of each parcel's group sent, by rank.

        Args:
            parcels: group (``None``: all) and payload of each gather.
            longest: bytes of the longest payload of any member, which makes all cut the same pieces.
        """
        received: list[dict[int, bytes]] = [{} for _ in parcels]
        in_flight: deque[tuple[int, Pending[dict[int, bytes]]]] = deque()

        def take() -> None:
            index, pending = in_flight.popleft()
            for rank, piece in pending.wait().items():
                received[index][rank] = received[index].get(rank, b"") + piece

        for index, (group, payload) in enumerate(parcels):
            for start in range(0, max(longest, 1), MAX_GATHER_BYTES):
                piece = payload[start : start + MAX_GATHER_BYTES]
                name = f"zero1/{self._step}/{kind}/{index}/{start}"
                in_flight.append((index, self._exchange.start_gather(name, piece, group)))
                if len(in_flight) > _MAX_IN_FLIGHT:
                    take()
        while in_flight:
            take()
        return received

    def _mean_of(self, bucket: Bucket, received: Mapping[int, bytes]) -> MeanResult:
        """Average the complete gradients of a shard in rank order."""
        flags = math.ceil(len(bucket.parameters) / 8)
        length = flags + bucket.elements * _FP32
        complete = {rank: data for rank, data in sorted(received.items()) if len(data) == length and data}
        terms = [(self._handshakes[rank].weight, _vector(data[flags:])) for rank, data in complete.items()]
        finite_terms = {rank: term for rank, term in zip(complete, terms, strict=True) if all_finite(term[1])}
        mean = weighted_mean(list(finite_terms.values())) if finite_terms else torch.zeros(bucket.elements)
        weight = sum(weight for weight, _ in finite_terms.values())
        device = bucket.parameters[0].device if bucket.parameters else mean.device
        all_flags = combine_flags([complete[rank][:flags] for rank in finite_terms], flags)
        return MeanResult(to_device(mean, device), weight, tuple(finite_terms), flags=all_flags)

    def _agree_on_norm(self, mean: MeanResult, is_finite: bool) -> None:
        """Compute the norm over all shards, and make all members skip the step if a scaled gradient overflowed."""
        squares = float(torch.linalg.vector_norm(mean.mean)) ** 2 if mean.mean.numel() else 0.0
        norm_bytes = self._exchange.gather(f"zero1/{self._step}/norm", _NORM.pack(squares, is_finite))
        reports = [_NORM.unpack(norm_bytes[rank]) for rank in sorted(norm_bytes) if len(norm_bytes[rank]) == _NORM.size]
        self._norm = math.sqrt(sum(squares for squares, _ in reports if 0.0 <= squares < math.inf))
        if self._scaled and not all(is_finite for _, is_finite in reports):
            for bucket in self._shards.values():
                bucket.overflow()

    def end_step(self) -> SyncEvent | None:
        if not self._alone:
            longest = max(bucket.elements for bucket in self._shards.values()) * _FP32
            owned_parameters = self._shards[self._exchange.rank].parameters
            payload = _bytes(flatten(owned_parameters, torch.device("cpu"))) if owned_parameters else b""
            (weight_bytes,) = self._gather("weights", [(None, payload)], longest)
            self._members = tuple(sorted(weight_bytes))
            for rank, bucket in self._shards.items():
                self._take_over_weights(bucket, weight_bytes.get(rank, b""), rank)
        return super().end_step()

    def _take_over_weights(self, bucket: Bucket, data: bytes, rank: int) -> None:
        """Take over an owner's weights; if they are incomplete, the shard stays as it was."""
        if len(data) != bucket.elements * _FP32 or not data:
            return
        values = _vector(data)
        if not all_finite(values):
            raise ExchangeError(f"member {rank} handed over weights that are not finite")
        unflatten_into(bucket.parameters, values)

    # ---------------------------------------------------------------------------------------------------- ownership

    def _assign_shards(self) -> None:
        assert self._greeting is not None
        handshake_bytes = self._greeting.wait()
        size = len(self._parameters)
        decoded = {rank: StepHandshake.read(data, size) for rank, data in sorted(handshake_bytes.items())}
        handshakes = {rank: handshake for rank, handshake in decoded.items() if handshake is not None}
        if self._exchange.rank not in handshakes:
            raise ExchangeError("the others do not hear what this machine says of its step")
        before, self._greeting, self._handshakes = self._handshakes, None, handshakes
        is_unchanged = _ownership(handshakes) == _ownership(before)
        if is_unchanged and self._shards:
            return
        owners = assign_owners([parameter.numel() for parameter in self._parameters], handshakes)
        self._move_state(owners, handshakes)
        pairs = list(zip(self._parameters, owners, strict=True))
        self._shards = {rank: Bucket([p for p, owner in pairs if owner == rank]) for rank in handshakes}
        self._owned = frozenset(index for index, owner in enumerate(owners) if owner == self._exchange.rank)
        self._took_part = True

    def _move_state(self, owners: Sequence[int], handshakes: Mapping[int, StepHandshake]) -> None:
        """Move optimizer state to new owners, and drop that of parameters owned by others."""
        rank, has_begun = self._exchange.rank, any(greeting.took_part for greeting in handshakes.values())
        owned = {index for handshake in handshakes.values() for index in handshake.owned}
        lost = {index for index in range(len(owners)) if has_begun and index not in owned}
        taken: set[int] = set()
        for source in sorted(handshakes):
            leaving = [i for i in sorted(handshakes[source].owned - taken) if owners[i] != source]
            taken |= handshakes[source].owned
            if leaving and not self._transfer_state(source, leaving, owners):
                lost |= set(leaving)
        lost_here = [i for i in lost if owners[i] == rank]
        if lost_here:
            share = sum(self._parameters[i].numel() for i in lost_here) / sum(p.numel() for p in self._parameters)
            loss = f"the optimizer's state of {share_text(share)} of the weights is gone with the machine that kept it"
            self.context.warn(f"step {self._step + 1}: {loss}, and begins anew here")
        if self._optimizer is not None:
            for index, owner in enumerate(owners):
                if owner != rank or index in lost:
                    self._optimizer.state.pop(self._parameters[index], None)

    def _transfer_state(self, source: int, leaving: Sequence[int], owners: Sequence[int]) -> bool:
        """Transfer the state of some parameters from ``source``; return whether it arrived."""
        joining_state = JoiningState(self._state_of(leaving)) if source == self._exchange.rank else JoiningState()
        received_indices = {index for index in leaving if owners[index] == self._exchange.rank}
        try:
            encoded = payloads.state_to_bytes(joining_state)
            data = broadcast(self._exchange, f"zero1/{self._step}/state", encoded, source)
            tensors = payloads.state_from_bytes(data).tensors
        except ExchangeDropped:
            raise
        except ExchangeError:
            return False
        received = {name: t for name, t in tensors.items() if self._numbers.get(_number(name)) in received_indices}
        if self._optimizer is not None and received:
            state = optimizer_state.optimizer_tensors(self._optimizer) | received
            optimizer_state.load_optimizer(self._optimizer, state)
        return True

    def _state_of(self, indices: Collection[int]) -> dict[str, torch.Tensor]:
        """Return the optimizer state of some parameters, named as in a snapshot."""
        states = {} if self._optimizer is None else optimizer_state.optimizer_tensors(self._optimizer)
        return {name: tensor for name, tensor in states.items() if self._numbers[_number(name)] in indices}

    def state(self) -> dict[str, Any]:
        return {"owned": sorted(self._owned), "took_part": self._took_part}

    def newcomer_state(self) -> dict[str, Any]:
        return {"owned": [], "took_part": False}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._owned, self._took_part = frozenset(map(int, state["owned"])), bool(state["took_part"])


def _number(name: str) -> int:
    """Return the parameter number in the name of an optimizer state tensor; -1: it has none."""
    number = name.partition("/")[0]
    return int(number) if number.isdigit() else -1


def _bytes(vector: torch.Tensor) -> bytes:
    return vector.contiguous().numpy().tobytes()


def _vector(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
