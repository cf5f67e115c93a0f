"""Streaming DiLoCo: the weights are merged in fragments, one after the other, while training continues.

Douillard et al. 2025 (arXiv 2501.18512), algorithm 2. A round of fragment ``p`` of ``P`` starts at the steps
``t = t_p mod H`` with ``t_p = p H / P``: every member sends the pseudo-gradient ``anchor_p - theta_p``; ``tau`` steps
later the outer step on the mean moves the anchor, which is mixed with the member's weights (equation 3)::

    theta_p = alpha theta_p + (1 - alpha) anchor_p

So the bytes of DiLoCo are spread over the interval, and ``tau`` steps of compute hide each exchange. The anchors are
equal on all members: they are evaluated and saved, and newcomers start from them. The weights differ between members:
``drift`` of a report is the largest distance of this member's weights from the anchor when they were mixed. After the
last step all fragments are merged once more, by their mean alone: momentum would move them as far as in a full round,
and no training follows to correct that.

From Decoupled DiLoCo (arXiv 2604.21428): ``merge = rda`` averages norm and direction separately
(:mod:`training.strategies.parts.rda`), and ``weighting = tokens-squared-per-step`` counts a member's work as
``tokens^2 / steps`` (its tokens times its tokens per step), for members that did unequal work since the fragment's last
round. A member alone overlaps nothing, and trains as without a strategy unless outer rates are set.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import model_validator

from profiles.declarations import OptionError, OptionsByOwner, option
from profiles.schema import StrategySettings
from training.exchange.base import Exchange
from training.lazy import nn, torch
from training.strategies.base import StrategyContext
from training.strategies.costs import Compute, Learning, RunSpec, SyncSchedule
from training.strategies.diloco import DiLoCo
from training.strategies.parts.fragments import Piece, fragments_of
from training.strategies.parts.outer_costs import OVERLAP, OuterCosts
from training.strategies.parts.outer_fragment import FragmentSpec, OuterFragment, PseudoGradientMean
from training.strategies.parts.outer_optimizers import OuterOptimizer, OuterOptions
from training.strategies.parts.rda import RadialDirectional
from training.strategies.registry import register
from training.strategies.weights import differences

_NAME = "streaming_diloco"
_MIXING = 0.5
"""Alpha of an overlapped merge, as in the paper."""
_SHORT_OVERLAP = 1
"""Steps of overlap up to which a merge drops so little that nothing needs mixing: it ends as ``diloco`` does
(``benchmarks/strategies.py``)."""
_SHORT_OVERLAP_INTERVAL = 8
"""The shortest interval for which that was measured."""


class StreamingOptions(OuterOptions):
    """Options of :class:`StreamingDiLoCo`."""

    sync_interval: int = option(50, "steps from one turn of a fragment to its next, H", unit="steps", ge=1)
    fragments: int = option(4, "fragments of the weights, P, which are merged in turns", ge=1)
    sync_delay: int = option(
        -1,
        "steps of training that each exchange overlaps with; -1: at most 5, and not longer than a turn, H / P",
        unit="steps",
        ge=-1,
        advanced=True,
    )
    mixing: float = option(
        -1.0,
        "share of a member's own weights that stays in a merge, alpha; -1: 0.5 where 2 steps or more overlap, else 0",
        ge=-1,
        lt=1,
        advanced=True,
    )
    merge: Literal["mean", "rda"] = option(
        "mean", "mean of the deltas, or rda: their norms and directions averaged apart", advanced=True
    )
    weighting: Literal["tokens", "tokens-squared-per-step"] = option(
        "tokens", "what a member's work counts by (samples, or tokens of a language model)", advanced=True
    )

    @model_validator(mode="after")
    def _fits_together(self) -> StreamingOptions:
        if self.sync_delay >= self.sync_interval:
            raise OptionError("sync_delay", f"must be below sync_interval ({self.sync_interval})")
        if self.fragments > self.sync_interval:
            raise OptionError("fragments", f"at most sync_interval ({self.sync_interval}): each has a step of its own")
        return self

    @property
    def overlap(self) -> int:
        """Steps that a mean overlaps with, tau."""
        chosen = min(OVERLAP, self.sync_interval // self.fragments) if self.sync_delay < 0 else self.sync_delay
        return min(chosen, self.sync_interval - 1)

    @property
    def alpha(self) -> float:
        """Share of a member's own weights that stays in a merge."""
        if self.mixing >= 0:
            return self.mixing
        return _MIXING if self.overlap > _SHORT_OVERLAP else 0.0


class StreamingCosts(OuterCosts):
    """The bytes of DiLoCo, in fragments that are each hidden behind the steps they overlap with."""

    losses: ClassVar = {**OuterCosts.losses, "texts": {10: 0.078, 30: 0.052, 176: 0.0}}
    gains: ClassVar = {**OuterCosts.gains, "texts": {10: 0.21, 30: 0.49, 176: 1.0}}
    interval_losses: ClassVar = {**OuterCosts.interval_losses, "texts": {8: 0.049, 24: 0.076, 50: 0.15}}
    interval_gains: ClassVar = {**OuterCosts.interval_gains, "texts": {8: 0.49, 24: 0.21, 50: 0.12}}
    # H = 50 as DiLoCo, and what overlap adds with H = 24
    sources: ClassVar[Mapping[str, str]] = {
        **OuterCosts.sources,
        "streaming": "fragments in turns: loss 2.66, data parallel 2.67, 1 B, 2 members (arXiv 2501.18512)",
    }

    def __init__(self, name: str, options: StreamingOptions) -> None:
        self._fragments = options.fragments
        # Anchor and momentum; of a fragment delta, weights, mean and outer update.
        self.vectors = 2 + -(-4 // options.fragments)
        super().__init__(name, options)

    def device_vectors(self, error_feedback: bool) -> float:
        return error_feedback * (1 + 1 / self._fragments)

    def why_not_ranked(self, run: RunSpec) -> str:
        loss_is_known = run.texts or run.start == "scratch"
        return "" if loss_is_known else "what it costs in loss was measured for language models and from scratch only"

    def why_unsupported(self, run: RunSpec, schedule: SyncSchedule) -> str:
        too_short = schedule.interval < self._fragments
        return (
            f"has {self._fragments} fragments, each of which needs a step of its own in an interval"
            if too_short
            else ""
        )

    def longest(self, trainable: int) -> int:
        return -(-trainable // self._fragments)

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        as_diloco = [schedule for schedule in super().sync_schedules(run) if not self.why_unsupported(run, schedule)]
        with_short_overlap = {
            SyncSchedule(schedule.interval, _SHORT_OVERLAP)
            for schedule in as_diloco
            if schedule.interval >= _SHORT_OVERLAP_INTERVAL
        }
        return iter(sorted({*as_diloco, *with_short_overlap}, key=lambda schedule: (schedule.interval, schedule.delay)))

    def hidden(self, exchange: float, compute: Compute, schedule: SyncSchedule, settings: OptionsByOwner) -> float:
        return min(exchange, self._fragments * schedule.delay * compute.seconds, schedule.interval * compute.seconds)

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        if schedule.delay > _SHORT_OVERLAP:
            learnt = super().learning(run, schedule, effective_members)
        else:
            learnt = OuterCosts(self._name, self._options).learning(run, schedule, effective_members)
        return Learning(learnt.share, learnt.loss, (*learnt.sources, "streaming"))


def _tokens_squared_per_step(tokens: float, steps: int) -> float:
    return tokens * tokens / max(1, steps)


@register
class StreamingDiLoCo(DiLoCo):
    """DiLoCo in fragments that are merged in turn."""

    name: ClassVar[str] = _NAME
    summary: ClassVar[str] = "as diloco, in fragments that take turns while training goes on; nobody waits for links"
    options = StreamingOptions
    costs = StreamingCosts(_NAME, StreamingOptions())
    numbers_fragments = True
    is_elementwise = False
    """Each device divides its part into fragments of its own, which merge in different steps."""
    final_merge_is_mean: ClassVar[bool] = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._options = context.settings.of(StreamingOptions)
        self._alpha = self._options.alpha
        self._drift = 0.0

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        options = settings.of(StreamingOptions)
        return SyncSchedule(options.sync_interval, options.overlap)

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        options = settings.of(StreamingOptions)
        shorter = min(interval, options.sync_interval)
        return settings.with_options_of(_NAME, sync_interval=shorter, fragments=min(options.fragments, shorter))

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        if exchange.engine == "solo":
            self.delay, self._alpha = 0, 0.0
        super().attach(model, exchange)

    def make_outer(self) -> OuterOptimizer:
        return self._options.make_outer(self.context.total_steps // self.interval, self.context.start, self._alone)

    def make_fragments(self, model: nn.Module) -> list[OuterFragment]:
        fragments = fragments_of(model, self._options.fragments)
        return [self._fragment_of(index, len(fragments), pieces) for index, pieces in enumerate(fragments)]

    def _fragment_of(self, index: int, count: int, pieces: list[Piece]) -> OuterFragment:
        names = [piece.name for piece in pieces]
        label = f"fragment {index + 1} of {count}, " if count > 1 else ""
        spec = FragmentSpec(f"stream/{index}", label, names, lambda: [piece.values for piece in pieces])
        directed_sizes = [piece.elements for piece in pieces if not piece.is_embedding]
        is_rda = self._options.merge == "rda" and directed_sizes and not self._alone
        fragment = self.make_fragment(
            spec, functools.partial(RadialDirectional, sizes=directed_sizes) if is_rda else PseudoGradientMean
        )
        fragment.keeps_sent_weights = fragment.carries_idle_delta = False
        if self._options.weighting == "tokens-squared-per-step":
            fragment.weigh = _tokens_squared_per_step
        fragment.inner_steps = -(index * self.interval // count) % self.interval
        return fragment

    def merge(self, fragment: OuterFragment, is_final: bool = False) -> float | None:
        self._drift = 0.0
        anchor_drift = super().merge(fragment, is_final)
        return anchor_drift if is_final or self._alone else self._drift

    def local_after_merge(self, fragment: OuterFragment) -> torch.Tensor:
        current, anchor = fragment.weights_and_anchor()
        self._drift, _, fragment.correlation = differences(current, anchor)
        return current.mul_(self._alpha).add_(anchor, alpha=1.0 - self._alpha) if self._alpha else anchor

    def holds_anchor(self, fragment: OuterFragment) -> bool:
        return not self._alpha and super().holds_anchor(fragment)
