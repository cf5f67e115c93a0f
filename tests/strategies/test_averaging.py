"""Local SGD and federated averaging: against references from the papers, and what their options do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from members import Member, settings_of
from small_models import Vectors, Watched, attached, in_a_group

from profiles.errors import BadInput, RunFailed
from profiles.schema import StrategySettings
from tests.training.memory_exchange import Late, RoomExchange
from training.strategies.averaging import islands, shuffled
from training.strategies.base import Strategy, StrategyContext
from training.strategies.costs import RunSpec, SyncSchedule
from training.strategies.diloco import DiLoCo
from training.strategies.fedavg import FedAvg
from training.strategies.local_sgd import LocalSGD
from training.strategies.weights import differences, flatten

H, ROUNDS, SEED, RATE, MOMENTUM = 4, 3, 0, 0.1, 0.9
Both = pytest.mark.parametrize("make", [LocalSGD, FedAvg])
Group = Callable[[int, list[int]], list[tuple[list[int], list[int]]]]
"""``group(round, members)``: who averages with whom, and who of them counts."""


def gradient(step: int, rank: int) -> torch.Tensor:
    return torch.randn(128, generator=torch.Generator().manual_seed(1000 * step + rank))


def samples(step: int, rank: int) -> float:
    return float(1 + (2 * rank + step) % 5)


def reference(size: int, group: Group) -> list[list[torch.Tensor]]:
    """McMahan et al. 2016, algorithm 1 (with one group of all, Stich 2018, algorithm 1): the weights after each round.

    Members make steps of SGD with a momentum of their own, which stays with them.
    """
    weights, speed = [torch.zeros(128) for _ in range(size)], [torch.zeros(128) for _ in range(size)]
    after = []
    for number in range(ROUNDS):
        counted = [0.0] * size
        for step in range(number * H, (number + 1) * H):
            for rank in range(size):
                speed[rank] = MOMENTUM * speed[rank] + gradient(step, rank)
                weights[rank] = weights[rank] - RATE * speed[rank]
                counted[rank] += samples(step, rank)
        for island, chosen in group(number, list(range(size))):
            whole = sum(counted[rank] for rank in chosen)
            mean = torch.stack([weights[rank] * (counted[rank] / whole) for rank in chosen]).sum(0)
            for rank in island:
                weights[rank] = mean
        after.append(list(weights))
    return after


def all_of_them(number: int, members: list[int]) -> list[tuple[list[int], list[int]]]:
    return [(members, members)]


def half_of_them(number: int, members: list[int]) -> list[tuple[list[int], list[int]]]:
    return [(members, shuffled(members, SEED, number)[: round(len(members) / 2)])]


def pairs(number: int, members: list[int]) -> list[tuple[list[int], list[int]]]:
    return [(island, sorted(island)) for island in islands(shuffled(members, SEED, number), 2)]


class Training:
    """A member whose gradients are given."""

    def __init__(self, make: type[Strategy], exchange: Any, **settings: Any) -> None:
        own = {"sync_interval": H} | settings.pop("own", {})
        self.warnings: list[str] = []
        self.model, self.exchange = Vectors(), exchange
        self.strategy = attached(make, exchange, self.model, self.warnings, owned={make.name: own}, **settings)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=MOMENTUM)

    def step(self, number: int, spoilt: bool = False) -> Any:
        rank = self.exchange.rank
        self.strategy.begin_step(number, samples(number, rank))
        given = gradient(number, rank)
        self.model.first.grad, self.model.second.grad = given[:64].clone(), given[64:].clone()
        self.strategy.gradients()
        self.optimizer.step()
        if spoilt:
            self.model.second.data[3] = torch.nan
        return self.strategy.end_step()

    def weights(self) -> torch.Tensor:
        return flatten(self.model.parameters())


def trained(make: type[Strategy], size: int, late: Late = lambda name: (), **settings: Any) -> list[Any]:
    """Return by member its weights after each round, what it reported, and its warnings."""

    def body(exchange: RoomExchange) -> Any:
        member, after, reports = Training(make, exchange, **settings), [], []
        for number in range(ROUNDS * H):
            if (report := member.step(number)) is not None:
                reports.append(report)
                after.append(member.weights())
        return after, reports, member.warnings

    return in_a_group(size, body, late)


@pytest.mark.parametrize(
    ("make", "size", "own", "group"),
    [
        (LocalSGD, 3, {}, all_of_them),
        (FedAvg, 3, {}, all_of_them),
        (FedAvg, 4, {"fraction": 0.5}, half_of_them),
        (FedAvg, 5, {"island_size": 2}, pairs),
    ],
    ids=["local SGD", "all", "half", "islands"],
)
def test_three_rounds_are_those_of_the_paper(make: Any, size: int, own: dict[str, Any], group: Group) -> None:
    found, expected = trained(make, size, own=own), reference(size, group)
    for rank, (after, reports, warnings) in enumerate(found):
        for number, weights in enumerate(after):
            torch.testing.assert_close(weights, expected[number][rank], rtol=1e-6, atol=1e-6)
        assert len(after) == ROUNDS and warnings == []
        assert [report.round for report in reports] == [1, 2, 3]
        for number, report in enumerate(reports):
            chosen = next(chosen for island, chosen in group(number, list(range(size))) if rank in island)
            assert report.members == sorted(chosen)
    if group is not pairs:
        assert all(torch.equal(one, other) for after, *_ in found for one, other in zip(after, found[0][0]))
        assert len({report.weight_hash for _, reports, _ in found for report in reports}) == ROUNDS


@Both
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_a_codec_loses_is_of_the_difference_to_the_last_mean(make: Any, codec: str) -> None:
    plain, lossy = trained(make, 3), trained(make, 3, codec=codec, error_feedback=True, verify_interval=1)
    assert all(torch.equal(one, other) for after, *_ in lossy for one, other in zip(after, lossy[0][0]))
    moved = max(float((after[0]).abs().max()) for after, *_ in plain)
    for exact, close in zip(plain[0][0], lossy[0][0]):
        assert 0 < float((exact - close).abs().max()) < moved / 16


def test_error_feedback_repays_what_the_codec_lost() -> None:
    exact, *_ = trained(LocalSGD, 3)[0]
    apart = {}
    for feedback in (False, True):
        after, *_ = trained(LocalSGD, 3, codec="topk:0.2", error_feedback=feedback)[0]
        apart[feedback] = float((after[-1] - exact[-1]).norm())
    assert apart[True] < apart[False]


def test_last_means_that_differ_are_mended_and_the_difference_is_told() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(LocalSGD, exchange, codec="bf16", verify_interval=1)
        if exchange.rank == 1:
            state = member.strategy.state()
            member.strategy.load({"mean": torch.full((128,), 0.5)}, state)
        for number in range(2 * H):
            member.step(number)
        return member.weights(), member.warnings

    found = in_a_group(3, body)
    assert all(torch.equal(weights, found[0][0]) for weights, _ in found)
    for _, warnings in found:
        assert warnings == ["round 1: weights differed by up to 0.5 between the members and were set to member 0's"]


def test_a_report_says_how_a_member_differed_from_the_mean() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(LocalSGD, exchange, own={"sync_interval": 1})
        report, own = member.step(0), -RATE * gradient(0, exchange.rank)
        apart, both = own - member.weights(), torch.stack([own, member.weights()])
        expected = (float(apart.abs().max()), float(apart.norm()), float(torch.corrcoef(both)[0, 1]))
        return (report.drift, report.delta_norm, report.correlation), expected

    for told, expected in in_a_group(3, body):
        assert told == pytest.approx(expected, rel=1e-4) and told[0] > 0 and abs(told[2]) < 1


def test_weights_that_are_late_are_not_in_the_mean_and_a_late_difference_is_carried_over() -> None:
    found = trained(LocalSGD, 2, lambda name: {1} if name == "local_sgd/0" else ())
    alone = -RATE * sum((sum(MOMENTUM**k for k in range(H - s)) * gradient(s, 0) for s in range(H)), torch.zeros(128))
    torch.testing.assert_close(found[1][0][0], alone, rtol=1e-5, atol=1e-5)
    assert [warnings for *_, warnings in found] == [
        [],
        ["round 1: what this machine learned came too late and is lost"],
    ]
    *_, warnings = trained(LocalSGD, 2, lambda name: {1} if name == "local_sgd/0" else (), codec="int8")[1]
    assert warnings == ["round 1: what this machine learned came too late and counts in the next one"]


@Both
def test_weights_that_are_not_finite_are_left_out_and_the_third_time_ends_the_member(make: Any) -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(make, exchange, own={"sync_interval": 1})
        try:
            for number in range(3):
                member.step(number, spoilt=exchange.rank == 1)
                assert bool(member.weights().isfinite().all())
        except RunFailed as error:
            return member.warnings, str(error)
        return member.warnings, ""

    (quiet, _), (warnings, failure) = in_a_group(2, body)
    assert quiet == [] and "3 times in a row" in failure
    assert [line.split(" is not")[0] for line in warnings] == [f"round {n}: the weight second" for n in (1, 2)]


def test_where_nobody_of_the_chosen_has_weights_all_count() -> None:
    chosen = shuffled([0, 1, 2], SEED, 0)[0]

    def body(exchange: RoomExchange) -> Any:
        member = Training(FedAvg, exchange, own={"sync_interval": 1, "fraction": 0.1})
        report = member.step(0, spoilt=exchange.rank == chosen)
        return member.weights(), report.members

    found = in_a_group(3, body)
    others = [rank for rank in range(3) if rank != chosen]
    mean = sum((-RATE * gradient(0, rank) * samples(0, rank) for rank in others), torch.zeros(128))
    for weights, members in found:
        torch.testing.assert_close(weights, mean / sum(samples(0, rank) for rank in others), rtol=1e-6, atol=1e-6)
        assert members == [0, 1, 2]


@pytest.mark.parametrize(
    ("members", "size", "sizes"),
    [(5, 2, [1, 2, 2]), (5, 4, [2, 3]), (6, 3, [3, 3]), (3, 8, [3]), (4, 0, [4]), (1, 2, [1])],
)
def test_islands_are_few_and_even(members: int, size: int, sizes: list[int]) -> None:
    found = islands(list(range(members)), size)
    assert sorted(map(len, found)) == sizes and sorted(rank for island in found for rank in island) == list(
        range(members)
    )


def test_partners_and_the_chosen_change_from_round_to_round_by_the_seed() -> None:
    orders = [shuffled(range(8), 1, number) for number in range(40)]
    assert orders == [shuffled(range(8), 1, number) for number in range(40)]
    assert orders != [shuffled(range(8), 2, number) for number in range(40)]
    assert {order[0] for order in orders} == set(range(8))
    met = {frozenset(island) for order in orders for island in islands(order, 2)}
    assert len(met) == 28  # of two of eight


def test_weights_go_to_members_of_the_island_alone() -> None:
    def body(exchange: RoomExchange) -> Any:
        watched = Watched(exchange)
        member = Training(FedAvg, watched, own={"island_size": 2})
        for number in range(ROUNDS * H):
            member.step(number)
        return watched.given

    for rank, given in enumerate(in_a_group(4, body)):
        met = [next(tuple(sorted(one)) for one, _ in pairs(number, [0, 1, 2, 3]) if rank in one) for number in range(3)]
        assert given == [one for island in met for one in (((), 0), (island, 512))]


def test_the_consensus_of_islands_is_the_mean_of_all_and_leaves_them_as_they_were() -> None:
    def body(exchange: RoomExchange) -> Any:
        member = Training(FedAvg, exchange, own={"island_size": 2})
        for number in range(H):
            member.step(number)
        before = member.weights()
        with member.strategy.consensus():
            held = member.weights()
        return before, held, torch.equal(member.weights(), before)

    found = in_a_group(4, body)
    assert len({tuple(before.tolist()) for before, *_ in found}) == 2
    for _, held, as_before in found:
        assert as_before and torch.equal(held, found[0][1])
        torch.testing.assert_close(held, torch.stack([before for before, *_ in found]).mean(0), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_members_of_islands_leave_and_come() -> None:
    settings = settings_of("fedavg", owned={"fedavg": {"fraction": 0.5, "island_size": 2, "sync_interval": 3}})

    def body(exchange: RoomExchange) -> Any:
        newcomer = exchange.is_newcomer
        member = Member(settings, exchange, joining=exchange.fetch_state() if newcomer else None)
        if not newcomer:
            member.until_synchronised(4)
            if exchange.rank == 0:
                member.admit()
        if exchange.rank == 1:
            member.until_synchronised(10)
            exchange.room.leave(1)
            return None
        member.until(20)
        member.strategy.finish()
        with member.strategy.consensus():
            return member.strategy.members, member.hash()

    first, _, *others = in_a_group(4, body, newcomers=1)
    assert first[0] == (0, 2, 3) and others == [first, first]


def test_islands_refuse_a_codec_that_loses_something() -> None:
    settings = StrategySettings(strategy="fedavg", codec="bf16", owned={"fedavg": {"island_size": 2}})
    with pytest.raises(BadInput, match="codec = bf16 with islands"):
        FedAvg(StrategyContext(settings, 100, 0))
    with pytest.raises(ValueError, match="2 or more, or 0 for all"):
        StrategySettings(owned={"fedavg": {"island_size": 1}})


@Both
def test_costs_are_one_exchange_of_everything(make: Any) -> None:
    costs = make.costs
    assert not costs.exact and costs.elements(1000) == 1000
    assert {one.interval for one in costs.sync_schedules(RunSpec(1000))} == {5, 10, 20, 30, 50, 100, 200}
    assert {one.interval for one in costs.sync_schedules(RunSpec(1000, lora=True))} == {5, 10, 20}
    assert costs.settings(RunSpec(100), SyncSchedule(10))[f"{make.name}.sync_interval"] == 10
    learnt = costs.learning(RunSpec(300, "scratch"), SyncSchedule(30), 4.0)
    assert learnt.share < 0.5 and learnt.loss == pytest.approx(0.062)
    assert 0 < costs.learning(RunSpec(300, "scratch"), SyncSchedule(5), 4.0).loss < 0.058
    assert costs.learning(RunSpec(300), SyncSchedule(30), 4.0).share == 1.0


@pytest.mark.parametrize("inplace", [False, True])
def test_what_is_told_of_differences_is_that_of_the_whole_vectors(inplace: bool) -> None:
    dice = torch.Generator().manual_seed(1)
    mean = 1 + torch.randn(150_000, generator=dice)
    own = mean + 0.01 * torch.randn(150_000, generator=dice)
    apart, pair = own - mean, torch.stack([own, mean]).double()
    expected = (float(apart.abs().max()), float(apart.double().norm()), float(torch.corrcoef(pair)[0, 1]))
    assert differences(own, mean, out=own if inplace else None) == pytest.approx(expected, rel=1e-6)
    assert torch.equal(own, apart) is inplace


def test_weights_without_bounds_have_differences_without_a_number() -> None:
    own = torch.zeros(150_000)
    own[0], own[-1] = torch.inf, -torch.inf
    assert math.isnan(differences(own, own.clone()).delta_norm)


@Both
@pytest.mark.parametrize("texts", [True, False])
def test_the_mean_of_trained_weights_costs_what_it_costs_with_diloco(make: Any, texts: bool) -> None:
    run = RunSpec(300, texts=texts)
    assert make.costs.learning(run, SyncSchedule(10), 4.0) == DiLoCo.costs.learning(run, SyncSchedule(10), 4.0)
