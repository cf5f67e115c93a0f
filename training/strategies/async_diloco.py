"""Asynchronous DiLoCo: every member trains at its own pace, and its pseudo-gradient is applied when it arrives.

Liu et al. 2024 (arXiv 2401.09135). A member makes ``H_i`` steps from the anchor, sends ``g = anchor - theta_i``, and
continues from the newest anchor without waiting for the others. Two techniques make that as good as synchronous rounds:

*Delayed Nesterov* (algorithm 3, with its default c = 0). With ``Delta`` the sum of the last N deltas, on each arrival::

    every N-th:  m <- beta m + Delta / N,   anchor <- anchor - epsilon (beta m + g / N)
    else:                                   anchor <- anchor - epsilon g / N

so that N deltas move the anchor like one outer Nesterov step by their mean, and no single stale delta drives the
momentum. ``outer_lr`` is epsilon, ``outer_momentum`` beta, ``momentum_period`` N, by default the number of members.
``damping`` is not from that paper: a delta that s others overtook is weighted by ``(1 + s) ** -damping`` (FedAsync, Xie
et al. 2019, arXiv 1903.03934, polynomial).

*Dynamic local updates* (section 5): ``H_i = H v_i / max v`` with the speed v_i, at least 1. A member of unknown
speed makes one step first.

There is no server that could be lost: all members hold the anchor and get every delta in the same order
(:mod:`training.strategies.parts.delta_rounds`), so that equal versions of the anchor are the same bits; a report has
version and hash. A member sends each delta to n - 1 others and gets theirs: ``(n - 1) S`` in each direction a delta, as
much as DiLoCo with two members and n / 2 times as much with n.

All members meet every ``meet_every`` intervals, where the run evaluates or writes a snapshot, and on request as soon as
each has sent its current delta. Orders, newcomers and snapshots are handled only there; a member waits for the last
deltas of the others, which are short (:mod:`training.strategies.async_work`). The learning rate follows the samples of
all members. The work of a lost member is done by the others.

A simulation has no real speeds: ``speeds`` sets them, and the order of deltas follows from them alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import field_validator

from profiles.declarations import OptionError, Section, option
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, Traffic
from training.exchange.codecs import codec_by_name
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.async_work import DelayedNesterov, WorkAssignment, WorkUnit
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.costs import Learning, RunSpec, Start, SyncSchedule
from training.strategies.parts.delta_rounds import DeltaTransport, Rounds, Stopwatch, parse_speed
from training.strategies.parts.outer_costs import IntervalCosts, diloco_learning
from training.strategies.parts.outer_optimizers import OuterOptions, momentum_option, rate_option
from training.strategies.registry import register
from training.strategies.weights import (
    broadcast_from,
    difference_warning,
    flatten,
    majority,
    non_finite_parameter,
    unflatten_into,
    weight_hash,
)


class AsyncDiLoCoOptions(Section):
    """Options of :class:`AsyncDiLoCo`."""

    sync_interval: int = option(50, "steps that the fastest member makes between two deltas", unit="steps", ge=1)
    meet_every: int = option(
        8, "intervals after which all meet, unless somebody is to be let in or stopped", ge=1, le=1000, advanced=True
    )
    momentum_period: int = option(
        0, "deltas between two updates of the outer momentum (N); 0: as many as members", ge=0, advanced=True
    )
    damping: float = option(
        0.0, "a delta that s others overtook counts (1 + s) ** -damping; 0: fully", ge=0, le=4, advanced=True
    )
    speeds: str = option(
        "",
        "speeds of the members by rank, such as 1,1,0.5; further ones have the least; empty: measured, and equal in a "
        "simulation",
        advanced=True,
    )
    outer_lr: float = rate_option()
    outer_momentum: float = momentum_option()

    @field_validator("speeds")
    @classmethod
    def _are_speeds(cls, text: str) -> str:
        try:
            are_valid = all(1e-3 <= float(speed) <= 1e3 for speed in text.split(",")) if text else True
        except ValueError:
            are_valid = False
        if not are_valid:
            raise OptionError("speeds", "numbers from 0.001 to 1000 with commas between them, such as 1,1,0.5")
        return text

    def rates(self, rounds: int, start: Start, alone: bool) -> tuple[float, float]:
        """Return outer learning rate and momentum."""
        outer_options = OuterOptions(outer_lr=self.outer_lr, outer_momentum=self.outer_momentum)
        return outer_options.outer_rates(rounds, start, alone)


_MORE_LOSS = 0.019
"""Loss over DiLoCo's, with 10 exchanges of a fine-tune: ``benchmarks/strategies.py``, means of three seeds."""


class AsyncDiLoCoCosts(IntervalCosts):
    """All trainable parameters from every member to all others, while each makes its steps."""

    codecs = ("bf16", "mxfp4", "fp32")
    waits = False
    vectors = 8  # anchor, momentum, sum of deltas, start weights, own delta, received delta, both encoded
    gathers = True
    interval_option = "async_diloco.sync_interval"
    sources: ClassVar[Mapping[str, str]] = {
        "async": "as DiLoCo, and 1.9 % more loss: own check, three seeds of a fine-tune, members of one speed"
    }

    def why_not_ranked(self, run: RunSpec) -> str:
        return "what it costs in loss was measured for members of one speed only, and no run of it repeats to the bit"

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        as_diloco = diloco_learning(run, schedule, effective_members)
        return Learning(as_diloco.share, as_diloco.loss + _MORE_LOSS, ("async",))


@register
class AsyncDiLoCo(Strategy):
    """DiLoCo without waiting: each member's pseudo-gradient is applied when it arrives."""

    name = "async_diloco"
    summary = "as diloco, but nobody waits: a machine's change is applied when it comes; with many it sends more"
    options = AsyncDiLoCoOptions
    costs = AsyncDiLoCoCosts()

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._options = context.settings.of(AsyncDiLoCoOptions)
        self._codec = codec_by_name(self.codec(context.settings))
        self._work = WorkAssignment(self._options.sync_interval)
        self._work_units: deque[WorkUnit] = deque()
        self._start_versions: dict[int, int] = {}
        """Version of the anchor that each member trains from, by rank."""
        self._arrival_times: dict[int, float] = {}
        """Time at which each member's delta arrives, if speeds are configured and not measured."""
        self._rounds: Rounds | None = None
        self._watch = Stopwatch()
        self._residual: torch.Tensor | None = None
        self._reported = Traffic()
        self._version = 0
        self._has_met = True

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        return SyncSchedule(settings.of(AsyncDiLoCoOptions).sync_interval)

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        shorter = min(interval, cls.sync_schedule(settings).interval)
        return settings.with_options_of(cls.name, sync_interval=shorter, meet_every=1)

    @classmethod
    def segment_steps(cls, settings: StrategySettings) -> int:
        options = settings.of(AsyncDiLoCoOptions)
        return options.sync_interval * options.meet_every

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        rounds = self.context.total_steps // self._options.sync_interval
        rate, momentum = self._options.rates(rounds, self.context.start, self._alone)
        anchor, self._base = self._weights(), self._weights()
        period = self._options.momentum_period or len(self._members)
        self._server = DelayedNesterov(anchor, rate, momentum, period, self._options.damping)
        self._in_turns = exchange.shares_process or exchange.engine == "solo"
        self._wire = DeltaTransport(exchange, self._codec, anchor.numel(), self.name, not self._in_turns)
        self._reported = exchange.traffic.copy()

    def _weights(self) -> torch.Tensor:
        return flatten(self._parameters, torch.device("cpu"))

    # ------------------------------------------------------------------------------------------------------ a segment

    def begin_segment(
        self,
        begin: int,
        end: int,
        owners: Sequence[int],
        meeting_requested: Callable[[int], bool],
        set_end: Callable[[int], None],
    ) -> None:
        self._is_meeting_requested, self._set_end = meeting_requested, set_end
        compares, vectors = self.context.settings.verify_interval, self._server.tensors().values()
        digest = "".join(map(weight_hash, vectors)) if compares else ""
        reports = self._exchange.gather(f"{self.name}/speed", f"{self._speed()!r} {digest}".encode())
        speeds = {rank: parse_speed(report.partition(b" ")[0]) for rank, report in reports.items()}
        hashes = {rank: report.partition(b" ")[2] for rank, report in reports.items()}
        if len(set(hashes.values())) > 1:
            self._restore_agreement(majority(hashes))
        self._members, self._has_met = tuple(speeds), False
        self._server.period = self._options.momentum_period or len(speeds)
        self._work.begin_segment(begin, end, owners, speeds)
        self._start_versions = dict.fromkeys(speeds, self.version)
        self._work_units = deque(self._work.taken[self._exchange.rank])
        if self._in_turns:
            self._arrival_times = {rank: len(units) / speeds[rank] for rank, units in self._work.taken.items()}
            self._advance_to_own_turn()
        else:
            self._rounds = Rounds(self._exchange, self._wire, self)
        if not self._work_units:
            self._meet()
            unflatten_into(self._parameters, self._base)
        self._watch.start()

    def _restore_agreement(self, source: int) -> None:
        """Take the state of a member of the majority."""
        drifts = []
        for name, vector in self._server.tensors().items():
            majority_vector, drift = broadcast_from(source, vector, self._exchange, f"{self.name}/mend-{name}")
            vector.copy_(majority_vector)
            drifts.append(drift)
        self._continue_from_anchor()
        unflatten_into(self._parameters, self._base)
        self.context.warn(f"version {self._version}: {difference_warning(max(drifts), source)}")

    def _speed(self) -> float:
        """Return this member's speed; 0: not known."""
        configured_speeds = list(map(float, self._options.speeds.split(","))) if self._options.speeds else []
        if configured_speeds:
            return dict(enumerate(configured_speeds)).get(self._exchange.rank, min(configured_speeds))
        return 1.0 if self._in_turns else self._watch.speed

    @property
    def seconds(self) -> float:
        fastest = max(self._work.speeds.values(), default=0.0)
        return self._options.sync_interval / fastest if fastest and not self._options.speeds else 0.0

    @property
    def work_units(self) -> Sequence[WorkUnit]:
        return self._work_units

    def end_step(self) -> SyncEvent | None:
        self._work_units.popleft()
        self._watch.stop()
        if self._work_units:
            return None
        weights = self._weights()
        delta = self._base - weights
        if self._residual is not None:
            delta.add_(self._residual)
        if self._alone:
            if self.requests_meeting():
                self.end_early()
            self.apply(self._exchange.rank, delta, 0.0)
        else:
            self._send_delta(delta)
        if self._in_turns:
            self._advance_to_own_turn()
        if not self._work_units:
            self._meet()
        unflatten_into(self._parameters, self._base)
        drift = float(weights.sub_(self._base).abs().max()) if weights.numel() else 0.0
        now = self._exchange.traffic.copy()
        traffic, self._reported = now.since(self._reported), now
        self._watch.start()
        return sync_event(traffic, self._version, self._members, weight_hash(self._base), drift)

    def _send_delta(self, delta: torch.Tensor) -> None:
        data = self._wire.encoded(delta)
        non_finite = "" if data else non_finite_parameter(self._names, self._parameters, delta, self._codec)
        self._non_finite_counter.count(non_finite and f"version {self.version}: the weight {non_finite}")
        if data and self.context.settings.error_feedback and not self._codec.exact:
            sent = self._wire.decoded(data)
            self._residual = None if sent is None else delta.sub_(sent)
        if self._rounds is None:
            return self._apply_turn(self._exchange.rank, data)
        start = time.monotonic()
        if not self._rounds.submit(data, self._speed()):
            self.context.warn(f"version {self.version}: this machine's delta came after the others had met")
        self._exchange.traffic.wait_seconds += time.monotonic() - start

    def _continue_from_anchor(self) -> None:
        self._base.copy_(self._server.anchor)
        self._version = self.version

    def _meet(self) -> None:
        """Wait until the segment is over, or this member was assigned work of a lost one."""
        if self._rounds is not None:
            start = time.monotonic()
            is_over = self._rounds.wait_for_end(lambda: bool(self._work_units))
            self._exchange.traffic.wait_seconds += time.monotonic() - start
            if not is_over:
                return
            self._rounds = None
        self._work_units.clear()
        self._continue_from_anchor()
        self._has_met = True

    # ------------------------------------------------------------------------------------- the same on all members

    @property
    def version(self) -> int:
        """Number of deltas that were applied."""
        return self._server.version

    @property
    def is_over(self) -> bool:
        """Whether the segment is over."""
        return self._work.is_over

    def requests_meeting(self) -> bool:
        """Return whether this member requests a meeting as early as possible."""
        return self._is_meeting_requested(self._work.reached_step)

    def end_early(self) -> None:
        """End the segment as early as possible."""
        self._set_end(self._work.end_early())

    def apply(self, rank: int, delta: torch.Tensor | None, speed: float) -> None:
        """Apply a member's delta, and assign its next work units."""
        if delta is not None:
            self._server.apply(delta, self.version - self._start_versions.get(rank, self.version))
        self._work.speeds[rank] = speed or self._work.speeds.get(rank, 0.0)
        self._assign_work(rank)

    def _assign_work(self, rank: int) -> None:
        self._work.take(rank)
        self._start_versions[rank] = self.version
        if rank == self._exchange.rank:
            self._continue_from_anchor()
            self._work_units = deque(self._work.taken[rank])

    def note_members(self, ranks: Collection[int]) -> None:
        """Assign the units of lost members to idle ones."""
        self._members = tuple(sorted(ranks))
        for rank in self._work.reassign_lost(ranks):
            self._assign_work(rank)

    # ------------------------------------------------------------------------------------- with configured speeds

    def _advance_to_own_turn(self) -> None:
        """Apply the others' deltas until it is this member's turn, or the segment is over."""
        while not self.is_over:
            rank = min(
                (rank for rank, units in self._work.taken.items() if units), key=lambda r: (self._arrival_times[r], r)
            )
            if rank == self._exchange.rank:
                return
            self._apply_turn(rank, b"")

    def _apply_turn(self, rank: int, data: bytes) -> None:
        if any(self._exchange.gather(f"{self.name}/asked", b"1" if self.requests_meeting() else b"").values()):
            self.end_early()
        encoded_deltas = self._wire.broadcast_deltas(self.version, data, (rank,))
        self.apply(rank, self._wire.decoded(encoded_deltas.get(rank, b"")), 0.0)
        self._arrival_times[rank] += len(self._work.taken[rank]) / self._work.speeds[rank]

    # -------------------------------------------------------------------------------------------------- at a meeting

    @property
    def synchronised(self) -> bool:
        return self._has_met

    def meets(self, report: SyncEvent | None) -> bool:
        return self._has_met

    @property
    def steps_to_average(self) -> int | None:
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.newcomer_tensors() | ({"residual": self._residual} if self._residual is not None else {})

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return self._server.tensors()

    def state(self) -> dict[str, Any]:
        return self._server.state()

    newcomer_state = state

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._server.load(tensors, state)
        self._residual = tensors.get("residual")
        self._continue_from_anchor()
