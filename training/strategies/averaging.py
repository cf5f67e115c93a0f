"""Weights averaged every H steps: the base of local SGD and federated averaging.

A lossless codec sends the weights themselves. With a lossy one the difference to the last mean is sent, which is small,
so that little is lost; all members then hold that mean, and compare it in every round.

If means are over groups that change in every round, the groups follow from the run's seed, the round and the members
(:func:`shuffled`, :func:`islands`), so that each member computes them without messages.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from profiles.declarations import Section, option
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, Group, MeanResult
from training.exchange.codecs import codec_by_name
from training.exchange.error_feedback import ErrorFeedback
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.costs import Learning, RunSpec, SyncSchedule, interpolate, merge_efficiency
from training.strategies.parts.outer_costs import IntervalCosts, diloco_learning
from training.strategies.weights import (
    NOT_COMPARED,
    agreement_flags,
    difference_warning,
    differences,
    flatten,
    hashes_differ,
    non_finite_parameter,
    sync_weights,
    unflatten_into,
    weight_hash,
)

_LOSS = {1: 0.0, 8: 0.058, 30: 0.062, 100: 0.067}
"""Loss from scratch over per-step averaging, by interval: 2.875 against 2.717 (``benchmarks/strategies.py``, three
seeds), 2.664 and 2.676 against 2.508, one seed; an average in every step is one of gradients."""
_GAIN = {1: 1.0, 8: 0.36, 30: 0.11, 100: 0.04}
"""Share of per-step averaging's gain over one machine (2.683 from scratch), by interval."""


class AveragingOptions(Section):
    """Options of a strategy :class:`RoundStrategy`."""

    sync_interval: int = option(50, "steps between averages", unit="steps", ge=1)


class AveragingCosts(IntervalCosts):
    """One mean of all trainable parameters every H steps."""

    vectors = 4  # the weights and their mean; with a lossy codec also the last mean and the difference to it
    sources: ClassVar[Mapping[str, str]] = {
        "averaging-scratch": "plain averages from scratch by H: own check, 0.9 M parameters, 4 members, 1 to 3 seeds",
    }

    def why_not_ranked(self, run: RunSpec) -> str:
        return "" if run.start == "scratch" else "diloco makes the same mean of a trained model, and sends less"

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        if run.start == "pretrained":  # diloco's outer step is the plain mean then
            return diloco_learning(run, schedule, effective_members)
        gain, loss = (interpolate(table, schedule.interval, extended=True) for table in (_GAIN, _LOSS))
        sources = ("averaging-scratch", *codec_by_name(run.codec).sources)
        return Learning(merge_efficiency(effective_members, max(0.0, gain)), loss, sources)


class RoundStrategy(Strategy):
    """Base class: each member trains alone for ``H`` steps, and then a round of synchronisation follows."""

    options: ClassVar[type[AveragingOptions]] = AveragingOptions

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        return SyncSchedule(settings.of(cls.options).sync_interval)

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return settings.with_options_of(cls.name, sync_interval=min(interval, cls.sync_schedule(settings).interval))

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._codec = codec_by_name(self.codec(context.settings))
        self._interval = self.sync_schedule(context.settings).interval
        self._round = self._inner = 0
        self._weight = 0.0

    def _weights(self) -> torch.Tensor:
        return flatten(self._parameters, torch.device("cpu"))

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        self._weight += weight

    @property
    def steps_to_average(self) -> int | None:
        return 0 if self._inner + 1 >= self._interval else None

    def end_step(self) -> SyncEvent | None:
        self._inner += 1
        return self._end_round() if self._inner >= self._interval else None

    @abstractmethod
    def _end_round(self) -> SyncEvent:
        """Synchronise, and begin the next round; a collective of all members."""

    def _begin_round(self) -> None:
        self._round += 1
        self._inner, self._weight = 0, 0.0

    @property
    def synchronised(self) -> bool:
        return self._inner == 0

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "inner": self._inner, "weight": self._weight}

    def newcomer_state(self) -> dict[str, Any]:
        return self.state() | {"weight": 0.0}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._round, self._inner, self._weight = int(state["round"]), int(state["inner"]), float(state["weight"])


class Averaging(RoundStrategy):
    """Base class: each member trains alone for ``H`` steps, then all continue from a mean of their weights.

    The mean is weighted by samples (or tokens) of these steps. A member that is too late, or whose weights are not
    finite, is not in the mean but continues from it like the others; with a lossy codec its late difference is added to
    the next one. ``drift`` of a report is the largest distance of this member's weights from the mean.
    """

    is_elementwise = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._last_mean: torch.Tensor | None = None

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        lossy = exchange.engine != "solo" and self._codec.name != "fp32"
        self._last_mean = self._weights() if lossy else None
        stream = self.name if lossy and self.context.settings.error_feedback else ""
        self._feedback = ErrorFeedback(self._codec, exchange, stream)

    def finish(self) -> SyncEvent | None:
        return self._end_round() if self._inner else None

    def _end_round(self) -> SyncEvent:
        before, weights = self._exchange.traffic.copy(), self._weights()
        result = self._mean_of_weights(weights)
        self._begin_round()
        if self._last_mean is not None:
            mean = self._last_mean.add_(result.mean)
        else:  # if no member contributed, weights stay as they are
            mean = result.mean if result.weight else weights
        self._warn_of(weights, result)
        unflatten_into(self._parameters, mean)
        comparison = differences(weights, mean, out=weights) if result.is_finite else NOT_COMPARED
        if hashes_differ(result.flags):
            _, drift, source = sync_weights(self._parameters, self._exchange, f"{self.name}/mend")
            if source is not None:
                self.context.warn(f"round {self._round}: {difference_warning(drift, source)}")
                self._last_mean = mean = self._weights()
        traffic = self._exchange.traffic.since(before)
        return sync_event(traffic, self._round, result.members, weight_hash(mean), *comparison)

    def _mean_of_weights(self, weights: torch.Tensor) -> MeanResult:
        """Return the mean from which this member continues; a collective of all members."""
        result = self._mean(weights)
        self._members = result.members
        return result

    def _mean(self, weights: torch.Tensor, group: Group | None = None, counts: bool = True) -> MeanResult:
        """Return a mean of weights, or of their differences to the last mean.

        Args:
            group: ranks to average; ``None``: all.
            counts: whether this member contributes.
        """
        flags, weight = b"", self._weight if counts else 0.0
        sent = weights
        if self._last_mean is not None:
            sent = weights - self._last_mean
            sent = self._feedback.compensate(sent) if counts else sent
            if self.context.settings.verify_interval:
                flags = agreement_flags(weight_hash(self._last_mean))
        name = f"{self.name}/{self._round}"
        result = self._exchange.mean(name, sent, weight, self._codec, flags, self._feedback.stream, group)
        if self._last_mean is not None and counts:
            self._feedback.settle(sent, weight, result)
        return result

    def _warn_of(self, weights: torch.Tensor, result: MeanResult) -> None:
        non_finite = (
            "" if result.is_finite else non_finite_parameter(self._names, self._parameters, weights, self._codec)
        )
        self._non_finite_counter.count(non_finite and f"round {self._round}: the weight {non_finite}")
        if result.is_finite and not result.included:
            outcome = "is lost" if self._last_mean is None else "counts in the next one"
            self.context.warn(f"round {self._round}: what this machine learned came too late and {outcome}")

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.newcomer_tensors() | self._feedback.tensors()

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {} if self._last_mean is None else {"mean": self._last_mean}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        super().load(tensors, state)
        self._feedback.load(tensors)
        if self._last_mean is not None:
            self._last_mean.copy_(tensors["mean"])


def shuffled(ranks: Sequence[int], seed: int, round_: int) -> list[int]:
    """Return ranks in a pseudo-random order by SHA-256, which is the same with every library version."""
    return sorted(ranks, key=lambda rank: hashlib.sha256(f"{seed}/{round_}/{rank}".encode()).digest())


def islands(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Cut ranks, in their order, into the fewest islands of at most ``size``; 0: one island of all."""
    count = math.ceil(len(ranks) / size) if size else 1
    return [list(ranks[len(ranks) * i // count : len(ranks) * (i + 1) // count]) for i in range(count)]
