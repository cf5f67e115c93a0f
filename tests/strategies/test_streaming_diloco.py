"""Streaming DiLoCo in a group: layout, overlapping fragments, late and unfit deltas, members that go, RDA's bits."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from small_models import Vectors, attached, in_a_group
from torch import nn

from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.strategies.base import Strategy
from training.strategies.costs import Compute, RunSpec, SyncSchedule
from training.strategies.parts.fragments import fragments_of, size_of
from training.strategies.parts.outer_costs import OuterCosts
from training.strategies.parts.outer_optimizers import OuterOptions
from training.strategies.parts.rda import same_norm
from training.strategies.registry import cost_model
from training.strategies.streaming_diloco import StreamingCosts, StreamingDiLoCo, StreamingOptions

PLAIN = {"sync_interval": 4, "fragments": 2, "sync_delay": 3, "mixing": 0.0, "outer_lr": 1.0, "outer_momentum": 0.0}


def streaming(member: Any, model: nn.Module, warnings: list[str] | None = None, **settings: Any) -> Strategy:
    plain = {name: settings.pop(name) for name in ("codec", "error_feedback", "verify_interval") if name in settings}
    own = {"streaming_diloco": PLAIN | settings}
    said = [] if warnings is None else warnings
    return attached(StreamingDiLoCo, member, model, said, **{"codec": "fp32"} | plain, owned=own)


def local_step(strategy: Strategy, model: Vectors, change: float, number: int, weight: float = 1.0) -> Any:
    strategy.begin_step(number, weight)
    model.first.data += change
    model.second.data += change
    return strategy.end_step()


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.norm = nn.LayerNorm(8)


def test_layers_go_to_the_fragments_in_turns_and_the_rest_where_least_is() -> None:
    found = fragments_of(Stack(6), 3)
    layers = [[piece.name.split(".")[1] for piece in one if piece.name.startswith("layers")] for one in found]
    assert layers == [["0", "0", "3", "3"], ["1", "1", "4", "4"], ["2", "2", "5", "5"]]
    assert max(map(size_of, found)) - min(map(size_of, found)) <= 2
    assert [piece.is_embedding for piece in found[0]] == sorted(piece.is_embedding for piece in found[0])


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_every_element_is_in_one_fragment(count: int) -> None:
    model = Stack(2)
    for parameter in model.parameters():
        parameter.data.zero_()
    for fragment in fragments_of(model, count):
        assert fragment
        for piece in fragment:
            piece.values.data += 1.0
    assert all(torch.equal(parameter, torch.ones_like(parameter)) for parameter in model.parameters())


def test_fewer_elements_than_fragments_make_fewer_fragments() -> None:
    assert [size_of(one) for one in fragments_of(nn.Linear(2, 1, bias=False), 5)] == [1, 1]


def test_two_fragments_are_under_way_at_once_and_each_comes_once_in_an_interval() -> None:
    def body(member: RoomExchange) -> Any:
        model = Vectors()
        strategy = streaming(member, model)
        merged = [local_step(strategy, model, 1.0, number) is not None for number in range(13)]
        return [number + 1 for number, one in enumerate(merged) if one], member.room.names

    at, names = in_a_group(2, body)[0]
    assert at == [5, 7, 9, 11, 13]  # begun at 2, 4, 6, ... and merged three steps later
    assert names[:4] == ["stream/1/0", "stream/0/0", "stream/1/1", "stream/0/1"]


@pytest.mark.parametrize(("mixing", "tau"), [(0.0, 2), (0.5, 2), (0.5, 1), (0.75, 2)])
def test_a_merge_drops_its_share_of_the_steps_that_the_exchange_overlapped(mixing: float, tau: int) -> None:
    def body(member: RoomExchange) -> list[float]:
        model, at = Vectors(), []
        strategy = streaming(member, model, fragments=1, sync_delay=tau, mixing=mixing)
        for number in range(16):
            if local_step(strategy, model, 1.0, number) is not None:
                with strategy.consensus():
                    at.append(model.first[0].item())
        return at

    for anchors in in_a_group(2, body):
        assert [later - sooner for sooner, later in itertools.pairwise(anchors)] == [4 - (1 - mixing) * tau] * 2


@pytest.mark.parametrize(("delay", "kept"), [(0, 0.0), (1, 0.0), (2, 0.5), (-1, 0.5)])
def test_own_weights_stay_in_a_merge_where_more_than_a_step_overlaps(delay: int, kept: float) -> None:
    assert StreamingOptions(sync_interval=40, sync_delay=delay).alpha == kept


def test_a_plan_may_overlap_one_step_at_the_loss_of_diloco() -> None:
    run, options = RunSpec(1500, codec="mxfp4", texts=True), StreamingOptions()
    costs, plain = StreamingCosts("streaming_diloco", options), OuterCosts("diloco", OuterOptions())
    delays = {schedule.delay for schedule in costs.sync_schedules(run) if schedule.interval == 50}
    assert delays == {0, 1, 5, 10}
    losses = [costs.learning(run, SyncSchedule(50, delay), 3.0).loss for delay in (1, 5)]
    assert losses[0] == plain.learning(run, SyncSchedule(50, 1), 3.0).loss < losses[1]


def test_the_end_merges_all_fragments_by_their_mean_alone() -> None:
    def body(member: RoomExchange) -> Any:
        model = Vectors()
        strategy = streaming(member, model, outer_lr=0.5, outer_momentum=0.9, sync_delay=0)
        for number in range(5):
            local_step(strategy, model, 1.0 + member.rank, number)
        report = strategy.finish()
        return model.first[0].item(), model.second[0].item(), report is not None, strategy.members

    for first, second, reported, members in in_a_group(2, body):
        # A delta of -1.5 a step: an outer step (1 + 0.9) * 0.5 = 0.95 times it at the turns 4 and 2, the rest whole.
        assert (first, second) == pytest.approx((6 * 0.95 + 1.5, 3 * 0.95 + 4.5))
        assert reported and members == (0, 1)


def test_a_snapshot_without_a_group_is_of_the_state_before_both_exchanges() -> None:
    def body(member: RoomExchange) -> Any:
        model = Vectors()
        strategy = streaming(member, model)
        for number in range(4):
            local_step(strategy, model, 1.0, number)
        member.gone = True
        tensors, state = strategy.tensors(), strategy.state()
        member.gone = False
        strategy = streaming(member, model)
        strategy.load(tensors, state)
        reports = [local_step(strategy, model, 0.0, number) for number in range(4, 8)]
        told = [one["weight"] for one in state["parts"]]
        return set(tensors), told, [one is not None for one in reports], model.first[0].item(), model.second[0].item()

    for names, weights, reported, first, second in in_a_group(2, body):
        assert names == {"0/anchor", "0/momentum", "1/anchor", "1/momentum"} and weights == [4.0, 4.0]
        assert reported == [False, False, False, True]  # both sent at once, merged three steps later
        assert (first, second) == pytest.approx((4.0, 4.0))


def test_the_others_merge_both_fragments_of_a_member_that_went_meanwhile() -> None:
    def body(member: RoomExchange) -> Any:
        model = Vectors()
        strategy = streaming(member, model, verify_interval=1)
        for number in range(4):
            local_step(strategy, model, 1.0 + member.rank, number)
        if member.rank == 2:
            member.room.leave(2)
            return None
        reports = [local_step(strategy, model, 0.0, number) for number in range(4, 9)]
        return [one.members for one in reports if one], strategy.state()["parts"][0]["members"], model.first[0].item()

    first, second, _ = in_a_group(3, body)
    assert first == second
    assert first[0] == [[0, 1, 2], [0, 1, 2], [0, 1]] and first[2] == pytest.approx(8.0)


def test_a_late_delta_counts_once() -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings = Vectors(), list[str]()
        strategy = streaming(member, model, warnings, sync_delay=1)
        for number in range(12):
            local_step(strategy, model, 1.0 if number == 0 and member.rank == 1 else 0.0, number)
        return model.second[0].item(), model.first[0].item(), warnings

    found = in_a_group(2, body, lambda name: {1} if name == "stream/1/0" else ())
    assert [weights[:2] for weights in found] == [pytest.approx((0.5, 0.5))] * 2
    late = "fragment 2 of 2, round 1: what this machine learned came too late and counts in the next one"
    assert [warnings for *_, warnings in found] == [[], [late]]


def test_weights_that_are_not_finite_are_left_out_and_replaced() -> None:
    def body(member: RoomExchange, merge: str) -> Any:
        model, warnings = Vectors(), list[str]()
        strategy = streaming(member, model, warnings, sync_delay=0, merge=merge)
        for number in range(4):
            if member.rank == 1 and number == 1:
                model.second.data[0] = math.nan
            local_step(strategy, model, 1.0, number)
        return model.first[0].item(), model.second[0].item(), warnings

    for merge in ("mean", "rda"):
        (*mine, silent), (*theirs, said) = in_a_group(2, lambda member, merge=merge: body(member, merge))
        assert mine == theirs == pytest.approx([4.0, 4.0]) and silent == []
        assert [line.split(" is not")[0] for line in said] == ["fragment 2 of 2, round 1: the weight second"]


def test_anchors_that_differ_are_mended_fragment_by_fragment() -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings = Vectors(), list[str]()
        strategy = streaming(member, model, warnings, sync_delay=1, verify_interval=1)
        if member.rank == 1:
            strategy.tensors()["1/anchor"][5] += 0.5
        hashes = [report.weight_hash for number in range(6) if (report := local_step(strategy, model, 1.0, number))]
        return hashes, strategy.tensors()["1/anchor"].clone(), warnings

    (hashes, anchor, warnings), (told, theirs, _) = in_a_group(2, body)
    assert hashes == told and torch.equal(anchor, theirs)
    assert "fragment 2 of 2, round 1: weights differed by up to" in warnings[0]


@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_drift_is_how_far_a_member_is_from_the_anchor_when_it_merges(mixing: float) -> None:
    def body(member: RoomExchange) -> list[float]:
        model = Vectors()
        strategy = streaming(member, model, sync_delay=0, fragments=1, mixing=mixing)
        reports = [local_step(strategy, model, float(member.rank), number) for number in range(8)]
        return [report.drift for report in reports if report]

    first, second = in_a_group(2, body)
    # 0 and 4, whose mean is 2; half of the distance stays where it is mixed, and grows by as much again.
    assert first == second == ([2.0, 2.0] if not mixing else [2.0, 3.0])


@pytest.mark.parametrize("merge", ["mean", "rda"])
def test_an_interval_carries_the_weights_once_and_a_norm_for_every_tensor(merge: str) -> None:
    def body(member: RoomExchange) -> int:
        model = Vectors(4096)
        strategy = streaming(member, model, sync_delay=1, merge=merge, codec="mxfp4")
        for number in range(8):
            local_step(strategy, model, 1.0, number)
        before = member.traffic.bytes_sent
        for number in range(8, 16):
            local_step(strategy, model, 1.0, number)
        return member.traffic.bytes_sent - before

    norms = 2 * 4 if merge == "rda" else 0
    assert in_a_group(2, body) == [2 * (2 * 4096 * 17 // 32 + norms)] * 2


def test_rda_keeps_the_length_of_deltas_that_are_orthogonal() -> None:
    def body(member: RoomExchange, merge: str) -> float:
        model = Vectors()
        strategy = streaming(member, model, sync_delay=0, merge=merge)
        for number in range(4):
            strategy.begin_step(number, 1.0)
            model.first.data[member.rank] += 0.25
            strategy.end_step()
        return model.first.norm().item()

    assert in_a_group(4, lambda member: body(member, "mean")) == pytest.approx([0.5] * 4)
    assert in_a_group(4, lambda member: body(member, "rda")) == pytest.approx([1.0] * 4)


def test_rda_of_embeddings_is_the_plain_mean_and_small_neighbours_survive_four_bits() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(33))
            self.tokens = nn.Embedding(10, 4)
            self.tokens.weight.data.zero_()

    def body(member: RoomExchange) -> list[float]:
        model = Mixed()
        strategy = streaming(member, model, sync_delay=0, fragments=1, merge="rda", codec="mxfp4")
        for number in range(4):
            strategy.begin_step(number, 1.0)
            model.large.data += 0.25
            model.small.data += 0.001
            model.tokens.weight.data[member.rank] += 2.0**-13
            strategy.end_step()
        return [model.large.mean().item(), model.small.min().item(), model.tokens.weight.norm().item()]

    for large, small, tokens in in_a_group(4, body):
        assert (large, small) == pytest.approx((1.0, 0.004))
        assert tokens == pytest.approx(4 * 2.0**-13)  # four rows, each of four numbers, a quarter of every delta


def test_the_norm_is_the_same_whatever_the_processor_and_right() -> None:
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    assert same_norm(values) == pytest.approx(math.sqrt(math.fsum(value**2 for value in values.tolist())), rel=1e-14)
    assert same_norm(torch.empty(0)) == 0.0
    squares = [float(one) ** 2 for one in values[:5]]
    assert same_norm(values[:5]) == math.sqrt(((squares[0] + squares[3]) + squares[2]) + (squares[1] + squares[4]))


def test_a_member_without_samples_pulls_nobody_back() -> None:
    def body(member: RoomExchange) -> float:
        model = Vectors()
        strategy = streaming(member, model, sync_delay=1, mixing=0.5)
        for number in range(24):
            works = member.rank == 0 or number == 23
            local_step(strategy, model, float(works and number < 20), number, weight=float(works))
        strategy.finish()
        return model.first[0].item()

    assert min(in_a_group(2, body)) > 15.0


@pytest.mark.parametrize(
    ("chosen", "tau", "alpha"),
    [
        ({}, 5, 0.5),
        ({"sync_interval": 8}, 2, 0.5),
        ({"sync_interval": 1, "fragments": 1}, 0, 0.0),
        ({"sync_delay": 0}, 0, 0.0),
        ({"sync_delay": 7, "mixing": 0.0}, 7, 0.0),
    ],
)
def test_overlap_and_mixing_follow_the_interval(chosen: dict[str, Any], tau: int, alpha: float) -> None:
    options = StreamingOptions(**chosen)
    assert (options.overlap, options.alpha) == (tau, alpha)


@pytest.mark.parametrize("wrong", [{"sync_interval": 3}, {"sync_interval": 8, "sync_delay": 8}])
def test_what_does_not_fit_together_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=r"at most sync_interval \(3\)|below sync_interval \(8\)"):
        StreamingOptions(**wrong)


def test_its_costs_are_in_pieces_that_more_steps_hide_than_one_exchange_has() -> None:
    costs, settings = cost_model("streaming_diloco"), StrategySettings()
    assert costs is not None
    assert (costs.longest(1001), costs.elements(1001)) == (251, 1001)
    assert costs.hidden(30.0, Compute(1.0, 1, 1001), SyncSchedule(50, 5), settings) == 20.0
    assert costs.hidden(30.0, Compute(1.0, 1, 1001), SyncSchedule(4, 3), settings) == 4.0
    more = costs.with_options(StrategySettings(owned={"streaming_diloco": {"fragments": 16}}))
    assert (more.longest(1600), more.vectors, costs.vectors) == (100, 3, 3)
    assert min(schedule.interval for schedule in more.sync_schedules(RunSpec(1000))) == 20
