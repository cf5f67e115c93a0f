"""SPARTA: a small share of the weights is averaged over the members in every step.

Beton et al. 2025, "Improving the efficiency of distributed training using sparse parameter averaging" (MCDC at ICLR
2025). Every member makes its own steps. After step t all average the weights theta[S_t] of a subset S_t, a share p of
all trainable weights::

    theta_i[S_t] <- 1/n sum_j theta_j[S_t]

The subsets follow from the run's seed and the step (:mod:`training.strategies.parts.permutation`), so only values are
sent, 4 p N bytes in fp32, and a newcomer needs no state to compute them. ``selection`` has the names of ExoGym's index
selectors, which select in each tensor separately. With a ``delay`` of d steps training continues during an exchange,
and its steps are kept: what was sent after step t is merged after step t + d, ``theta += mean - sent``.

The mean is plain, as in the paper; ``weighting = samples`` weights members by the samples since their last exchange.
Members differ by design. Evaluated and saved is the plain mean of all their weights, 4 N bytes each time, and after the
last step all hold it. A newcomer starts with the weights of its host. A member that is too late for a mean takes it
like the others. ``drift`` is the largest distance of this member's weights from their mean. ``error_feedback`` has no
use here: errors of rounding a weight once do not add up.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from profiles.declarations import OptionError, OptionsByOwner, Section, option
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, ExchangeError, MeanResult, Pending, Traffic
from training.exchange.codecs import codec_by_name
from training.exchange.staging import to_device
from training.lazy import nn, np, torch
from training.records.events import SyncEvent
from training.strategies.base import CODEC_FOR_DIFFERENCES, Strategy, StrategyContext, sync_event
from training.strategies.costs import (
    Compute,
    Learning,
    OptionCosts,
    RunSpec,
    Start,
    SyncSchedule,
    interpolate,
    merge_efficiency,
)
from training.strategies.parts.permutation import permuted
from training.strategies.registry import register
from training.strategies.weights import (
    NOT_COMPARED,
    differences,
    flatten,
    holding_mean,
    mean_of_all,
    unflatten_into,
    weight_hash,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

Selection = Literal["random", "shuffled", "partitioned"]
_GAIN: Mapping[Start, Mapping[int, float]] = {"pretrained": {5: 0.23, 50: 0.45}, "scratch": {5: 0.08, 50: 0.15}}
"""Share of per-step averaging's gain over one machine, by how many of 1000 weights a step averages:
``benchmarks/strategies.py``, a language model (from scratch with 50: an earlier check of 300 steps)."""
_LOSS: Mapping[Start, Mapping[int, float]] = {"pretrained": {5: 0.074, 50: 0.057}, "scratch": {5: 0.084, 50: 0.059}}
"""Loss over per-step averaging, of the same runs."""
_DELAY = 5
"""Offered to a plan; the paper found up to 10 steps to cost nothing."""


class SpartaOptions(Section):
    """Options of :class:`Sparta`."""

    share: float = option(0.005, "share of the weights that is averaged at once", gt=0, le=1)
    interval: int = option(1, "steps between exchanges", unit="steps", ge=1)
    selection: Selection = option(
        "random",
        "which weights: random, new ones each time; shuffled, all in one random order for ever; partitioned, all in a "
        "random order, and then in another one",
    )
    delay: int = option(0, "steps of training that an exchange may overlap", unit="steps", ge=0, advanced=True)
    weighting: Literal["equal", "samples"] = option(
        "equal", "what a member counts in a mean: as much as any other, or by its samples", advanced=True
    )

    @model_validator(mode="after")
    def _fits_together(self) -> SpartaOptions:
        if self.delay > self.longest_delay:
            problem = f"must be at most {self.longest_delay} here, or stale means of the same weights would be merged"
            raise OptionError("delay", problem)
        return self

    @property
    def longest_delay(self) -> int:
        """Longest delay at which a weight is rarely in flight twice: the same difference applied twice overshoots."""
        return max(self.interval, int(0.5 * self.interval / self.share))

    def selected_indices(self, number: int, size: int, seed: int) -> NDArray[np.int64]:
        """Return the indices of ``size`` weights that exchange ``number`` of a run averages, ascending and distinct."""
        count = min(size, max(1, round(self.share * size)))
        cycle, position = divmod(number, math.ceil(size / count)) if count else (0, 0)
        if self.selection == "random":
            cycle, position = number, 0
        elif self.selection == "shuffled":
            cycle = 0
        return np.sort(permuted(position * count, min((position + 1) * count, size), size, seed, cycle))


class SpartaCosts(OptionCosts[SpartaOptions]):
    """Few values at every exchange, and all weights at every evaluation."""

    codecs = ("fp32", "bf16", "fp16")
    exact = False
    vectors = 2  # of an evaluation: own weights and their mean
    on_device = False
    interval_option = "sparta.interval"
    merge_ns = 2.0  # selecting, reading and writing 0.5 % of 37.7 M weights
    sources: ClassVar[Mapping[str, str]] = {
        "sparta": "SPARTA of 0.5 and 5 %: own check, 0.9 M parameters, 4 members; the paper trains longer"
    }

    def why_not_ranked(self, run: RunSpec) -> str:
        if run.lora:
            return "single numbers of two adapters averaged are of no use: only their product is a change of weights"
        loss_is_known = run.texts or run.start == "scratch"
        return "" if loss_is_known else "what it costs in loss was measured for language models and from scratch only"

    def elements(self, trainable: int) -> int:
        count = max(1, round(self._options.share * trainable))
        return count if self._options.selection == "random" else trainable // max(1, math.ceil(trainable / count))

    def longest(self, trainable: int) -> int:
        return trainable

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        yield SyncSchedule(self._options.interval, self._options.delay)
        if not self._options.delay and self._options.longest_delay >= _DELAY:
            yield SyncSchedule(self._options.interval, _DELAY)

    def hidden(self, exchange: float, compute: Compute, schedule: SyncSchedule, settings: OptionsByOwner) -> float:
        return min(exchange, min(schedule.delay, schedule.interval) * compute.seconds)

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        per_thousand = 1000 * self._options.share / schedule.interval
        gain, loss = (interpolate(table[run.start], per_thousand) for table in (_GAIN, _LOSS))
        return Learning(merge_efficiency(effective_members, max(0.0, gain)), max(0.0, loss), ("sparta",))

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        return {self.interval_option: schedule.interval, "sparta.delay": schedule.delay, "error_feedback": False}


@dataclass(frozen=True)
class _ExchangeOutcome:
    """Result of an exchange, without its mean."""

    members: tuple[int, ...]
    late: bool
    """Part of this member's contribution is not in the mean."""
    unfit: str
    """Parameter of this member that is not finite, so that its contribution was refused; empty: all are finite."""
    empty: bool
    """No member contributed: there is no mean."""


@dataclass
class _PendingExchange:
    """An exchange in flight."""

    step: int
    values: torch.Tensor
    """This member's contribution."""
    pending: Pending[MeanResult] | None = None
    mean: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    outcome: _ExchangeOutcome | None = None


@register
class Sparta(Strategy):
    """Average a share of the weights in every step."""

    name: ClassVar[str] = "sparta"
    summary: ClassVar[str] = "a small share of the weights averaged in every step; the members' weights differ"
    options = SpartaOptions
    costs = SpartaCosts(SpartaOptions())
    scales_learning_rate = ()  # a weight is averaged too rarely: with it all models ended worse than on one machine
    equal = "never"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._options = context.settings.of(SpartaOptions)
        self._codec = codec_by_name(self.codec(context.settings))
        self._in_flight: deque[_PendingExchange] = deque()
        self._step = -1
        self._weight = 0.0
        self._averaged = False
        self._before = Traffic()

    @classmethod
    def why_only_own_codecs(cls, settings: StrategySettings) -> str:
        return CODEC_FOR_DIFFERENCES

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        return "with sparta: what is sent here are weights, and rounding one does not add up"

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        options = settings.of(SpartaOptions)
        return SyncSchedule(options.interval, options.delay)

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        schedule = cls.sync_schedule(settings)
        shorter = min(interval, schedule.interval)
        return settings.with_options_of(cls.name, interval=shorter, delay=min(schedule.delay, shorter))

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._ends = np.cumsum([parameter.numel() for parameter in self._parameters])

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        self._step, self._averaged = step, False
        self._weight += weight

    @property
    def steps_to_average(self) -> int | None:
        return 0 if self._is_due(self._step) or (self._sends(self._step) and not self._options.delay) else None

    def _sends(self, step: int) -> bool:
        return (step + 1) % self._options.interval == 0

    def _is_due(self, step: int) -> bool:
        return bool(self._in_flight) and self._in_flight[0].step + self._options.delay <= step

    def end_step(self) -> SyncEvent | None:
        if self._alone:
            return None
        report = self._merge() if self._is_due(self._step) else None
        if self._sends(self._step):
            self._send()
            report = report if self._options.delay else self._merge()
        return report

    def finish(self) -> SyncEvent | None:
        """Merge what is in flight, then average all weights: afterwards every member holds their mean."""
        if self._alone:
            return None
        while self._in_flight:
            self._merge()
        before, weights = self._exchange.traffic.copy(), flatten(self._parameters, torch.device("cpu"))
        result = mean_of_all(weights, self._exchange, "sparta/consensus")
        unflatten_into(self._parameters, mean := result.mean)
        self._averaged, self._members = True, result.members
        traffic = self._exchange.traffic.since(before)
        digest, comparison = weight_hash(mean), differences(weights, mean)
        return sync_event(traffic, self._number(self._step) + 2, self._members, digest, *comparison)

    # ------------------------------------------------------------------------------------------------- one exchange

    def _number(self, step: int) -> int:
        return step // self._options.interval

    def _selected(self, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield parameter numbers with the indices of their weights that are exchanged after a step."""
        size = int(self._ends[-1]) if len(self._ends) else 0
        chosen = self._options.selected_indices(self._number(step), size, self.context.seed)
        starts = [0, *np.searchsorted(chosen, self._ends).tolist()]
        sizes = [parameter.numel() for parameter in self._parameters]
        # From indices in all weights to those in each parameter.
        chosen -= np.repeat(self._ends - np.array(sizes), np.diff(starts))
        indices = to_device(torch.from_numpy(chosen), self._parameters[0].device)
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            if start < stop:
                yield number, indices[start:stop].to(self._parameters[number].device)

    def _send(self) -> None:
        if not self._in_flight:
            self._before = self._exchange.traffic.copy()
        pieces = [
            self._parameters[number].detach().reshape(-1)[indices] for number, indices in self._selected(self._step)
        ]
        values = flatten(pieces)
        weight = self._weight if self._options.weighting == "samples" else 1.0
        self._weight = 0.0
        pending = self._exchange.start_mean(f"sparta/{self._step}", values, weight, self._codec)
        self._in_flight.append(_PendingExchange(self._step, values, pending))

    def _settle(self, sent: _PendingExchange) -> _ExchangeOutcome:
        """Wait for an exchange."""
        if sent.outcome is None:
            assert sent.pending is not None
            result = sent.pending.wait()
            non_finite = "" if result.is_finite else self._first_non_finite(sent)
            sent.outcome = _ExchangeOutcome(result.members, not result.included, non_finite, result.weight <= 0.0)
            sent.mean, sent.pending = result.mean, None
        return sent.outcome

    def _first_non_finite(self, sent: _PendingExchange) -> str:
        """Return the name of the first parameter with a sent value that is not finite."""
        offset = 0
        for number, indices in self._selected(sent.step):
            if not self._codec.carries(sent.values[offset : offset + indices.numel()]):
                return self._names[number]
            offset += indices.numel()
        return "a parameter"

    def _merge(self) -> SyncEvent:
        """Merge the oldest exchange in flight."""
        sent = self._in_flight[0]
        outcome = self._settle(sent)
        self._in_flight.popleft()
        self._members = outcome.members
        self._warn_of(sent.step, outcome)
        if not outcome.empty:
            self._write_mean(sent, keep_steps=bool(self._options.delay) and not outcome.unfit)
        traffic = self._exchange.traffic.since(self._before)
        self._before = self._exchange.traffic.copy()
        comparison = NOT_COMPARED if outcome.unfit or outcome.empty else differences(sent.values, sent.mean)
        return sync_event(traffic, self._number(sent.step) + 1, self._members, weight_hash(sent.mean), *comparison)

    def _write_mean(self, sent: _PendingExchange, keep_steps: bool) -> None:
        offset = 0
        for number, indices in self._selected(sent.step):
            parameter, span = self._parameters[number], slice(offset, offset + indices.numel())
            offset += indices.numel()
            flat = parameter.detach().reshape(-1)  # a copy if the parameter is not contiguous
            mean = sent.mean[span].to(flat.device)
            if keep_steps:
                mean = flat[indices] + (mean - sent.values[span].to(flat.device))
            flat[indices] = mean.to(flat.dtype)
            if flat.data_ptr() != parameter.data_ptr():
                unflatten_into([parameter], flat)

    def _warn_of(self, step: int, outcome: _ExchangeOutcome) -> None:
        self._non_finite_counter.count(outcome.unfit and f"step {step + 1}: the weight {outcome.unfit}")
        if outcome.late and not outcome.unfit:
            self.context.warn(f"step {step + 1}: this machine's weights came after the deadline")

    # ------------------------------------------------------------------------------------------------ between steps

    @property
    def synchronised(self) -> bool:
        return not self._in_flight and self._sends(self._step)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if self._averaged or self._alone:
            yield
            return
        with holding_mean(self._parameters, self._exchange, "sparta/consensus"):
            self._before = self._exchange.traffic.copy()
            yield

    # ---------------------------------------------------------------------------------------------------- snapshots

    def _with_result(self) -> list[_PendingExchange]:
        """Wait for the exchanges in flight, and return those with a result; if the group is lost, others did not
        begin."""
        for sent in self._in_flight:
            try:
                self._settle(sent)
            except ExchangeError:
                break
        return [sent for sent in self._in_flight if sent.outcome is not None]

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for sent in self._with_result():
            tensors |= {f"sent/{sent.step}": sent.values, f"mean/{sent.step}": sent.mean}
        return tensors

    def state(self) -> dict[str, Any]:
        in_flight = [{"step": sent.step, **asdict(self._settle(sent))} for sent in self._with_result()]
        in_flight = [{**entry, "members": list(entry["members"])} for entry in in_flight]
        return {"step": self._step, "weight": self._weight, "under_way": in_flight}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._step, self._weight = int(state["step"]), float(state["weight"])
        self._in_flight.clear()
        for entry in state["under_way"]:
            outcome = {**entry, "members": tuple(entry["members"])}
            step = outcome.pop("step")
            values, mean = tensors[f"sent/{step}"], tensors[f"mean/{step}"]
            self._in_flight.append(_PendingExchange(step, values, None, mean, _ExchangeOutcome(**outcome)))
