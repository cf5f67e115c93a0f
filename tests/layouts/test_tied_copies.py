"""Copies of a tied weight that differ since a member was lost are made alike again, with all that belongs to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from tests.layouts.pipeline_runs import QueueCarrier, queue_carriers, side_by_side
from tests.layouts.staged_records import plan_of
from training.exchange.base import SoloExchange
from training.layouts.base import Layout
from training.layouts.columns import align_ties, states_of
from training.strategies.base import Strategy, StrategyContext
from training.strategies.registry import strategy_class


class Stage:
    """One of three devices, of which the first and the last hold a weight with another one before or after it."""

    def __init__(self, carrier: QueueCarrier) -> None:
        self.carrier, number = carrier, carrier.stage
        torch.manual_seed(0)
        tied, own = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.full((2 + number,), float(number)))
        self.model = nn.ParameterDict({"embed": tied, "own": own} if number == 0 else {"own": own, "head": tied})
        if number == 1:
            del self.model["head"]
        self.tied = {} if number == 1 else {"embed.weight": tied}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        options = {"task": "custom", "model_path": "a:b", "strategy": "diloco", "sync_interval": 1}
        settings = plan_of(1, **options).profile.strategy
        self.strategy: Strategy = strategy_class("diloco")(StrategyContext(settings, 9, 0))
        self.strategy.attach(self.model, SoloExchange())

    def step(self, gradient: float) -> None:
        """Make a step, and a round of the strategy, with this gradient of the tied weight."""
        for weight in self.model.values():
            weight.grad = torch.full_like(weight, gradient)
        self.strategy.begin_step(0, 1.0)
        self.optimizer.step()
        self.strategy.end_step()

    def align(self) -> list[str]:
        return align_ties(self.carrier, self.tied, states_of(self.model, self.optimizer, self.strategy))

    def states(self) -> list[torch.Tensor]:
        states = states_of(self.model, self.optimizer, self.strategy)
        return [state.clone() for weight in self.tied.values() for state in states(weight)]


def test_the_copies_go_on_alike() -> None:
    stages = [Stage(carrier) for carrier in queue_carriers(3)]
    for stage in stages:
        stage.step(1.0)
    assert side_by_side([stage.align for stage in stages]) == [[], [], []]
    for stage, gradient in zip(stages, (1.0, 1.0, 3.0)):  # the last one's column has a lost member's contribution
        stage.step(gradient)
    own = [stage.model["own"].detach().clone() for stage in stages]
    expected = stages[0].states()
    assert side_by_side([stage.align for stage in stages]) == [["embed.weight"]] * 3
    assert len(expected) == 6  # the weight, three of AdamW, anchor, outer momentum
    for stage in (stages[0], stages[2]):
        assert all(map(torch.equal, stage.states(), expected))
    assert all(torch.equal(stage.model["own"], before) for stage, before in zip(stages, own))
    for stage in stages:
        stage.step(2.0)
    assert torch.equal(stages[0].tied["embed.weight"], stages[2].tied["embed.weight"])
    assert side_by_side([stage.align for stage in stages]) == [[], [], []]


def test_they_are_compared_when_the_members_change() -> None:
    compared: list[tuple[int, ...]] = []
    layout = SimpleNamespace(agreed=tuple, _agreed_members=(), align_ties=lambda seen: compared.append(seen.members))
    for present in ((0, 1), (0, 1), (0,), (0,)):
        Layout.members(cast(Any, layout), cast(Any, SimpleNamespace(members=present)), SoloExchange())
    assert compared == [(0, 1), (0,)]
