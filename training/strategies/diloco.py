"""DiLoCo: many inner steps on each member, then one outer step on the mean of their pseudo-gradients.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105),
algorithm 1. All members hold the same anchor ``theta``. In every round::

    theta_i <- theta                             each member starts from the anchor
    theta_i <- InnerOpt(theta_i)  H times        inner steps on its own batches: the trainer's optimizer
    delta_i  = theta - theta_i                   the pseudo-gradient
    delta    = sum_i w_i delta_i / sum_i w_i     its mean over the members; w_i: their samples, or tokens
    theta   <- OuterOpt(theta, delta)            the outer step, by default Nesterov's:
                                                 m <- mu m + delta, theta <- theta - lr (delta + mu m)

With ``sync_delay`` tau the mean is computed during the next tau inner steps. They are kept when the late delta arrives
and the anchor moves to ``theta'`` (delay-corrected merge, LOSCAR-SGD, arXiv 2605.20866)::

    theta_i <- theta' + (theta_i - theta_i when it was sent)

Failures: a member that is lost, late or not finite does not stop the others. The mean is over the deltas that arrived
in time; a late delta is added to that member's next one; weights that are not finite are replaced by the anchor.

Read on in :mod:`training.strategies.parts.outer_fragment` (the anchor, the pseudo-gradient, the merge of one round) and
:mod:`training.strategies.parts.outer_optimizers` (the outer optimizers).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from profiles.declarations import OptionError, Section, option
from profiles.schema import StrategySettings
from training.exchange.staging import to_device
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.base import StrategyContext
from training.strategies.costs import SyncSchedule
from training.strategies.parts.outer_costs import OuterCosts
from training.strategies.parts.outer_fragment import FragmentSpec, OuterFragment
from training.strategies.parts.outer_optimizers import OuterOptimizer, OuterOptions, momentum_option, rate_option
from training.strategies.parts.outer_strategy import OuterStrategy
from training.strategies.registry import register


class DiLoCoOptions(OuterOptions):
    """Options of :class:`DiLoCo`."""

    sync_interval: int = option(50, "steps between synchronisations", unit="steps", ge=1, alias="sync_interval")
    sync_delay: int = option(
        0, "steps of training that an exchange may overlap", unit="steps", ge=0, advanced=True, alias="sync_delay"
    )
    outer_lr: float = rate_option(alias="outer_lr")
    outer_momentum: float = momentum_option(alias="outer_momentum")

    @model_validator(mode="after")
    def _fits_together(self) -> DiLoCoOptions:
        if self.sync_delay >= self.sync_interval:
            raise OptionError("sync_delay", f"must be below sync_interval ({self.sync_interval})")
        return self


@register
class DiLoCo(OuterStrategy):
    """Merge the weights every ``H`` steps through an outer optimizer."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "weights merged every so many steps by an outer Nesterov step; sends little"
    options: ClassVar[type[Section]] = DiLoCoOptions
    costs = OuterCosts("diloco", DiLoCoOptions())
    numbers_fragments = False
    is_elementwise = True
    final_merge_is_mean: ClassVar[bool] = False
    """Whether the last, shorter rounds move the anchor by the mean delta alone, without an outer step."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        schedule = self.sync_schedule(context.settings)
        self.interval, self.delay = schedule.interval, min(schedule.delay, schedule.interval - 1)

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        options = settings.of(DiLoCoOptions)
        return SyncSchedule(options.sync_interval, options.sync_delay)

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return settings.with_options_of("diloco", sync_interval=min(interval, cls.sync_schedule(settings).interval))

    def make_fragments(self, model: nn.Module) -> list[OuterFragment]:
        fragment = self.make_fragment(FragmentSpec("diloco", "", self._names, lambda: self._parameters))
        fragment.keeps_sent_weights = self.delay > 0  # without overlap no step is made before the merge
        return [fragment]

    def make_outer(self) -> OuterOptimizer:
        options, rounds = self.context.settings.of(DiLoCoOptions), self.context.total_steps // self.interval
        return options.make_outer(rounds, self.context.start, self._alone)

    # -------------------------------------------------------------------------------------------------- the algorithm

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        """Inner step: the trainer makes it; its samples count towards the weight ``w_i`` of the delta."""
        for fragment in self._fragments:
            fragment.begin_step(weight)

    def end_step(self) -> SyncEvent | None:
        """After an inner step: merge rounds that are ``tau`` steps old, and start one after ``H`` steps."""
        for fragment in self._fragments:
            fragment.inner_steps += 1
        arrived = [
            fragment for fragment in self._fragments if fragment.in_flight and fragment.inner_steps >= self.delay
        ]
        merged = [(fragment, self.merge(fragment)) for fragment in arrived]
        due = [fragment for fragment in self._fragments if fragment.inner_steps >= self.interval]
        for fragment in due:
            fragment.start_round()  # sends the pseudo-gradient, anchor - weights
        if not self.delay:
            merged += [(fragment, self.merge(fragment)) for fragment in due]
        return self._report(merged)

    def merge(self, fragment: OuterFragment, is_final: bool = False) -> float | None:
        """Outer step: wait for the mean of the pseudo-gradients, move the anchor, and continue from it.

        Args:
            is_final: no inner step follows, so the member takes the anchor itself.

        Returns:
            the drift to report, see :class:`~training.records.events.SyncEvent`.
        """
        if is_final:
            drift = fragment.merge(_anchor_of, self.final_merge_is_mean)
        else:
            drift = fragment.merge(self.local_after_merge)
        self._members, self._unsent_steps = fragment.members, fragment.inner_steps
        self._rounds += 1
        return drift

    def local_after_merge(self, fragment: OuterFragment) -> torch.Tensor:
        """Return this member's flat weights after the anchor moved: the anchor, plus the steps made during the mean."""
        if not fragment.inner_steps:
            return fragment.anchor
        assert fragment.sent_weights is not None
        current, anchor = fragment.weights_and_anchor()
        return current.sub_(to_device(fragment.sent_weights, current.device)).add_(anchor)

    def finish(self) -> SyncEvent | None:
        """After the last inner step: merge what is in flight and what is left; then all members hold the anchors."""
        merged = [(fragment, self.merge(fragment)) for fragment in self._fragments if fragment.in_flight]
        remaining = [fragment for fragment in self._fragments if not self.holds_anchor(fragment)]
        for fragment in remaining:
            fragment.start_round()
        merged += [(fragment, self.merge(fragment, is_final=True)) for fragment in remaining]
        return self._report(merged)

    @property
    def steps_to_average(self) -> int | None:
        return self.delay if any(fragment.inner_steps + 1 >= self.interval for fragment in self._fragments) else None


def _anchor_of(fragment: OuterFragment) -> torch.Tensor:
    return fragment.anchor
