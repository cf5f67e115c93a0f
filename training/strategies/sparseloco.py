"""SparseLoCo: DiLoCo with sparse pseudo-gradients: every member sends its largest values in 2 bits to all.

Sarfi et al. 2025 (arXiv 2508.15706), algorithm 1. Every ``H`` inner steps member ``r`` has the pseudo-gradient
``delta_r = anchor - theta_r`` and the residual ``e_r`` of what it has not sent::

    e_r = beta e_r + delta_r
    sent_r = Q(top_k(e_r))        # in blocks of 4096; the codec topk2bit has the definition
    e_r = e_r - sent_r
    anchor = anchor - outer_lr (sum_r w_r sent_r) / sum_r w_r

Error feedback replaces outer momentum. ``w_r`` counts the member's samples (or tokens); with equal counts this is the
paper's mean. Every member sends its values to all others and sums in rank order, so all get the same bits; a mean by
owners of shards would have to send the union of all members' positions back. ``Q`` works on each large tensor alone, as
in the paper's published code; small ones share four levels with their neighbours. A member alone sends nothing and
drops nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from profiles.declarations import OptionsByOwner, Section, option
from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.exchange.base import (
    LARGEST_WEIGHT,
    MAX_GATHER_BYTES,
    Exchange,
    MeanResult,
    Pending,
    combine_flags,
)
from training.exchange.codecs import Codec
from training.lazy import nn, torch
from training.strategies.base import FEEDS_BACK_ITSELF, StrategyContext
from training.strategies.costs import INTERVALS, ONLY_TEXTS, Learning, RunSpec, SyncSchedule, intervals
from training.strategies.diloco import DiLoCo
from training.strategies.parts.outer_costs import OuterCosts
from training.strategies.parts.outer_fragment import FragmentSpec, OuterFragment, PseudoGradientMean
from training.strategies.parts.outer_optimizers import OuterOptimizer, OuterOptions
from training.strategies.registry import register

FEWEST_ROUNDS = 100
_SEGMENT = 1 << 16
"""Elements from which a tensor is encoded with quantization levels of its own."""
_WEIGHT = struct.Struct("<d")


class SparseLoCoOptions(Section):
    """Options of :class:`SparseLoCo`; how much is sent is the codec's (``codec = topk2bit:SHARE``)."""

    sync_interval: int = option(30, "steps between synchronisations", unit="steps", ge=1)
    outer_lr: float = option(1.0, "outer learning rate", gt=0, advanced=True)
    error_decay: float = option(
        0.95, "share of what was not sent that is kept for the next exchange", ge=0, le=1, advanced=True
    )
    force: bool = option(False, f"train with fewer than {FEWEST_ROUNDS} exchanges, too", advanced=True)


class SparseLoCoCosts(OuterCosts):
    """A few values of all trainable parameters every H steps, from every member to all; not for few rounds.

    Args:
        force: see :class:`SparseLoCoOptions`.
    """

    gathers = True
    codecs = ("topk2bit:0.015625",)
    losses: ClassVar = {**OuterCosts.losses, "texts": {120: 0.042, 1000: 0.0}}
    gains: ClassVar = {**OuterCosts.gains, "texts": {120: 0.57, 1000: 1.0}}
    sources: ClassVar[Mapping[str, str]] = {
        "sparse": "SparseLoCo: 120 rounds of a fine-tuned language model, own check; none lost at 512 M (2508.15706)",
    }

    def __init__(self, name: str, options: OuterOptions, force: bool = False) -> None:
        self._force = force
        super().__init__(name, options)

    def with_options(self, settings: OptionsByOwner) -> SparseLoCoCosts:
        return SparseLoCoCosts(self._name, self._options, settings.of(SparseLoCoOptions).force)

    def why_unsupported(self, run: RunSpec, schedule: SyncSchedule) -> str:
        rounds = run.steps // schedule.interval
        if rounds >= FEWEST_ROUNDS or self._force:
            return ""
        return f"needs {FEWEST_ROUNDS} exchanges, and {run.steps} steps have {rounds}"

    def why_not_ranked(self, run: RunSpec) -> str:
        if run.steps // INTERVALS[0] < FEWEST_ROUNDS:
            return f"it needs {FEWEST_ROUNDS} exchanges, and {run.steps} steps are too few for them"
        return "" if run.trains_texts else ONLY_TEXTS

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        for interval in intervals(run):
            if run.steps // interval >= FEWEST_ROUNDS:
                yield SyncSchedule(interval)

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        learnt = super().learning(run, schedule, effective_members)
        return Learning(learnt.share, learnt.loss, ("sparse",))

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        return {self.interval_option: schedule.interval, "error_feedback": False}


class Descent(OuterOptimizer):
    """``anchor -= rate d``: no momentum."""

    names = ()

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, round_: int) -> None:
        anchor.sub_(mean * self.rate)


class GatheredMean(PseudoGradientMean):
    """Averages deltas that every member sends to all others, with a decaying residual.

    Args:
        sizes: elements of the segments, each of which is encoded by itself.
        decay: factor of the residual in every round.
    """

    def __init__(self, exchange: Exchange, codec: Codec, sizes: Sequence[int], decay: float) -> None:
        super().__init__(exchange, codec, "")
        self._sizes, self._decay = sizes, decay
        self._contribution = torch.empty(0)
        self._flags = 0
        self._gathers: list[Pending[dict[int, bytes]]] = []

    @property
    def accepts_device(self) -> bool:
        return False

    def start(self, name: str, delta: torch.Tensor, weight: float, flags: bytes) -> None:
        if (residual := self.feedback.residual) is not None:
            delta = (residual * self._decay).add_(delta)
        self._contribution, self._weight, self._flags = delta, weight, len(flags)
        if self.exchange.engine == "solo":
            return
        payload = self._encoded(weight, flags) if self.codec.carries(delta) else b""
        length = _WEIGHT.size + len(flags) + sum(map(self.codec.max_encoded_bytes, self._sizes))
        self._gathers = [
            self.exchange.start_gather(f"{name}/{start}", payload[start : start + MAX_GATHER_BYTES])
            for start in range(0, length, MAX_GATHER_BYTES)
        ]

    def _encoded(self, weight: float, flags: bytes) -> bytes:
        segments = torch.split(self._contribution, list(self._sizes))
        return (
            _WEIGHT.pack(weight)
            + flags
            + b"".join(self.codec.encode(segment).numpy().tobytes() for segment in segments)
        )

    def wait(self) -> tuple[MeanResult, torch.Tensor]:
        total, own_rank = self._contribution, self.exchange.rank
        if self.exchange.engine == "solo":
            is_finite = self.codec.carries(total)
            mean = total if is_finite else torch.zeros_like(total)
            return MeanResult(
                mean.clone(), self._weight, (own_rank,), refused=() if is_finite else (own_rank,), is_finite=is_finite
            ), total
        pieces = [pending.wait() for pending in self._gathers]
        members = tuple(sorted(pieces[-1]))
        mean, contributions = torch.zeros_like(total), dict[int, tuple[float, bytes]]()
        for rank in members:
            contribution = self._read(b"".join(piece.get(rank, b"") for piece in pieces))
            if contribution is None:
                continue
            weight, flags, values = contribution
            contributions[rank] = weight, flags
            if rank == own_rank:
                self.feedback.residual = total.sub(values) if weight else total
            mean.add_(values.mul_(weight))  # two operations, so that every processor rounds alike
        weight = sum(member_weight for member_weight, _ in contributions.values())
        if weight:
            mean.div_(weight)
        refused = tuple(rank for rank in members if rank not in contributions)
        flags = combine_flags([flags for _, flags in contributions.values()], self._flags)
        left_out = () if own_rank in contributions else ((0, total.numel()),)
        return MeanResult(mean, weight, members, left_out, refused, flags, own_rank in contributions), total

    def _read(self, payload: bytes) -> tuple[float, bytes, torch.Tensor] | None:
        """Return a member's weight, flags and values; ``None``: the payload is invalid."""
        if len(payload) < _WEIGHT.size:
            return None
        (weight,), data = _WEIGHT.unpack_from(payload), torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        offset, decoded = _WEIGHT.size + self._flags, list[torch.Tensor]()
        try:
            for size in self._sizes:
                decoded.append(self.codec.decode(data[offset : offset + self.codec.max_encoded_bytes(size)], size))
                offset += self.codec.max_encoded_bytes(size)
        except ValueError:
            return None
        is_valid = offset == len(payload) and 0.0 <= weight <= LARGEST_WEIGHT
        return (weight, payload[_WEIGHT.size : _WEIGHT.size + self._flags], torch.cat(decoded)) if is_valid else None


@register
class SparseLoCo(DiLoCo):
    """Send the largest values of the pseudo-gradient; the others stay in the residual."""

    name: ClassVar[str] = "sparseloco"
    summary: ClassVar[str] = (
        "the largest changes of weights in 2 bits every so many steps; sends very little, needs 100 exchanges"
    )
    options = SparseLoCoOptions
    costs = SparseLoCoCosts("sparseloco", OuterOptions())
    numbers_fragments = True
    is_elementwise = False

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._options = context.settings.of(SparseLoCoOptions)
        rounds = context.total_steps // self.interval
        if rounds < FEWEST_ROUNDS and not self._options.force:
            raise BadInput(
                f"sparseloco needs {FEWEST_ROUNDS} exchanges, and {context.total_steps} steps have {rounds}: most of "
                "what was learnt would not be sent before the end",
                "set strategy = diloco, a smaller sparseloco.sync_interval, more steps, or sparseloco.force = true",
            )

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        return f"with sparseloco, {FEEDS_BACK_ITSELF}"

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        return SyncSchedule(settings.of(SparseLoCoOptions).sync_interval)

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        shorter = min(interval, cls.sync_schedule(settings).interval)
        return settings.with_options_of("sparseloco", sync_interval=shorter, force=True)

    def make_outer(self) -> OuterOptimizer:
        return Descent(self._options.outer_lr, 0.0)

    def make_fragments(self, model: nn.Module) -> list[OuterFragment]:
        sizes = segments([parameter.numel() for parameter in self._parameters])

        def make_mean(exchange: Exchange, codec: Codec, stream: str) -> PseudoGradientMean:
            return GatheredMean(exchange, codec, sizes, self._options.error_decay)

        return [self.make_fragment(FragmentSpec("sparseloco", "", self._names, lambda: self._parameters), make_mean)]

    def local_after_merge(self, fragment: OuterFragment) -> torch.Tensor:
        return fragment.anchor


def segments(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the segments that are encoded separately: a large tensor alone, small ones joined."""
    segment_sizes: list[int] = []
    current_size = 0
    for size in sizes:
        current_size += size
        if current_size >= _SEGMENT:
            segment_sizes.append(current_size)
            current_size = 0
    if current_size and segment_sizes:
        segment_sizes[-1] += current_size
    return segment_sizes or [current_size]
