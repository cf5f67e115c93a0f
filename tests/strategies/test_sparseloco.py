"""SparseLoCo against a reference written from the paper, its bytes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from members import Member, Shapes, settings_of
from small_models import in_a_group
from torch import nn

from profiles.errors import BadInput
from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.exchange.base import MAX_GATHER_BYTES
from training.exchange.codecs import codec_by_name
from training.strategies.base import StrategyContext
from training.strategies.costs import RunSpec, SyncSchedule
from training.strategies.registry import cost_model, strategy_class
from training.strategies.sparseloco import SparseLoCo, segments

SHAPES = [(300, 290), (40,), (9, 7), (70_000,), (5,)]
"""The first and the fourth have levels of their own; the small ones between go with the fourth, the last one too."""
ROUNDS, MEMBERS = 3, 3


class Bare(nn.Module):
    """Weights without a forward: a test sets them as if they had been trained."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])


def change(rank: int, round_: int, shape: tuple[int, ...], number: int) -> torch.Tensor:
    """What training adds to a weight in a round."""
    chance = torch.Generator().manual_seed(rank * 1000 + round_ * 100 + number)
    return torch.randn(shape, generator=chance) * 0.01 * (number + 1)


def strategy_of(exchange: RoomExchange, model: nn.Module, **own: Any) -> SparseLoCo:
    warn = own.pop("warn", lambda message: None)
    settings = StrategySettings(
        strategy="sparseloco",
        codec=own.pop("codec", "auto"),
        verify_interval=own.pop("verify", 0),
        owned={"sparseloco": {"sync_interval": 1} | own},
    )
    found = SparseLoCo(StrategyContext(settings, 1000, 0, warn))
    found.attach(model, exchange)
    return found


def rounds(
    exchange: RoomExchange, shapes: list[tuple[int, ...]], count: int = ROUNDS, **own: Any
) -> list[nn.Parameter]:
    """Train; return the weights."""
    model = Bare(shapes)
    strategy = strategy_of(exchange, model, **own)
    for round_ in range(count):
        strategy.begin_step(round_, float(exchange.rank + 1))
        with torch.no_grad():
            for number, weight in enumerate(model.weights):
                weight.add_(change(exchange.rank, round_, weight.shape, number))
        strategy.end_step()
    return list(model.weights)


# --------------------------------------------------------------------------------------------------------- the paper


def quantised(values: torch.Tensor) -> torch.Tensor:
    centred = values - values.mean()
    scale = 6 * centred.norm() / (len(values) - 1) ** 0.5 / 4
    numbers = ((centred / scale).round() + 2).clamp(0, 3)
    found = torch.empty_like(values)
    for number in numbers.unique():
        found[numbers == number] = values[numbers == number].mean()
    return found


def sent(total: torch.Tensor, density: float) -> torch.Tensor:
    """Top-k of every block of 4096, four levels for all of it."""
    places = []
    for start in range(0, len(total), 4096):
        block = total[start : start + 4096]
        places += [start + one for one in block.abs().argsort(descending=True)[: max(1, round(density * len(block)))]]
    found = torch.zeros_like(total)
    found[torch.tensor(places)] = quantised(total[torch.tensor(places)])
    return found


def reference(density: float, beta: float, rate: float) -> torch.Tensor:
    groups = [[0], [1, 2, 3, 4]]
    anchor = [torch.zeros(shape) for shape in SHAPES]
    owed = [[torch.zeros(sum(anchor[i].numel() for i in group)) for group in groups] for _ in range(MEMBERS)]
    for round_ in range(ROUNDS):
        mean = [torch.zeros_like(one) for one in owed[0]]
        for rank in range(MEMBERS):
            theta = [one + change(rank, round_, tuple(one.shape), i) for i, one in enumerate(anchor)]
            for number, group in enumerate(groups):
                delta = torch.cat([(anchor[i] - theta[i]).reshape(-1) for i in group])
                total = beta * owed[rank][number] + delta
                given = sent(total, density)
                owed[rank][number] = total - given
                mean[number] += (rank + 1) / 6 * given
        for group, step in zip(groups, mean):
            for i, part in zip(group, step.split([anchor[i].numel() for i in group])):
                anchor[i] = anchor[i] - rate * part.view(SHAPES[i])
    return torch.cat([one.reshape(-1) for one in anchor])


@pytest.mark.slow
@pytest.mark.parametrize(("share", "beta", "rate"), [(1 / 64, 0.95, 1.0), (0.05, 0.5, 0.7), (0.05, 0.0, 1.0)])
def test_three_rounds_are_those_of_the_paper(share: float, beta: float, rate: float) -> None:
    own = {"codec": f"topk2bit:{share}", "error_decay": beta, "outer_lr": rate}
    found = [
        torch.cat([one.detach().reshape(-1) for one in weights])
        for weights in in_a_group(MEMBERS, lambda exchange: rounds(exchange, SHAPES, **own))
    ]
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0], reference(share, beta, rate), rtol=0, atol=1e-6)


def test_large_tensors_are_encoded_by_themselves() -> None:
    assert segments([87_000, 40, 63, 70_000, 5]) == [87_000, 70_108]
    assert segments([3, 4]) == [7]


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.slow
@pytest.mark.parametrize("share", [1 / 64, 0.05])
def test_fourteen_bits_for_each_element_that_is_sent(share: float) -> None:
    shapes = [(500, 600), (600,), (600, 700), (700,)]

    def body(exchange: RoomExchange) -> int:
        rounds(exchange, shapes, codec=f"topk2bit:{share}", verify=1)
        return exchange.traffic.bytes_sent

    elements = sum(nn.Parameter(torch.zeros(shape)).numel() for shape in shapes)
    assert in_a_group(2, body) == [pytest.approx(ROUNDS * share * elements * (12 + 2) / 8, rel=0.03)] * 2


def test_what_is_too_long_for_one_gather_travels_in_pieces() -> None:
    shapes = [(MAX_GATHER_BYTES // 4 + 10,)]
    found = in_a_group(2, lambda exchange: (rounds(exchange, shapes, 1, codec="fp32"), exchange.room.names))
    assert found[0][1] == ["sparseloco/0/0", f"sparseloco/0/{MAX_GATHER_BYTES}"]
    mean = (change(0, 0, shapes[0], 0) + 2 * change(1, 0, shapes[0], 0)) / 3
    torch.testing.assert_close(found[0][0][0].detach(), mean, rtol=0, atol=1e-6)


# -------------------------------------------------------------------------------------------------- who is left out


@pytest.mark.parametrize("how", ["not finite", "nonsense"])
def test_a_member_that_sends_nothing_sound_is_left_out_by_all(how: str) -> None:
    def body(exchange: RoomExchange) -> Any:
        warnings = list[str]()
        model = Bare([(50,)])
        strategy = strategy_of(exchange, model, codec="fp32", warn=warnings.append)
        for round_ in range(2):
            strategy.begin_step(round_, 1.0)
            with torch.no_grad():
                model.weights[0].add_(exchange.rank + 1.0)
                if exchange.rank == 2 and round_ == 0 and how == "not finite":
                    model.weights[0][3] = torch.nan
            if exchange.rank == 2 and round_ == 0 and how == "nonsense":
                exchange.gather("sparseloco/0/0", b"what is this")
                return None
            strategy.end_step()
            if how == "nonsense":
                break
        return model.weights[0].detach().clone(), warnings

    first, second, third = in_a_group(3, body)
    if how == "nonsense":
        assert torch.equal(first[0], torch.full((50,), 1.5)) and torch.equal(first[0], second[0])
        return
    assert torch.equal(first[0], torch.full((50,), 1.5 + 2.0))
    assert all(torch.equal(first[0], other[0]) for other in (second, third))
    assert first[1] == [] and "weights.0 is not finite" in third[1][0]


def test_who_had_no_samples_keeps_what_it_would_have_sent() -> None:
    def body(exchange: RoomExchange) -> torch.Tensor:
        model = Bare([(50,)])
        strategy = strategy_of(exchange, model, codec="fp32", error_decay=1.0)
        for round_ in range(2):
            strategy.begin_step(round_, float(exchange.rank == 0 or round_ == 1))
            with torch.no_grad():
                model.weights[0].add_(float(exchange.rank))
            strategy.end_step()
        return model.weights[0].detach().clone()

    assert torch.equal(in_a_group(2, body)[0], torch.full((50,), (0 + 2) / 2))


# ----------------------------------------------------------------------------------------------------- too few rounds


def test_fewer_than_a_hundred_exchanges_are_refused_unless_forced() -> None:
    with pytest.raises(BadInput, match="needs 100 exchanges, and 2999 steps have 99") as refused:
        SparseLoCo(StrategyContext(StrategySettings(strategy="sparseloco"), 2999, 0))
    assert "sparseloco.force = true" in refused.value.hint
    SparseLoCo(StrategyContext(StrategySettings(strategy="sparseloco"), 3000, 0))
    forced = StrategySettings(strategy="sparseloco", owned={"sparseloco": {"force": True}})
    SparseLoCo(StrategyContext(forced, 30, 0))


def test_a_plan_has_no_rhythm_for_too_few_exchanges() -> None:
    costs = cost_model("sparseloco")
    assert costs is not None
    assert list(costs.sync_schedules(RunSpec(499, codec=costs.codecs[0]))) == []
    assert [one.interval for one in costs.sync_schedules(RunSpec(3000, codec=costs.codecs[0]))] == [5, 10, 20, 30]
    assert costs.settings(RunSpec(3000), SyncSchedule(30)) == {"sparseloco.sync_interval": 30, "error_feedback": False}


def test_a_rehearsal_is_short_and_not_refused() -> None:
    settings = SparseLoCo.shortened_for_trial(StrategySettings(strategy="sparseloco"), 4)
    assert strategy_class("sparseloco").sync_schedule(settings) == SyncSchedule(4)
    SparseLoCo(StrategyContext(settings, 10, 0))


def test_what_was_not_sent_is_each_members_own() -> None:
    def body(exchange: RoomExchange) -> tuple[set[str], set[str]]:
        member = Member(settings_of("sparseloco"), exchange, make=lambda: Shapes(width=300))
        member.until(5)
        return set(member.strategy.tensors()), set(member.strategy.newcomer_tensors())

    own, newcomers = in_a_group(2, body)[0]
    assert own - newcomers == {"0/residual"}


def test_alone_nothing_is_encoded() -> None:
    (found,) = in_a_group(1, lambda exchange: rounds(exchange, [(50,)], codec="fp32"))
    total = sum(change(0, round_, (50,), 0) for round_ in range(ROUNDS))
    torch.testing.assert_close(found[0].detach(), total, rtol=0, atol=1e-6)
    assert codec_by_name(SparseLoCo.codec(StrategySettings(strategy="sparseloco"))).name == "topk2bit:0.015625"
