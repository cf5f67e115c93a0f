"""Copies of a tied weight that differ since a member was lost or late are made alike again, with all that belongs to
them."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.layouts.pipeline_runs import QueueCarrier, queue_carriers, side_by_side
from tests.layouts.staged_records import plan_of
from tests.training.memory_exchange import Room, RoomExchange
from training.exchange.base import Exchange, SoloExchange
from training.layouts.columns import WeightStates, align_ties
from training.layouts.staged import StagedModel
from training.strategies.base import Strategy, StrategyContext
from training.strategies.registry import strategy_class

States = dict[str, torch.Tensor]


class Stage:
    """One of three devices, of which the first and the last hold a weight with another one before or after it."""

    def __init__(self, carrier: QueueCarrier, exchange: Exchange | None = None, **settings: Any) -> None:
        self.carrier, number = carrier, carrier.stage
        tied, own = nn.Parameter(torch.linspace(-1, 1, 6)), nn.Parameter(torch.full((2 + number,), float(number)))
        self.model = nn.ParameterDict({"embed": tied, "own": own} if number == 0 else {"own": own, "head": tied})
        if number == 1:
            del self.model["head"]
        self.tied = {} if number == 1 else {"embed.weight": tied}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        options = {"task": "custom", "model_path": "a:b", "strategy": "diloco", **settings}
        self.exchange, self.warnings = exchange or SoloExchange(), list[str]()
        context = StrategyContext(plan_of(1, **options).profile.strategy, 9, 0, self.warnings.append)
        self.strategy: Strategy = strategy_class(context.settings.strategy)(context)
        self.strategy.attach(self.model, self.exchange)
        self.layout = StagedModel(carrier, [], 1)
        self.layout.model, self.layout.optimizer = self.model, self.optimizer
        self.layout._pipeline = cast(Any, SimpleNamespace(tied_weights=self.tied, ties_trained_weights=bool(self.tied)))

    def step(self, gradient: float) -> None:
        """Make a step, and a round of the strategy, with this gradient of the tied weight."""
        for weight in self.model.values():
            weight.grad = torch.full_like(weight, gradient)
        self.strategy.begin_step(0, 1.0)
        self.optimizer.step()
        self.strategy.end_step()

    def align(self) -> list[str]:
        return align_ties(self.carrier, self.tied, WeightStates(self.model, self.optimizer, self.strategy))

    def states(self) -> States:
        """Return a copy of what is kept of the tied weight, by name."""
        states = WeightStates(self.model, self.optimizer, self.strategy)
        return {name: state.clone() for weight in self.tied.values() for name, state in states.of(weight).items()}


EACH = {"sync_interval": 1, "verify_interval": 1}


def assert_alike(one: States, other: States) -> None:
    for name in one.keys() | other.keys():
        states = [states.get(name, torch.zeros(())) for states in (one, other)]
        assert torch.equal(*torch.broadcast_tensors(*states)), name


def test_the_copies_go_on_alike() -> None:
    stages = [Stage(carrier, **EACH) for carrier in queue_carriers(3)]
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
        assert_alike(stage.states(), expected)
    assert all(torch.equal(stage.model["own"], before) for stage, before in zip(stages, own))
    for stage in stages:
        stage.step(2.0)
    assert torch.equal(stages[0].tied["embed.weight"], stages[2].tied["embed.weight"])
    assert side_by_side([stage.align for stage in stages]) == [[], [], []]


@pytest.mark.parametrize(
    ("settings", "compared"),
    [
        ({"sync_interval": 20, "verify_interval": 40}, [20, 40, 60, 80]),
        ({"sync_interval": 20, "verify_interval": 10}, [20, 40, 60, 80, 100]),
        ({"sync_interval": 20, "verify_interval": 0}, [20, 60]),
        ({"strategy": "allreduce", "verify_interval": 50}, [20, 60, 100]),
    ],
)
def test_they_are_compared_when_the_members_change_and_now_and_then(
    settings: dict[str, Any], compared: list[int]
) -> None:
    stage, steps = Stage(queue_carriers(1)[0], **settings), list[int]()
    stage.layout.align_ties = lambda strategy: steps.append(step)  # type: ignore[method-assign]  # when, not what
    for step in range(20, 101, 20):
        stage.strategy._members = (0, 1) if step < 60 else (0,)
        assert stage.layout.members(stage.strategy, stage.exchange, step) == stage.strategy.members
        assert stage.layout.members(stage.strategy, stage.exchange) == stage.strategy.members  # in an evaluation
    assert steps == compared


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("settings", [{"codec": "fp32"}, {"codec": "bf16"}, {"strategy": "local_sgd", "codec": "bf16"}])
def test_the_copies_stay_alike_through_late_contributions_and_a_loss(seed: int, settings: dict[str, Any]) -> None:
    """Three members of three devices; the last one is lost when its first device alone has sent what it owes."""
    draw, rounds = random.Random(seed), range(6)
    later = rounds[1:]  # the first step of AdamW is as long for all members: a mean would not show who is late
    lost_in = draw.choice(later)
    live = {step: range(3 if step <= lost_in else 2) for step in rounds}
    late = {(column, s): {*draw.sample(live[s], draw.choice((0, 0, 1, 2)))} for column in (0, 2) for s in later}
    gradients = {(member, step): draw.uniform(-2, 2) for member in range(3) for step in rounds}
    in_first = {s: {*live[s]} - late.get((0, s), set()) for s in rounds}
    in_last = {s: {*live[s]} - late.get((2, s), set()) - ({2} if s == lost_in else set()) for s in rounds}
    agree = {step for step in rounds if in_first[step] == in_last[step]}

    def late_in(column: int, operation: str) -> Sequence[int]:
        number = re.fullmatch(r"\w+/(\d+)", operation)
        return [*late.get((column, int(number[1])), ())] if number else []

    columns = [Room(3, partial(late_in, column)) for column in range(3)]
    members = [queue_carriers(3) for _ in range(3)]
    copies: dict[tuple[int, int], list[States]] = defaultdict(list)

    def train(member: int, number: int) -> None:
        torch.get_num_threads()  # sets them for this thread
        stage = Stage(members[member][number], RoomExchange(columns[number], member), **EACH, **settings)
        for step in rounds:
            if member == 2 and step == lost_in:
                if number == 0:
                    stage.step(gradients[member, step])
                return columns[number].leave(member)
            stage.step(gradients[member, step])
            before, warnings = stage.states(), len(stage.warnings)
            stage.layout.members(stage.strategy, stage.exchange, step + 1)
            assert (len(stage.warnings) == warnings) is (step in agree)
            if number == 0:
                assert_alike(stage.states(), before)
            if stage.tied:
                copies[member, step].append(stage.states())

    side_by_side([partial(train, member, number) for member in range(3) for number in range(3)])
    assert len(copies) == 2 * len(rounds) + lost_in and len(agree) < len(rounds)
    for one, other in copies.values():
        assert_alike(one, other)
