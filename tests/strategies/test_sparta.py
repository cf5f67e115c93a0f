"""SPARTA against its equations; which weights it averages; late, unfit, stopped and new members."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_models import Watched, attached, in_a_group
from torch import nn

from profiles.errors import RunFailed
from tests.training.memory_exchange import RoomExchange
from training.exchange.base import SoloExchange
from training.strategies.sparta import Sparta, SpartaOptions

SIZES = (40, 35, 25)
EVERYTHING = {"share": 1.0}


class Model(nn.Module):
    """Weights of several shapes, one of which does not lie row by row."""

    def __init__(self, start: torch.Tensor | None = None) -> None:
        super().__init__()
        values = (torch.zeros(100) if start is None else start.clone()).split(SIZES)
        self.matrix = nn.Parameter(values[0].view(5, 8))
        self.turned = nn.Parameter(values[1].view(5, 7).t().contiguous().t())
        self.vector = nn.Parameter(values[2])

    @property
    def flat(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters()])

    @torch.no_grad()
    def move(self, change: torch.Tensor) -> None:
        for parameter, part in zip(self.parameters(), change.split(SIZES), strict=True):
            parameter.add_(part.view_as(parameter))


def sparta(member: Any, model: nn.Module, warnings: list[str] | None = None, **own: Any) -> Sparta:
    more = {name: own.pop(name) for name in ("codec",) if name in own}
    found = attached(Sparta, member, model, [] if warnings is None else warnings, owned={"sparta": own}, **more)
    assert isinstance(found, Sparta)
    return found


def step(strategy: Sparta, model: Model, change: torch.Tensor | float, number: int, weight: float = 1.0) -> Any:
    strategy.begin_step(number, weight)
    model.move(change if isinstance(change, torch.Tensor) else torch.full((100,), change))
    return strategy.end_step()


def changes(rank: int, steps: int) -> list[torch.Tensor]:
    return list(torch.randn(steps, 100, generator=torch.Generator().manual_seed(rank)))


def trained(member: RoomExchange, steps: int, **own: Any) -> torch.Tensor:
    model = Model(torch.arange(100.0))
    strategy = sparta(member, model, **own)
    for number, change in enumerate(changes(member.rank, steps)):
        step(strategy, model, change, number, weight=1.0 + member.rank)
    return model.flat


def reference(steps: int, chosen: Any, interval: int, delay: int, counts: Sequence[float]) -> list[torch.Tensor]:
    """Every member's weights after some steps, as the paper says it."""
    theta = [torch.arange(100.0) for _ in counts]
    sent: dict[int, list[torch.Tensor]] = {}
    for t in range(steps):
        for i, own in enumerate(theta):
            own += changes(i, steps)[t]
        if t - delay in sent and delay:
            values, where = sent.pop(t - delay), chosen((t - delay) // interval)
            mean = sum(c * v for c, v in zip(counts, values)) / sum(counts)
            for own, value in zip(theta, values):
                own[where] += mean - value
        if (t + 1) % interval == 0:
            where = chosen(t // interval)
            sent[t] = [own[where].clone() for own in theta]
            if not delay:
                mean = sum(c * v for c, v in zip(counts, sent[t])) / sum(counts)
                for own in theta:
                    own[where] = mean
    return theta


@pytest.mark.parametrize("selection", ["random", "shuffled", "partitioned"])
@pytest.mark.parametrize(("interval", "delay"), [(1, 0), (3, 0), (1, 1), (1, 2), (2, 2), (3, 1)])
def test_three_members_hold_what_the_paper_says(selection: str, interval: int, delay: int) -> None:
    own = {"share": 0.2, "interval": interval, "delay": delay, "selection": selection}
    options = SpartaOptions.model_validate(own)
    found = in_a_group(3, lambda member: trained(member, 10, **own))
    expected = reference(
        10, lambda n: torch.from_numpy(options.selected_indices(n, 100, 0)), interval, delay, (1, 1, 1)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_members_count_by_their_samples_where_that_is_wanted() -> None:
    own = {"share": 0.2, "interval": 2, "weighting": "samples"}
    options = SpartaOptions.model_validate(own)
    found = in_a_group(3, lambda member: trained(member, 6, **own))
    expected = reference(6, lambda n: torch.from_numpy(options.selected_indices(n, 100, 0)), 2, 0, (1, 2, 3))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("delay", [0, 2])
def test_one_member_trains_as_without_a_strategy(delay: int) -> None:
    plain = torch.arange(100.0)
    for change in changes(0, 6):
        plain += change
    # of the exchange in memory it uses nothing that this one has not
    alone = trained(SoloExchange(), 6, share=0.2, delay=delay)  # type: ignore[arg-type]
    (left,) = in_a_group(1, lambda member: trained(member, 6, share=0.2, delay=delay))
    assert torch.equal(alone, plain) and torch.equal(left, plain)


# --------------------------------------------------------------------------------------------------- which weights


def sets(selection: str, numbers: range, share: float = 0.3, seed: int = 0) -> list[set[int]]:
    options = SpartaOptions.model_validate({"share": share, "selection": selection})
    found = [options.selected_indices(number, 100, seed).tolist() for number in numbers]
    assert all(sorted(set(one)) == one for one in found)
    return [set(one) for one in found]


@pytest.mark.slow
def test_random_weights_are_new_ones_each_time_and_all_as_often() -> None:
    found = sets("random", range(1000))
    assert {len(one) for one in found} == {30}
    common = [len(one & other) for one, other in itertools.pairwise(found)]
    assert sum(common) / len(common) == pytest.approx(9, abs=0.3)
    often = [sum(index in one for one in found) for index in range(100)]
    assert min(often) > 220 and max(often) < 380
    assert sets("random", range(3), seed=1) != found[:3] and sets("random", range(3)) == found[:3]


def test_partitioned_weights_are_all_averaged_once_and_then_in_another_order() -> None:
    first, second = sets("partitioned", range(4)), sets("partitioned", range(4, 8))
    for cycle in (first, second):
        assert [len(one) for one in cycle] == [30, 30, 30, 10]
        assert set.union(*cycle) == set(range(100))
    assert first[0] != second[0]


def test_shuffled_weights_come_in_fixed_turns() -> None:
    first = sets("shuffled", range(4))
    assert set.union(*first) == set(range(100)) and sum(map(len, first)) == 100
    assert sets("shuffled", range(4, 8)) == first


@pytest.mark.parametrize(("codec", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("share", [0.005, 0.05])
def test_a_step_sends_its_share_and_no_mask(codec: str, width: int, share: float) -> None:
    def body(member: RoomExchange) -> list[int]:
        watched = Watched(member)
        strategy = sparta(watched, nn.Linear(100, 300), share=share, codec=codec)
        for number in range(5):
            strategy.begin_step(number, 1.0)
            strategy.end_step()
        return [size for _, size in watched.given]

    assert in_a_group(2, body) == [[pytest.approx(width * share * 30_300, rel=0.03)] * 5] * 2


# ------------------------------------------------------------------------------------------- evaluation, newcomers


def test_the_mean_of_all_weights_is_evaluated_and_held_in_the_end() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model()
        strategy = sparta(member, model, share=0.05, delay=2)
        for number in range(5):
            step(strategy, model, float(member.rank), number)
        own = model.flat
        with strategy.consensus():
            seen = model.flat
        assert torch.equal(model.flat, own)
        with strategy.for_newcomer():
            assert torch.equal(model.flat, own)
        report = strategy.finish()
        with strategy.consensus():
            assert report is not None and strategy.synchronised
            return own, seen, model.flat, report

    found = in_a_group(3, body)
    mean = sum(own for own, _, _, _ in found) / 3
    for _, seen, last, report in found:
        torch.testing.assert_close(seen, mean)
        torch.testing.assert_close(last, mean)
        assert torch.equal(last, found[0][2]) and report.weight_hash == found[0][3].weight_hash


def test_the_report_tells_how_far_this_member_was_from_the_mean() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model()
        return step(sparta(member, model, **EVERYTHING), model, 3.0 * member.rank, 0)

    reports = in_a_group(3, body)
    assert [report.drift for report in reports] == [3.0, 0.0, 3.0]
    assert len({report.weight_hash for report in reports}) == 1
    assert [(report.round, report.members) for report in reports] == [(1, [0, 1, 2])] * 3


@pytest.mark.parametrize(
    ("own", "reported", "averaged"),
    [({}, [0, 1, 2, 3], [0, 1, 2, 3]), ({"interval": 2}, [1, 3], [1, 3]), ({"delay": 2}, [2, 3], [2, 3])],
)
def test_reports_come_where_means_are_merged(own: dict[str, Any], reported: list[int], averaged: list[int]) -> None:
    def body(member: RoomExchange) -> Any:
        model, found = Model(), []
        strategy = sparta(member, model, **{"share": 0.1} | own)
        for number in range(4):
            strategy.begin_step(number, 1.0)
            said = strategy.steps_to_average
            found.append((strategy.end_step() is not None, said, strategy.synchronised))
        return found

    for found in in_a_group(2, body):
        assert [number for number, (report, _, _) in enumerate(found) if report] == reported
        assert [number for number, (_, said, _) in enumerate(found) if said == 0] == averaged
        assert [sync for _, _, sync in found] == [number in reported and "delay" not in own for number in range(4)]


# ------------------------------------------------------------------------------------- late, unfit, stopped members


def test_who_is_late_takes_the_mean_of_the_others_and_is_told() -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings = Model(), list[str]()
        step(sparta(member, model, warnings, **EVERYTHING), model, float(member.rank), 0)
        return model.vector[0].item(), warnings

    found = in_a_group(2, body, lambda name: {1} if name == "sparta/0" else ())
    assert found == [(0.0, []), (0.0, ["step 1: this machine's weights came after the deadline"])]


def test_weights_that_are_not_finite_are_left_out_and_replaced_and_the_third_time_ends_the_member() -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings = Model(), list[str]()
        strategy = sparta(member, model, warnings, **EVERYTHING)
        for number in range(3):
            if member.rank == 1:
                model.vector.data[0] = torch.nan
            try:
                step(strategy, model, 1.0, number)
            except RunFailed as error:
                return warnings, model.vector[0].item(), str(error)
        return warnings, model.vector[0].item(), ""

    (warnings, weight, _), (said, _, failure) = in_a_group(2, body)
    assert warnings == [] and weight == 3.0
    assert [line.split(" is not")[0] for line in said] == [f"step {number}: the weight vector" for number in (1, 2)]
    assert "step 3: the weight vector is not finite on this machine, 3 times in a row" in failure


def test_what_is_not_finite_is_replaced_after_a_delay_too() -> None:
    def body(member: RoomExchange) -> Any:
        model = Model()
        strategy = sparta(member, model, delay=1, **EVERYTHING)
        if member.rank == 1:
            model.vector.data[0] = torch.nan
        step(strategy, model, 1.0, 0)
        step(strategy, model, 1.0, 1)
        return model.vector.tolist()

    assert in_a_group(2, body) == [[2.0] * 25, [1.0] * 25]


# ---------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("own", "most"), [({"share": 0.05, "delay": 11}, 10), ({"share": 1.0, "interval": 4, "delay": 5}, 4)]
)
def test_a_delay_that_merges_the_same_weights_on_each_other_is_refused(own: dict[str, Any], most: int) -> None:
    with pytest.raises(ValueError, match=f"must be at most {most} here"):
        SpartaOptions.model_validate(own)
    SpartaOptions.model_validate(own | {"delay": most})
