"""Two strategies that are as small as can be: one that averages a half of the weights, one that averages all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from profiles.declarations import Section, option
from profiles.schema import StrategySettings
from training.exchange.base import MeanResult, Pending
from training.exchange.codecs import codec_by_name
from training.records.events import SyncEvent
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.costs import CostModel, RunSpec, SyncSchedule
from training.strategies.weights import flatten, unflatten_into, weight_hash


class HalfOptions(Section):
    """Options of :class:`Half`."""

    late: bool = option(False, "the mean of a step is taken over in the next")


class HalfCosts(CostModel):
    """Half of the weights in every step."""

    exact = False

    def elements(self, trainable: int) -> int:
        return trainable // 2


class Half(Strategy):
    """Averages one half of the weights after a step and the other half after the next, by the members' weights."""

    name = "half"
    summary = "one half of the weights in every step"
    equal = "never"
    options = HalfOptions
    costs = HalfCosts()

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._late = context.settings.of(HalfOptions).late
        self._codec = codec_by_name(self.codec(context.settings))
        self._step, self._weight = 0, 0.0
        self._under_way: tuple[int, torch.Tensor, Pending[MeanResult]] | None = None
        self._found: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        self._step, self._weight = step, weight

    def end_step(self) -> SyncEvent | None:
        before = self._exchange.traffic.copy()
        if self._late:
            self._take()
        given = flatten(self._parameters)[self._step % 2 :: 2]
        pending = self._exchange.start_mean(f"half/{self._step}", given, self._weight, self._codec)
        self._under_way = (self._step, given, pending)
        if not self._late:
            self._take()
        return sync_event(self._exchange.traffic.since(before), self._step + 1, self._members, "", None)

    def _settle(self) -> None:
        if self._under_way is not None:
            step, given, pending = self._under_way
            result = pending.wait()
            self._found, self._under_way, self._members = (step, given, result.mean), None, result.members

    def _take(self) -> None:
        self._settle()
        if self._found is not None:
            step, given, mean = self._found
            values = flatten(self._parameters)
            values[step % 2 :: 2] += mean - given
            unflatten_into(self._parameters, values)
            self._found = None

    def finish(self) -> SyncEvent | None:
        self._take()
        return None

    @property
    def synchronised(self) -> bool:
        return self._under_way is None and self._found is None

    def tensors(self) -> dict[str, torch.Tensor]:
        self._settle()
        return {"given": self._found[1], "mean": self._found[2]} if self._found else {}

    def state(self) -> dict[str, Any]:
        self._settle()
        return {"of": self._found[0]} if self._found else {}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._found = (state["of"], tensors["given"], tensors["mean"]) if "of" in state else None

    @contextmanager
    def consensus(self) -> Iterator[None]:
        own = flatten(self._parameters)
        mean = self._exchange.mean("half/consensus", own, 1.0, codec_by_name("fp32")).mean
        unflatten_into(self._parameters, mean)
        try:
            yield
        finally:
            unflatten_into(self._parameters, own)


class AllOptions(Section):
    """Options of :class:`All`."""

    interval: int = option(2, "steps between means", ge=1)


class AllCosts(CostModel):
    """All weights every so many steps."""

    exact = False

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        if run.steps > AllOptions().interval:
            yield SyncSchedule(AllOptions().interval)


class All(Strategy):
    """Averages all weights every so many steps."""

    name = "whole"
    summary = "all weights every so many steps"
    options = AllOptions
    costs = AllCosts()

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._codec = codec_by_name(self.codec(context.settings))
        self._inner, self._round, self._weight = 0, 0, 0.0

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        return SyncSchedule(settings.of(AllOptions).interval)

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return settings.with_options_of(cls.name, interval=min(interval, settings.of(AllOptions).interval))

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        self._weight += weight

    def end_step(self) -> SyncEvent | None:
        self._inner += 1
        return self.finish() if self._inner >= self.sync_schedule(self.context.settings).interval else None

    def finish(self) -> SyncEvent | None:
        if not self._inner:
            return None
        before = self._exchange.traffic.copy()
        result = self._exchange.mean(f"whole/{self._round}", flatten(self._parameters), self._weight, self._codec)
        unflatten_into(self._parameters, result.mean)
        self._inner, self._round, self._weight = 0, self._round + 1, 0.0
        self._members, digest = result.members, weight_hash(result.mean)
        return sync_event(self._exchange.traffic.since(before), self._round, self._members, digest, None)

    @property
    def synchronised(self) -> bool:
        return self._inner == 0

    def state(self) -> dict[str, Any]:
        return {"inner": self._inner, "round": self._round, "weight": self._weight}

    def newcomer_state(self) -> dict[str, Any]:
        return self.state() | {"weight": 0.0}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._inner, self._round, self._weight = state["inner"], state["round"], state["weight"]
