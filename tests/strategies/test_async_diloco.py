"""Asynchronous DiLoCo: an own reference in a given order of arrivals, who takes which work, unequal speeds."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import StrategySettings
from tests.strategies.small_models import in_a_group
from tests.training.memory_exchange import RoomExchange
from tests.waiting import until
from training.records.events import SyncEvent
from training.strategies.async_diloco import AsyncDiLoCo, AsyncDiLoCoOptions
from training.strategies.async_work import DelayedNesterov, WorkAssignment, WorkUnit
from training.strategies.base import StrategyContext
from training.strategies.composition import check_components
from training.strategies.diloco import DiLoCo
from training.strategies.parts.delta_rounds import parse_speed

TARGETS = torch.linspace(-1.0, 1.0, 24).reshape(4, 6)


def made(
    exchange: RoomExchange, in_turns: bool = True, codec: str = "fp32", **own: Any
) -> tuple[AsyncDiLoCo, nn.Module]:
    exchange.shares_process = in_turns  # type: ignore[misc]  # a constant of a kind of exchange
    options = AsyncDiLoCoOptions(**{"sync_interval": 4, **own})
    settings = StrategySettings(strategy="async_diloco", codec=codec, owned={"async_diloco": options})
    strategy = AsyncDiLoCo(StrategyContext(settings, 1000, 0))
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(6))})
    strategy.attach(model, exchange)
    return strategy, model


def begin(
    strategy: AsyncDiLoCo,
    end: int,
    start: int = 0,
    owners: tuple[int, ...] = (0, 1, 2),
    asked: Callable[[int], bool] = lambda step: False,
) -> list[int]:
    """Begin a stretch; return where it is noted that it ends sooner."""
    ends: list[int] = []
    strategy.begin_segment(start, end, owners, asked, ends.append)
    return ends


def trained(strategy: AsyncDiLoCo, model: nn.Module) -> tuple[list[WorkUnit], list[SyncEvent]]:
    """Make the steps of a stretch: one of SGD towards the target of the place."""
    taken, reports = [], []
    while strategy.work_units:
        place = strategy.work_units[0]
        weights = next(model.parameters())
        strategy.begin_step(place.step, 1.0)
        with torch.no_grad():
            weights.sub_(0.1 * (weights - TARGETS[(place.step + place.rank) % 4]))
        taken.append(place)
        if (report := strategy.end_step()) is not None:
            reports.append(report)
    return taken, reports


def reference(
    speeds: list[float], interval: int, steps: int, rate: float, beta: float, damping: float
) -> tuple[torch.Tensor, list[int]]:
    """Algorithm 3 and DyLU of arXiv 2401.09135, with places that are taken one after another; return the anchor and who
    arrived when."""
    n, anchor, momentum, total = len(speeds), torch.zeros(6), torch.zeros(6), torch.zeros(6)
    following, taken, base, due, since, order = 0, {}, {}, {}, {}, list[int]()

    def take(member: int, now: float) -> None:
        nonlocal following
        left, usual = steps * n - following, max(1, math.floor(interval * speeds[member] / max(speeds)))
        others = sum(len(places) for one, places in taken.items() if one != member)
        fair = math.ceil((left + others) * speeds[member] / sum(speeds) - 1e-9)
        count = min(usual, left, max(fair, math.ceil(usual / 4)))
        taken[member] = range(following, following + count)
        following += count
        base[member], due[member], since[member] = anchor.clone(), now + count / speeds[member], len(order)

    for member in range(n):
        take(member, 0.0)
    while any(taken.values()):
        member = min((one for one in taken if taken[one]), key=lambda one: (due[one], one))
        weights = base[member].clone()
        for place in taken[member]:
            weights -= 0.1 * (weights - TARGETS[(place // n + place % n) % 4])
        delta = (base[member] - weights) * (1 + len(order) - since[member]) ** -damping
        order.append(member)
        total += delta
        if len(order) % n == 0:
            momentum = beta * momentum + total / n
            anchor = anchor - rate * (beta * momentum + delta / n)
            total = torch.zeros(6)
        else:
            anchor = anchor - rate * delta / n
        take(member, due[member])
    return anchor, order


@pytest.mark.parametrize(
    ("speeds", "rate", "beta", "damping"),
    [("1,1,1", 0.7, 0.9, 0.0), ("1,0.5,0.2", 0.7, 0.9, 0.0), ("1,0.5,0.2", 1.0, 0.0, 0.0), ("0.3,1,1", 1.0, 0.5, 0.5)],
)
def test_it_equals_the_reference_in_the_order_of_the_speeds(
    speeds: str, rate: float, beta: float, damping: float
) -> None:
    def body(exchange: RoomExchange) -> Any:
        strategy, model = made(exchange, speeds=speeds, outer_lr=rate, outer_momentum=beta, damping=damping)
        begin(strategy, 20)
        _, reports = trained(strategy, model)
        return next(model.parameters()).detach().clone(), len(reports)

    found = in_a_group(3, body)
    wanted, order = reference([float(one) for one in speeds.split(",")], 4, 20, rate, beta, damping)
    for rank, (weights, deltas) in enumerate(found):
        assert torch.equal(weights, found[0][0])
        torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-6)
        assert deltas == order.count(rank)


@pytest.mark.parametrize("in_turns", [True, False])
def test_every_place_is_taken_once_and_equal_versions_are_equal(in_turns: bool) -> None:
    def body(exchange: RoomExchange) -> Any:
        strategy, model = made(exchange, in_turns, codec="mxfp4", outer_momentum=0.9)
        found: tuple[list[WorkUnit], list[SyncEvent]] = ([], [])
        for start in (0, 12):
            begin(strategy, start + 12, start)
            for have, more in zip(found, trained(strategy, model), strict=True):
                have += more  # type: ignore[arg-type]  # lists, whose kind mypy does not follow here
            assert strategy.synchronised
        return *found, strategy.state()["version"]

    found = in_a_group(3, body)
    places = Counter(place for taken, *_ in found for place in taken)
    assert places == Counter(WorkUnit(step, rank) for step in range(24) for rank in range(3))
    hashes = {(one.round, one.weight_hash) for _, reports, _ in found for one in reports}
    assert len(hashes) == len({version for version, _ in hashes})
    assert {version for *_, version in found} == {sum(len(reports) for _, reports, _ in found)}, "a delta counts once"


def test_nobody_waits_for_a_slower_member() -> None:
    """The slow one makes no step before the others have made thirty without it."""
    others_steps = threading.Semaphore(0)

    def body(exchange: RoomExchange) -> int:
        strategy, model = made(exchange, in_turns=False)
        begin(strategy, 12)
        steps = 0
        while strategy.work_units:
            if exchange.rank == 2 and not steps:
                assert all(others_steps.acquire(timeout=60) for _ in range(30)), "the others wait"
            steps += 1
            others_steps.release()
            with torch.no_grad():
                next(model.parameters()).sub_(0.1)
            strategy.end_step()
        return steps

    found = in_a_group(3, body)
    assert sum(found) == 36 and 0 < found[2] <= 6


@pytest.mark.parametrize("at_the_end", [False, True])
def test_the_others_do_what_a_lost_member_had_taken(at_the_end: bool) -> None:
    def body(exchange: RoomExchange) -> Any:
        strategy, model = made(exchange, in_turns=False)
        begin(strategy, 12)
        if exchange.rank == 1:
            work, rounds = strategy._work, strategy._rounds
            assert rounds is not None
            until(lambda: not (at_the_end and (work.taken[0] or work.taken[2] or work.units_left)))
            strategy._work = WorkAssignment(1, _owners=(1,))  # it takes part in nothing any more
            rounds.wait_for_end()
            exchange.room.leave(1)
            return None
        taken, _ = trained(strategy, model)
        return taken, strategy.members, next(model.parameters()).detach().clone()

    (first, members, weights), _, (last, *same) = in_a_group(3, body)
    assert members == same[0] == (0, 2) and torch.equal(weights, same[1])
    assert Counter(first + last) == Counter(WorkUnit(step, rank) for step in range(12) for rank in range(3))


@pytest.mark.parametrize("in_turns", [True, False])
def test_all_meet_soon_where_one_of_them_is_asked_to(in_turns: bool) -> None:
    def body(exchange: RoomExchange) -> Any:
        strategy, model = made(exchange, in_turns)
        ends = begin(strategy, 400, asked=lambda step: exchange.rank == 2 and step >= 3)
        return trained(strategy, model)[0], ends[-1], strategy.synchronised

    found = in_a_group(3, body)
    taken, ends = Counter(place for places, *_ in found for place in places), {end for _, end, _ in found}
    assert all(met for *_, met in found) and len(ends) == 1 and 3 <= min(ends) < 40
    assert taken == Counter(WorkUnit(step, rank) for step in range(min(ends)) for rank in range(3))


@pytest.mark.parametrize("said", [-1.0, math.nan, math.inf, 1e300, b"fast", b"-3", b""])
def test_a_speed_that_can_be_none_counts_as_unknown(said: float | bytes) -> None:
    assert parse_speed(said) == 0.0


def test_work_is_taken_by_speed_and_ends_for_all_at_once() -> None:
    work = WorkAssignment(10)
    work.begin_segment(0, 100, (0, 1, 2), {0: 2.0, 1: 1.0, 2: 0.0})
    assert [len(work.taken[rank]) for rank in range(3)] == [10, 5, 1]
    work.speeds[2] = 0.01
    work.take(2)
    assert len(work.taken[2]) == 1
    while not work.is_over:
        for rank in (0, 0, 1):
            last = len(work.taken[rank])
            work.take(rank)
        if not work.units_left:
            work.reassign_lost((0, 1))
    assert last <= 5


def test_n_deltas_move_the_anchor_as_one_outer_step_by_their_mean() -> None:
    deltas = torch.randn(4, 300_000, generator=torch.Generator().manual_seed(1))
    server = DelayedNesterov(torch.zeros(300_000), 0.7, 0.9, 4, 0.0)
    for round_ in range(2):
        for one in deltas:
            server.apply(one.clone() * (round_ + 1), 3)
    mean = deltas.mean(0)
    wanted = -0.7 * (mean + 0.9 * mean) - 0.7 * (2 * mean + 0.9 * (0.9 * mean + 2 * mean))
    torch.testing.assert_close(server.anchor, wanted, atol=1e-6, rtol=1e-5)


def test_what_is_no_number_is_left_out_and_replaced() -> None:
    def body(exchange: RoomExchange) -> Any:
        strategy, model = made(exchange)
        begin(strategy, 4, owners=(0, 1))
        if exchange.rank == 1:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))
        trained(strategy, model)
        return strategy.state()["version"], next(model.parameters()).detach().clone()

    first, last = in_a_group(2, body)
    assert first[0] == last[0] == 1 and torch.equal(first[1], last[1]) and bool(first[1].isfinite().all())


def test_a_difference_between_members_is_found_where_they_meet() -> None:
    def body(exchange: RoomExchange) -> Any:
        strategy, model = made(exchange)
        if exchange.rank == 2:
            strategy.tensors()["anchor"].add_(0.5)
        begin(strategy, 4)
        trained(strategy, model)
        return next(model.parameters()).detach().clone()

    found = in_a_group(3, body)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("speeds", ["1,", "fast", "0,1", "1,nan"])
def test_speeds_that_cannot_be_are_refused(speeds: str) -> None:
    with pytest.raises(ValueError, match="numbers from 0.001"):
        AsyncDiLoCoOptions(speeds=speeds)


def test_it_goes_with_no_other_strategy() -> None:
    with pytest.raises(BadInput, match="steps of their own"):
        check_components([DiLoCo, AsyncDiLoCo])
