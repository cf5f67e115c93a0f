"""Gradients of several members: flags beside them, what is not finite, layers that are used or recomputed twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import Vectors, attached, in_a_group, step
from torch import nn
from torch.utils.checkpoint import checkpoint

from profiles.errors import RunFailed
from tests.training.memory_exchange import RoomExchange
from training.hardware.device import Precision
from training.strategies.allreduce import AllReduce, AllReduceOptions


def test_topk_cuts_no_flag_off() -> None:
    def body(member: RoomExchange) -> list[torch.Tensor | None]:
        model = Vectors()
        model.unused = nn.Parameter(torch.zeros(3))
        strategy = attached(AllReduce, member, model, [], codec="topk:0.02")
        used = model.first if member.rank else torch.cat([model.first, model.second])
        step(strategy, (used * 100.0).sum())
        return [model.first.grad, model.second.grad, model.unused.grad]

    for first, second, unused in in_a_group(2, body):
        assert first is not None and second is not None and unused is None
        assert 0 < int((torch.cat([first, second]) != 0).sum()) <= 6  # 2 % of 131 of each member


def test_a_gradient_that_is_not_finite_is_left_out_named_and_the_third_time_ends_its_member() -> None:
    def body(member: RoomExchange) -> Any:
        warnings: list[str] = []
        model = Vectors()
        strategy = attached(AllReduce, member, model, warnings, bucket_mb=0.0001)
        means = []
        for number in range(3):
            spoilt = torch.nan if member.rank == 1 else 3.0
            try:
                step(strategy, (model.first * 1.0).sum() + (model.second * spoilt).sum(), number)
            except RunFailed as error:
                return warnings, str(error)
            assert model.first.grad is not None and model.second.grad is not None
            means.append((model.first.grad[0].item(), model.second.grad[0].item()))
            model.zero_grad()
        return warnings, means

    (quiet, means), (warnings, failure) = in_a_group(2, body)
    assert quiet == [] and means == [(1.0, 3.0)] * 3
    assert [line.split(" is not")[0] for line in warnings] == [f"step {n}: the gradient of second" for n in (1, 2)]
    assert "step 3: the gradient of second is not finite on this machine, 3 times in a row" in failure


@pytest.mark.slow
def test_an_overflow_of_one_member_makes_all_pass_over_the_step_and_lower_their_scale() -> None:
    def body(member: RoomExchange) -> Any:
        warnings: list[str] = []
        model = Vectors()
        strategy = attached(AllReduce, member, model, warnings, codec="mxfp4", error_feedback=True)
        precision, optimizer = (
            Precision(torch.float16, torch.device("cpu")),
            torch.optim.SGD(model.parameters(), lr=1.0),
        )
        scales = []
        for number in range(3):
            spoilt = torch.inf if member.rank == 1 and number == 1 else 1.0
            step(strategy, (model.first * spoilt).sum() + model.second.sum(), number, precision.loss_scale)
            precision.clip(optimizer, list(model.parameters()), max_norm=0.0)
            precision.step(optimizer, list(model.parameters()))
            optimizer.zero_grad()
            scales.append(precision.loss_scale)
        return scales, model.first[0].item(), warnings

    for scales, weight, warnings in in_a_group(2, body):
        assert scales == [65536.0, 32768.0, 32768.0]
        assert weight == -2.0  # of three steps two were made
        assert warnings == []


def test_overflows_without_end_are_not_silent() -> None:
    def body(member: RoomExchange) -> None:
        model = Vectors()
        strategy = attached(AllReduce, member, model, [])
        for number in range(40):
            step(strategy, (model.first * torch.nan).sum(), number, 2.0**-number)
            model.zero_grad()

    with pytest.raises(RunFailed, match="gradient of first is not finite on this machine, 32 times in a row"):
        in_a_group(1, body)


def reentrant(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def non_reentrant(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def plainly(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


@pytest.mark.parametrize("use", [plainly, non_reentrant, reentrant])
def test_a_layer_used_twice_has_the_gradient_of_both_uses(use: Callable[..., torch.Tensor]) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))

    def loss(net: nn.Sequential, way: Callable[..., torch.Tensor], rank: int, number: int) -> torch.Tensor:
        x = torch.full((2, 4), 1.0 + rank + number, requires_grad=True)
        return way(net[1], torch.tanh(way(net[1], net[0](x)))).pow(2).sum() + net[2](x).sum()

    expected = []
    for number in range(2):
        net = model()
        (sum(loss(net, plainly, rank, number) for rank in range(2)) / 2).backward()
        expected.append([p.grad for p in net.parameters()])

    def body(member: RoomExchange, net: nn.Sequential) -> Any:
        strategy = attached(AllReduce, member, net, [], bucket_mb=0.00002)
        found = []
        for number in range(2):
            step(strategy, loss(net, use, member.rank, number), number)
            found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
            net.zero_grad()
        return found

    nets = [model(), model()]
    for found in in_a_group(2, lambda member: body(member, nets[member.rank])):
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other)


def test_one_more_use_than_in_the_step_before_is_refused() -> None:
    def body(member: RoomExchange) -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        strategy = attached(AllReduce, member, net, [], bucket_mb=0.00002)
        for number, uses in enumerate((1, 2)):
            x = net[0](torch.ones(1, 4))
            for _ in range(uses):
                x = reentrant(net[1], x)
            step(strategy, x.sum(), number)

    with pytest.raises(RunFailed, match=r"gradient of 1\.\w+ was added to after it had been sent: in step 2"):
        in_a_group(1, body)


def test_weights_that_differ_are_mended_and_the_difference_is_told() -> None:
    def body(member: RoomExchange) -> Any:
        warnings: list[str] = []
        model = Vectors()
        strategy = attached(AllReduce, member, model, warnings, verify_interval=1)
        reports = []
        for number in range(2):
            step(strategy, model.first.sum(), number)
            if number == 1 and member.rank == 1:
                model.second.data[3] = 0.25
            reports.append(strategy.end_step())
        return reports, warnings, model.second[3].item()

    for reports, warnings, weight in in_a_group(2, body):
        assert [report.drift for report in reports] == [0.0, 0.25]
        assert warnings == ["weights differed by up to 0.25 between the members and were set to member 0's"]
        assert weight == 0.0


def test_buckets_are_as_large_as_the_engine_of_all_members_wants() -> None:
    automatic, chosen = AllReduceOptions(), AllReduceOptions(bucket_mb=2.0)
    assert [automatic.bucket_elements(engine) for engine in ("mesh", "nccl")] == [1_000_000, 6_250_000]
    assert [chosen.bucket_elements(engine) for engine in ("mesh", "nccl")] == [500_000, 500_000]
