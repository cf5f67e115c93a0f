"""DiLoCo in a group: late deltas, weights that differ or are not finite, snapshots during an exchange."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from small_models import Vectors, attached, in_a_group

from profiles.errors import RunFailed
from tests.training.memory_exchange import RoomExchange
from training.strategies.base import Strategy
from training.strategies.diloco import DiLoCo

PLAIN: dict[str, Any] = {"codec": "fp32", "sync_interval": 1, "outer_lr": 1.0, "outer_momentum": 0.0}


def local_step(strategy: Strategy, model: Vectors, change: float, number: int) -> Any:
    strategy.begin_step(number, 1.0)
    model.first.data += change
    return strategy.end_step()


def test_a_late_delta_counts_once() -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings = Vectors(), list[str]()
        strategy = attached(DiLoCo, member, model, warnings, **PLAIN | {"codec": "int8"}, error_feedback=True)
        for number in range(3):
            local_step(strategy, model, 1.0 if number == 0 and member.rank == 1 else 0.0, number)
        return model.first[0].item(), warnings

    found = in_a_group(2, body, lambda name: {1} if name == "diloco/0" else ())
    assert [weight for weight, _ in found] == pytest.approx([0.5, 0.5])
    assert [warnings for _, warnings in found] == [
        [],
        ["round 1: what this machine learned came too late and counts in the next one"],
    ]


@pytest.mark.parametrize("verify_interval", [1, 0])
def test_anchors_that_differ_are_found_by_the_next_round_and_mended(verify_interval: int) -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings = Vectors(), list[str]()
        strategy = attached(DiLoCo, member, model, warnings, **PLAIN, verify_interval=verify_interval)
        reports = [local_step(strategy, model, 1.0, 0)]
        if member.rank == 1:
            strategy.tensors()["anchor"][5] += 0.5
            model.first.data[5] += 0.5
        reports += [local_step(strategy, model, 1.0, number) for number in (1, 2)]
        assert reports[0].delta_norm == pytest.approx(math.sqrt(model.first.numel()))  # one in each weight
        assert reports[0].correlation == (1.0 if verify_interval else None)
        return [report.drift for report in reports], [report.weight_hash for report in reports], warnings

    (drift, hashes, warnings), (_, theirs, _) = in_a_group(2, body)
    if verify_interval:
        assert drift == [0.0, 0.0, 0.5] and hashes[1] != theirs[1] and hashes[2] == theirs[2]
        assert warnings == ["round 3: weights differed by up to 0.5 between the members and were set to member 0's"]
    else:
        assert drift == [None] * 3 and hashes[2] != theirs[2]


def test_what_is_late_and_not_finite_leaves_nothing_behind() -> None:
    def body(member: RoomExchange) -> Any:
        model = Vectors()
        strategy = attached(DiLoCo, member, model, [], **PLAIN | {"codec": "int8"}, error_feedback=True)
        for number in range(2):
            if member.rank == 1 and number == 0:
                model.first.data[0] = torch.nan
            local_step(strategy, model, 1.0, number)
        return model.first[1].item()

    assert in_a_group(2, body, lambda name: {1} if name == "diloco/0" else ()) == pytest.approx([2.0, 2.0], abs=0.02)


def test_weights_that_are_not_finite_are_left_out_and_replaced_and_the_third_time_ends_the_member() -> None:
    def body(member: RoomExchange) -> Any:
        model, warnings, weights = Vectors(), list[str](), []
        strategy = attached(DiLoCo, member, model, warnings, **PLAIN | {"codec": "mxfp4"})
        for number in range(3):
            if member.rank == 1:
                model.second.data[0] = torch.nan
            try:
                local_step(strategy, model, 1.0, number)
            except RunFailed as error:
                return weights, warnings, str(error)
            weights.append((model.first[0].item(), model.second[0].item()))
        return weights, warnings, ""

    (weights, warnings, _), (theirs, said, failure) = in_a_group(2, body)
    assert weights == [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)] and warnings == []
    assert theirs == weights[:2]
    assert [line.split(" is not")[0] for line in said] == [f"round {n}: the weight second" for n in (1, 2)]
    assert "round 3: the weight second is not finite on this machine, 3 times in a row" in failure


def test_a_snapshot_without_a_group_is_of_the_state_before_the_exchange() -> None:
    settings = PLAIN | {"codec": "int8", "sync_interval": 4, "sync_delay": 2, "error_feedback": True}

    def body(member: RoomExchange) -> Any:
        model = Vectors()
        strategy = attached(DiLoCo, member, model, [], **settings)
        for number in range(5):
            local_step(strategy, model, 1.0, number)
        member.gone = True
        tensors, state = strategy.tensors(), strategy.state()
        member.gone = False
        strategy = attached(DiLoCo, member, model, [], **settings)
        strategy.load(tensors, state)
        reports = [local_step(strategy, model, 0.0, number) for number in range(5, 8)]
        return set(tensors), state["weight"], [report is not None for report in reports], model.first[0].item()

    for names, weight, reported, value in in_a_group(2, body):
        assert names == {"anchor", "momentum"} and weight == 5.0
        assert reported == [False, False, True]  # sent at once, merged two steps later
        assert value == pytest.approx(5.0, abs=0.1)
