"""DiLoCo: many local steps, then one averaged pseudo-gradient for an outer step, by default Nesterov's.

Douillard et al. 2023 (arXiv 2311.08105), algorithm 1: every ``H`` inner steps each member sends
``delta_i = anchor - theta_i``; the weighted mean ``d`` feeds an outer optimizer, and all members go on from the new
anchor. With ``sync_delay`` the exchange overlaps with training, and the steps made meanwhile are kept:
``theta = anchor' + (theta - theta_sent)`` (delay-corrected merge, LOSCAR-SGD, arXiv 2605.20866).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import model_validator

from profiles.declarations import OptionError, option
from profiles.schema import StrategySettings
from training.lazy import nn, torch
from training.strategies.base import StrategyContext
from training.strategies.costs import Rhythm
from training.strategies.merged_part import MergedPart, PartSpec
from training.strategies.outer import OuterOptimizer, OuterOptions, momentum_option, rate_option
from training.strategies.outer_costs import OuterCosts
from training.strategies.outer_strategy import OuterStrategy
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
    """Average weights every ``H`` steps through an outer optimizer."""

    name: ClassVar[str] = "diloco"
    summary: ClassVar[str] = "weights merged every so many steps by an outer Nesterov step; sends little"
    options = DiLoCoOptions
    costs = OuterCosts("diloco", DiLoCoOptions())

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._options = context.settings.of(DiLoCoOptions)
        self.interval, self.delay = (
            self._options.sync_interval,
            min(self._options.sync_delay, self._options.sync_interval - 1),
        )

    @classmethod
    def rhythm(cls, settings: StrategySettings) -> Rhythm:
        options = settings.of(DiLoCoOptions)
        return Rhythm(options.sync_interval, options.sync_delay)

    @classmethod
    def rehearsed(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return settings.with_own("diloco", sync_interval=min(interval, cls.rhythm(settings).interval))

    def new_outer(self) -> OuterOptimizer:
        return self._options.make_outer(self.context.total_steps // self.interval, self.context.start, self._alone)

    def parts(self, model: nn.Module) -> list[MergedPart]:
        fragment = self.make_part(PartSpec("diloco", "", self._names, lambda: self._parameters))
        fragment.keeps_start = bool(self.delay)  # else no step is made until the merge
        return [fragment]

    def kept(self, fragment: MergedPart) -> torch.Tensor:
        if not fragment.inner:
            return fragment.anchor
        assert fragment.sent_from is not None
        return (
            fragment.flat().sub_(fragment.sent_from).add_(fragment.anchor)
        )  # steps made while the exchange was under way

    def prefix(self, index: int) -> str:
        return ""

    def document(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return states[0]

    def documents(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        self._rounds = int(state["round"])
        return [state]
