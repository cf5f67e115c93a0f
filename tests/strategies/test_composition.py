"""Several strategies at once: each does what it does alone, and those that make no sense together are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from contract import CHECKS
from members import Member
from small_models import in_a_group
from stand_ins import All, Half

from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link, Measurement
from distributed.planning.documents.document import Job
from distributed.planning.planner import plan
from profiles.declarations import Section
from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.strategies.allreduce import AllReduce
from training.strategies.costs import RunSpec
from training.strategies.registry import check_strategy, cost_model, forget, register, strategy_class

TEXT = "half + whole"


@pytest.fixture(autouse=True)
def stand_ins() -> Iterator[None]:
    """Two strategies that average weights, and one more that makes gradients final."""
    kinds = (Half, All, type("Other", (AllReduce,), {"name": "other", "options": Section}))
    for kind in kinds:
        register(kind)
    yield
    for kind in kinds:
        forget(kind.name)


def composed(late: bool = False, interval: int = 4, **more: Any) -> StrategySettings:
    own = {"half": {"late": late}, "whole": {"interval": interval}}
    return StrategySettings(strategy=TEXT, owned=own, verify_interval=0, **more)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check: Callable[[StrategySettings], None], late: bool) -> None:
    check(composed(late))


@pytest.mark.parametrize("interval", [2, 3])
def test_it_equals_a_reference(interval: int) -> None:
    """Three members of weights 1, 2, 3, whose steps are made by formula: a half is averaged, then maybe all."""
    size, steps = 10, 9

    def change(step: int, rank: int) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(10 * step + rank))

    held, share = [torch.zeros(size) for _ in range(3)], [1 / 6, 2 / 6, 3 / 6]
    for step in range(steps):
        held = [own + change(step, rank) for rank, own in enumerate(held)]
        mean = sum(part * own for part, own in zip(share, held, strict=True))
        assert isinstance(mean, torch.Tensor)
        for own in held:
            own[step % 2 :: 2] = mean[step % 2 :: 2]
        if (step + 1) % interval == 0:
            held = [sum((part * own for part, own in zip(share, held, strict=True)), torch.zeros(size))] * 3
            held = [own.clone() for own in held]

    class Vector(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = torch.nn.Parameter(torch.zeros(size))

    def body(exchange: RoomExchange) -> torch.Tensor:
        member = Member(composed(interval=interval), exchange, make=Vector)
        for step in range(steps):
            member.strategy.begin_step(step, exchange.rank + 1.0)
            member.model.values.data += change(step, exchange.rank)
            member.strategy.end_step()
        return member.weights()

    for found, expected in zip(in_a_group(3, body), held, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_each_exchanges_in_its_own_rhythm_and_the_reports_say_which() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Member(composed(interval=3), exchange)
        member.until(6)
        total = exchange.traffic.bytes_sent
        return [one.rounds for one in member.reports], sum(one.bytes_sent for one in member.reports) == total

    both = [{"half": 3, "whole": 1}, {"half": 6, "whole": 2}]
    rounds, whole = in_a_group(2, body)[0]
    assert rounds == [{"half": 1}, {"half": 2}, both[0], {"half": 4}, {"half": 5}, both[1]]
    assert whole, "the reports tell all that was sent, once"


def test_members_meet_where_the_one_that_is_rarer_lets_them() -> None:
    def body(exchange: RoomExchange) -> Any:
        member, met = Member(composed(interval=3), exchange), list[int]()
        while member.step < 7:
            if member.one_step():
                met.append(member.step)
        return met

    assert in_a_group(2, body) == [[3, 6]] * 2


def test_the_order_in_which_they_are_named_changes_nothing() -> None:
    def body(exchange: RoomExchange, text: str) -> str:
        member = Member(composed().model_copy(update={"strategy": text}), exchange)
        member.until(9)
        return member.hash()

    one, other = (in_a_group(2, lambda member, text=text: body(member, text)) for text in (TEXT, "whole+half"))
    assert one == other


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("half + half", "half is there twice"),
        ("allreduce + other", "allreduce and other both make the gradients of a step final"),
        ("half + allreduce", "allreduce keeps all members' weights equal in every step, so that half would average"),
        ("sparseloco + diloco", "sparseloco and diloco each go on from weights of their own"),
        ("noloco + half + streaming_diloco", "noloco and streaming_diloco each go on"),
        ("half + wole", "unknown strategy 'wole'"),
        ("half + ", "unknown strategy 'half +"),
    ],
)
def test_nonsense_is_refused_with_the_reason(text: str, said: str) -> None:
    for ask in (check_strategy, strategy_class, lambda text: profile_from_options("p", {"strategy": text})):
        with pytest.raises(BadInput, match=said):
            ask(text)


def test_it_is_kept_as_one_text_and_may_be_three() -> None:
    assert check_strategy("half+whole") == check_strategy(" half  +  whole ") == TEXT
    assert check_strategy("half + whole + diloco") == "half + whole + diloco"
    assert strategy_class("half + whole + diloco").sync_schedule(StrategySettings()).interval == 1


def test_gradients_of_which_members_differ_may_be_averaged_beside_weights() -> None:
    register(type("Island", (AllReduce,), {"name": "island", "equal": "never", "options": Section}))
    try:
        assert strategy_class("island + whole").merges == "gradients"
    finally:
        forget("island")


def test_its_cost_is_the_sum_with_the_options_that_are_set() -> None:
    usual, rarer = cost_model(TEXT), cost_model(TEXT, composed(interval=10))
    assert usual is not None and rarer is not None
    assert (usual.elements(1000), rarer.elements(1000)) == (500 + 500, 500 + 100)
    assert (usual.vectors, usual.longest(1000)) == (2, 1000)
    assert usual.why_not_ranked(RunSpec(1000)) == "what its parts learn together is not known"


def test_a_plan_of_it_is_predicted_where_it_is_asked_for() -> None:
    machines = tuple(ClusterMachine(name=name, measurements=(Measurement(batch=8, seconds=1.0),)) for name in "ab")
    link = Link(source="a", target="b", mbit=900.0, mbit_back=900.0, rtt_ms=0.6)
    cluster, size = Cluster(machines=machines, links=(link,)), {"trainable": 39_000_000, "total": 39_000_000}

    def best(text: str, **own: Any) -> Any:
        found = plan(cluster, Job(**size, samples=32_000, strategy=text, codec="fp32", owned=own))
        return next(one for one in found.ranking if not one.choice.alone)

    both, rarer, alone = best(TEXT), best(TEXT, whole={"interval": 50}), best("half")
    assert both.choice.strategy == TEXT and both.predicted
    assert both.exchange > rarer.exchange > alone.exchange
    assert not any(" + " in one.choice.strategy for one in plan(cluster, Job(**size, samples=32_000)).ranking)
