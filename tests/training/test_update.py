"""The end of a step: what a loss that is not finite leaves, what is clipped, and what is read of the device."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiles.errors import RunFailed
from profiles.schema import StrategySettings
from training.exchange.base import SoloExchange
from training.hardware.device import Precision, read
from training.loop.last_step import LastStep
from training.loop.update import Update
from training.strategies.base import StrategyContext
from training.strategies.registry import strategy_class

CPU = torch.device("cpu")


def update_of(model: nn.Module, strategy: str, max_norm: float, dtype: torch.dtype | None = None) -> Update:
    kind = strategy_class(strategy)
    own = kind(StrategyContext(StrategySettings(strategy=strategy), 10, 0, max_grad_norm=max_norm))
    exchange, optimizer = SoloExchange(), torch.optim.SGD(model.parameters(), lr=1.0)
    own.set_optimizer(optimizer)
    own.attach(model, exchange)
    precision = Precision(dtype, CPU)
    own.begin_step(0, 1.0)
    return Update(
        list(model.parameters()), precision, optimizer, own, exchange, LastStep(model, CPU, kind), max_norm
    )  # fmt: skip


def refuse(loss: float) -> str:
    if not math.isfinite(loss):
        raise RunFailed("not finite")
    return ""


@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "demo"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_leaves_the_weights_as_they_were(strategy: str, bad: float) -> None:
    model = nn.Linear(3, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    update = update_of(model, strategy, 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, bad)
    with pytest.raises(RunFailed):
        update.run([torch.tensor(1.0), torch.tensor(bad)], refuse)
    assert all(map(torch.equal, before, model.parameters()))
    assert update.last_step.stage == "between"


def test_the_norm_is_that_before_clipping_and_the_step_as_long_as_is_allowed() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    update = update_of(model, "allreduce", 0.5)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    figures = update.run([torch.tensor(0.25), torch.tensor(0.5)], refuse)
    assert (figures.loss, figures.norm, figures.own_norm) == (0.75, 5.0, None)
    assert float((model.weight.detach() - before).norm()) == pytest.approx(0.5, abs=1e-5)


def test_a_member_without_a_sample_has_a_loss_of_zero_and_no_norm_where_nothing_is_clipped() -> None:
    figures = update_of(nn.Linear(2, 1), "diloco", 0.0).run([], refuse)
    assert (figures.loss, figures.norm) == (0.0, None)


@given(st.lists(st.floats(width=32), min_size=2, max_size=4), st.integers(0, 2))
def test_numbers_are_read_as_they_are(numbers: list[float], missing: int) -> None:
    scalars: list[torch.Tensor | None] = [torch.tensor(number) for number in numbers[1:]]
    first, rest = read(torch.tensor(numbers[0], dtype=torch.float64), *scalars, *[None] * missing)
    assert str([first, *rest]) == str([*numbers, *[None] * missing])  # NaN is not equal to itself
