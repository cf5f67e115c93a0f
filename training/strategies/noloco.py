"""NoLoCo: random pairs average in every round, without a mean of all members.

Kolehmainen et al. 2025 (arXiv 2506.10911). Member i trains for ``H`` steps from its slow weights phi_i to theta_i. Then
it is paired with a random member j, and with ``Delta = phi - theta`` and means over {i, j}::

    delta_i <- alpha delta_i - beta mean(Delta) - gamma (phi_i - mean(phi))
    phi_i   <- phi_i + delta_i,    theta_i <- phi_i

This is the paper's variant of Nesterov's momentum: ``outer_momentum`` is alpha, ``outer_lr`` beta, ``gossip`` gamma,
whose term pulls a pair's slow weights together; delta_i stays with its member. The authors' experiments have
alpha = 0.5, beta = gamma = 0.7, H = 50, and plain means; ``weighting = samples`` weights Delta by the samples of the
round. The slow weights of many members stay together if ``gamma < 2 (1 - alpha^2)``, by the second moments of their
differences under random pairs without training; a larger gamma is rejected. The paper's random routing of activations
between pipeline stages does not apply to members that hold whole models.

A member sends and receives 2 N values a round, independent of the number of members. Pairs follow from the run's seed,
the round, and the live members, which a greeting without content shows first; nothing else leaves a pair. With an odd
number of members one makes the outer step alone, and so does a pair as far as one of them is late. A member alone in
the run trains as without a strategy. A member without samples, or whose weights are not finite, has no weight in
mean(Delta) and takes its partner's.

Members hold different weights. Evaluated and saved is the plain mean of all, and after the last step all hold it. A
newcomer starts from the slow weights of its host, with delta = 0. ``drift`` is the largest distance of this member's
slow weights from their pair's mean before the outer step, and at the end from the mean of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from profiles.declarations import OptionError, option
from profiles.quantities import setting_text, three_digits
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, MeanResult
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.averaging import AveragingOptions, RoundStrategy, islands, shuffled
from training.strategies.base import CODEC_FOR_DIFFERENCES, StrategyContext, sync_event
from training.strategies.costs import ONLY_TEXTS, Learning, OptionCosts, RunSpec, Start, SyncSchedule, merge_efficiency
from training.strategies.parts.outer_costs import IntervalCosts, diloco_learning
from training.strategies.registry import register
from training.strategies.weights import (
    NOT_COMPARED,
    differences,
    holding_mean,
    mean_of_all,
    non_finite_parameter,
    unflatten_into,
    weight_hash,
)

_RATES: Mapping[Start, tuple[float, float]] = {"scratch": (0.7, 0.5), "pretrained": (1.0, 0.0)}
"""Outer learning rate and momentum: the authors'; for a pretrained model the plain mean, as with ``diloco``."""

_MORE_LOSS, _LESS_GAIN = 0.012, 0.12
"""Relative to DiLoCo, with 10 exchanges of a fine-tune: ``benchmarks/strategies.py``, means of three seeds."""


class NoLoCoOptions(AveragingOptions):
    """Options of :class:`NoLoCo`."""

    sync_interval: int = option(50, "steps between two meetings of a pair", unit="steps", ge=1)
    outer_lr: float = option(0.0, "outer learning rate (beta); 0: automatic", ge=0, advanced=True)
    outer_momentum: float = option(-1.0, "outer momentum (alpha); -1: automatic", ge=-1, lt=1, advanced=True)
    gossip: float = option(
        0.7, "how far a pair's slow weights are pulled to their mean (gamma); 0: not at all", ge=0, lt=2, advanced=True
    )
    weighting: Literal["equal", "samples"] = option(
        "equal", "what a member's change counts: as much as its partner's, or by its samples", advanced=True
    )

    @model_validator(mode="after")
    def _stays_together(self) -> NoLoCoOptions:
        momentum = self.outer_momentum if self.outer_momentum >= 0 else max(mu for _, mu in _RATES.values())
        if self.gossip >= (limit := 2 * (1 - momentum * momentum)):
            condition = f"with outer_momentum = {setting_text(momentum)}, or the members fly apart"
            problem = f"must be below {three_digits(limit)} {condition}"
            raise OptionError("gossip", problem)
        return self

    def rates(self, start: Start) -> tuple[float, float]:
        """Return outer learning rate and momentum."""
        rate, momentum = _RATES[start]
        return self.outer_lr or rate, self.outer_momentum if self.outer_momentum >= 0 else momentum


class NoLoCoCosts(OptionCosts[NoLoCoOptions], IntervalCosts):
    """Two vectors of all trainable parameters every H steps, between two members."""

    codecs = ("fp32", "bf16", "fp16")
    vectors = 5  # slow weights, momentum, change and two means
    group = 2
    interval_option = "noloco.sync_interval"
    sources: ClassVar[Mapping[str, str]] = {
        "noloco": "as DiLoCo; own check, three seeds: 1.2 % more loss; the paper (arXiv 2506.10911) has up to 4 % less"
    }

    def why_not_ranked(self, run: RunSpec) -> str:
        return "" if run.trains_texts else ONLY_TEXTS

    def elements(self, trainable: int) -> int:
        return 2 * trainable

    def longest(self, trainable: int) -> int:
        return trainable

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        as_diloco = diloco_learning(run, schedule, effective_members)
        share = max(
            merge_efficiency(effective_members, 0.0),
            as_diloco.share - 1.0 + merge_efficiency(effective_members, 1.0 - _LESS_GAIN),
        )
        return Learning(share, as_diloco.loss + _MORE_LOSS, ("noloco",))

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        rate, momentum = self._options.rates(run.start)
        chosen = {"noloco.outer_lr": rate, "noloco.outer_momentum": momentum}
        return {self.interval_option: schedule.interval, "error_feedback": False, **chosen}


@register
class NoLoCo(RoundStrategy):
    """Average with one random partner every ``H`` steps."""

    name: ClassVar[str] = "noloco"
    summary: ClassVar[str] = "changing pairs share an outer step every so many steps; the members' weights differ"
    options = NoLoCoOptions
    costs = NoLoCoCosts(NoLoCoOptions())
    equal = "never"
    anchored = True
    is_elementwise = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._options = context.settings.of(NoLoCoOptions)
        self._rate, self._mu = self._options.rates(context.start)
        self._averaged = False

    @classmethod
    def why_only_own_codecs(cls, settings: StrategySettings) -> str:
        return CODEC_FOR_DIFFERENCES

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        return "with noloco, whose codecs drop nothing that adds up"

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._slow = self._weights()
        self._momentum = torch.zeros_like(self._slow)

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        super().begin_step(step, weight, scale)
        self._averaged = False

    def finish(self) -> SyncEvent | None:
        """End the last round if there were steps in it; then all members take the mean of their slow weights."""
        before = self._exchange.traffic.copy()
        if self._inner:
            self._end_round()
        result = mean_of_all(self._slow, self._exchange, f"{self.name}/consensus")
        mean = result.mean
        comparison = differences(self._slow, mean) if len(result.members) > 1 else NOT_COMPARED
        self._slow.copy_(mean)
        unflatten_into(self._parameters, mean)
        self._averaged, self._members = True, result.members
        traffic = self._exchange.traffic.since(before)
        return sync_event(traffic, self._round + 1, self._members, weight_hash(mean), *comparison)

    # ----------------------------------------------------------------------------------------------------- one round

    def _end_round(self) -> SyncEvent:
        before, current, name = self._exchange.traffic.copy(), self._weights(), f"{self.name}/{self._round}"
        self._members = tuple(sorted(self._exchange.gather(f"{name}/greeting", b"")))
        order = shuffled(self._members, self.context.seed, self._round)
        pair = tuple(sorted(next(candidate for candidate in islands(order, 2) if self._exchange.rank in candidate)))
        averaged_members, drift, correlation, norm = pair, None, None, None
        if len(self._members) > 1:
            change = torch.sub(self._slow, current, out=current)
            weight = self._weight if self._options.weighting == "samples" else float(self._weight > 0)
            pending_change = self._exchange.start_mean(f"{name}/change", change, weight, self._codec, members=pair)
            pending_slow = self._exchange.start_mean(f"{name}/slow", self._slow, 1.0, self._codec, members=pair)
            change_result, slow_result = pending_change.wait(), pending_slow.wait()
            averaged_members = slow_result.members
            self._warn_of(change_result, change, slow_result)
            mean = _mean_of_pair(slow_result, self._slow) if slow_result.weight else self._slow.clone()
            if len(averaged_members) > 1 and slow_result.is_finite:
                drift, _, correlation = differences(self._slow, mean)
            norm = float(torch.linalg.vector_norm(change)) if change_result.is_finite else None
            self._outer_step(_mean_of_pair(change_result, change), mean)
        else:  # no partner: the member continues from its own weights
            self._slow.copy_(current)
            self._momentum.zero_()
        self._begin_round()
        unflatten_into(self._parameters, self._slow)
        return sync_event(
            self._exchange.traffic.since(before), self._round, averaged_members, "", drift, norm, correlation
        )

    def _outer_step(self, mean_change: torch.Tensor, mean: torch.Tensor) -> None:
        """Make the outer step; the means may be overwritten."""
        pull = torch.sub(self._slow, mean, out=mean).mul_(self._options.gossip)
        self._momentum.mul_(self._mu).sub_(mean_change.mul_(self._rate)).sub_(pull)
        self._slow.add_(self._momentum)

    def _warn_of(self, change_result: MeanResult, change: torch.Tensor, slow_result: MeanResult) -> None:
        round_label, non_finite = f"round {self._round + 1}", ""
        for result, contribution in ((slow_result, self._slow), (change_result, change)):
            if not result.is_finite:
                non_finite = non_finite_parameter(self._names, self._parameters, contribution, self._codec)
        self._non_finite_counter.count(non_finite and f"{round_label}: the weight {non_finite}")
        if not (non_finite or (change_result.included and slow_result.included)):
            self.context.warn(f"{round_label}: this machine came after the deadline and goes on without a partner")

    # ------------------------------------------------------------------------------------------------ between rounds

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the mean of all members' weights."""
        if self._averaged or self._alone:
            yield
            return
        with holding_mean(self._parameters, self._exchange, f"{self.name}/consensus"):
            yield

    # ----------------------------------------------------------------------------------------------------- snapshots

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"slow": self._slow, "momentum": self._momentum}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {"slow": self._slow}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._slow.copy_(tensors["slow"])
        if "momentum" in tensors:
            self._momentum.copy_(tensors["momentum"])
        super().load(tensors, state)


def _mean_of_pair(result: MeanResult, values: torch.Tensor) -> torch.Tensor:
    """Return a pair's mean, with this member's own ``values`` where they were too late for it."""
    if result.is_finite:
        for start, stop in result.left_out:
            result.mean[start:stop] = values[start:stop]
    return result.mean
