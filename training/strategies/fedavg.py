"""Federated averaging: every H steps all take the mean of some members' weights, overall or within islands.

McMahan et al. 2016 (arXiv 1602.05629), algorithm 1: in round ``t`` of ``H`` steps a random set ``S_t`` of
``max(C K, 1)`` of the ``K`` members is averaged, ``theta <- sum_{k in S_t} n_k theta_k / sum_{k in S_t} n_k`` with
``n_k`` samples (or tokens) of the round. Here the other members train as well, since the set of live members is known
only at the end of a round: their steps of that round are discarded, and they continue from the mean like all others. If
no member of ``S_t`` had samples, or arrived in time with finite weights, the round averages all members.

With ``island_size`` the members are divided anew in every round into the fewest islands of at most that size, with
sizes that differ by at most one. A mean is over the share ``C`` of an island (if none of those can contribute, members
keep their own weights), and only a greeting without content is exchanged between islands. So members hold different
weights; evaluated and saved is the plain mean of all. A newcomer starts from the weights of one of them.

The set ``S_t`` and the islands follow from the run's seed, the round, and the live members, which the greeting shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

from pydantic import field_validator

from profiles.declarations import OptionError, OptionsByOwner, option
from profiles.schema import StrategySettings
from training.exchange.base import MeanResult
from training.lazy import torch
from training.strategies.averaging import Averaging, AveragingCosts, AveragingOptions, islands, shuffled
from training.strategies.base import StrategyContext
from training.strategies.registry import register
from training.strategies.weights import holding_mean


class FedAvgOptions(AveragingOptions):
    """Options of :class:`FedAvg`."""

    fraction: float = option(1.0, "share of the members whose weights count in a round, at least one", gt=0, le=1)
    island_size: int = option(0, "members that average with each other, new ones in every round; 0: all", ge=0)

    @field_validator("island_size")
    @classmethod
    def _is_an_island(cls, size: int) -> int:
        if size == 1:
            raise OptionError("island_size", "one member alone has nobody to average with: 2 or more, or 0 for all")
        return size


class FedAvgCosts(AveragingCosts):
    """Learning as if all members were averaged in one island, which is optimistic; bytes of the islands.

    Args:
        island_size: 0: one island.
    """

    interval_option = "fedavg.sync_interval"

    def __init__(self, island_size: int = 0) -> None:
        self.group = island_size
        self.codecs = ("fp32",) if island_size else AveragingCosts.codecs

    def with_options(self, settings: OptionsByOwner) -> FedAvgCosts:
        return FedAvgCosts(settings.of(FedAvgOptions).island_size)


@register
class FedAvg(Averaging):
    """Average the weights of some members every ``H`` steps."""

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "weights of some or all averaged every so many steps, of all or within changing islands"
    options = FedAvgOptions
    costs = FedAvgCosts()

    @classmethod
    def why_only_own_codecs(cls, settings: StrategySettings) -> str:
        why = "with islands: their members share no mean to which a difference could be sent, and weights lose too much"
        return why if settings.of(cls.options).island_size else ""

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        return "with islands, which send fp32" if settings.of(cls.options).island_size else ""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        options = context.settings.of(self.options)
        self._fraction, self._size = options.fraction, options.island_size

    def _mean_of_weights(self, weights: torch.Tensor) -> MeanResult:
        if self._alone or (self._fraction == 1.0 and not self._size):
            return super()._mean_of_weights(weights)
        self._members = tuple(sorted(self._exchange.gather(f"{self.name}/{self._round}/greeting", b"")))
        order = shuffled(self._members, self.context.seed, self._round)
        island = next(candidate for candidate in islands(order, self._size) if self._exchange.rank in candidate)
        chosen = island[: max(1, round(self._fraction * len(island)))]
        result = self._mean(weights, tuple(sorted(island)) if self._size else None, self._exchange.rank in chosen)
        if not result.weight and not self._size and len(chosen) < len(island):
            return self._mean(weights)
        return replace(result, members=tuple(rank for rank in result.members if rank in chosen))

    @contextmanager
    def consensus(self) -> Iterator[None]:
        if self._alone or not self._size:
            yield
            return
        with holding_mean(self._parameters, self._exchange, f"{self.name}/consensus"):
            yield
