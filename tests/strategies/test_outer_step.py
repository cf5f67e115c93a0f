"""Outer optimizers against torch's own, and what a person may choose of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from small_models import Vectors, attached, in_a_group

from profiles.errors import BadInput, RunFailed
from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.strategies.costs import RunSpec, Start, SyncSchedule
from training.strategies.diloco import DiLoCo
from training.strategies.parts.outer_optimizers import Nesterov, OuterOptions
from training.strategies.registry import cost_model

Torchs = type[torch.optim.Optimizer]
ADAM = {"betas": (0.8, 0.99), "eps": 0.1}
CASES: list[tuple[dict[str, Any], Torchs, dict[str, Any]]] = [
    ({"outer_optimizer": "nesterov"}, torch.optim.SGD, {"momentum": 0.8, "nesterov": True}),
    ({"outer_optimizer": "sgd"}, torch.optim.SGD, {"momentum": 0.8}),
    ({"outer_optimizer": "adamw"}, torch.optim.AdamW, ADAM | {"weight_decay": 0.0}),
    ({"outer_optimizer": "adamw", "outer_weight_decay": 0.1}, torch.optim.AdamW, ADAM | {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("chosen", "make", "settings"), CASES, ids=lambda case: str(case)[:60])
def test_an_outer_step_is_torchs(chosen: dict[str, Any], make: Torchs, settings: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, generator=generator)
    outer = OuterOptions(outer_lr=0.7, outer_momentum=0.8, **chosen).make_outer(10, "scratch")
    outer.attach(anchor)
    reference = torch.nn.Parameter(anchor.clone())
    optimizer = make([reference], lr=0.7, **settings)
    for round_ in range(1, 6):
        reference.grad = torch.randn(1000, generator=generator)
        outer.step(anchor, reference.grad.clone(), round_)
        optimizer.step()
    torch.testing.assert_close(anchor, reference.detach(), rtol=0, atol=1e-5)


def test_an_outer_optimizer_goes_on_from_what_it_gave() -> None:
    given = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    for chosen, _, _ in CASES:
        options, (anchor, *means) = OuterOptions(**chosen), given.clone()
        whole, half = anchor, anchor.clone()
        outer, again = options.make_outer(3, "scratch"), options.make_outer(3, "scratch")
        outer.attach(whole)
        for round_, mean in enumerate(means, start=1):
            outer.step(whole, mean, round_)
            if round_ == 1:
                half.copy_(whole)
                again.attach(half)
                again.load({name: vector.clone() for name, vector in outer.tensors().items()})
            else:
                again.step(half, mean, round_)
        assert torch.equal(whole, half)


@pytest.mark.parametrize("elements", [1, (1 << 18) + 1])
def test_adamw_rounds_every_operation_by_itself(elements: int) -> None:
    anchor, mean = torch.randn(2, elements, generator=torch.Generator().manual_seed(elements)).unbind()
    outer = OuterOptions(outer_optimizer="adamw").make_outer(3, "scratch")
    outer.attach(anchor)
    first, second = mean * (1.0 - 0.9), mean * mean * (1.0 - 0.99)
    change = first * (1 / (1 - 0.9)) / ((second * (1 / (1 - 0.99))).sqrt() + 0.1) * 0.3
    expected = anchor * 1.0 - change
    outer.step(anchor, mean, 1)
    assert torch.equal(anchor, expected)


@pytest.mark.parametrize("name", ["nesterov", "sgd", "adamw"])
def test_diloco_takes_the_outer_optimizer_of_the_settings(name: str) -> None:
    rates = {"outer_lr": 0.5, "outer_momentum": 0.9}

    def body(member: RoomExchange) -> tuple[torch.Tensor, torch.Tensor]:
        model, options = Vectors(3), OuterOptions(outer_optimizer=name, **rates)
        own = {"diloco": {"outer_optimizer": name}}
        strategy = attached(DiLoCo, member, model, [], codec="fp32", sync_interval=1, owned=own, **rates)
        outer, expected = options.make_outer(2, "scratch"), torch.zeros(3)
        outer.attach(expected)
        for number in range(2):
            strategy.begin_step(number, 1.0)
            model.first.data += 1.0 + member.rank
            strategy.end_step()
            outer.step(expected, torch.full((3,), -1.5), number + 1)
        return model.first.detach(), expected

    for found, expected in in_a_group(2, body):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "refused", [{"outer_optimizer": "lion"}, {"outer_weight_decay": 0.1}, {"outer_optimizer": "nesterov.py"}]
)
def test_an_outer_optimizer_that_is_none_is_refused(refused: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"one of nesterov, sgd, adamw, or file\.py:function|has none; adamw has"):
        OuterOptions(**refused)


def test_outer_rates_follow_the_optimizer() -> None:
    rates = {name: OuterOptions(outer_optimizer=name).outer_rates(100, "scratch") for name in ("sgd", "adamw")}
    assert rates == {"sgd": (1.0, 0.0), "adamw": (0.3, 0.9)}


@pytest.mark.parametrize("elements", [0, 1, 1000, (1 << 18) - 1, (1 << 18) + 1, 3 << 18])
def test_the_outer_step_rounds_every_product_and_sum_by_itself(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    anchor, momentum, mean = torch.randn(3, elements, generator=generator).unbind()
    expected_momentum = momentum * 0.9 + mean
    expected = anchor - (expected_momentum * 0.9 + mean) * 0.7
    outer = Nesterov(0.7, 0.9)
    outer.attach(anchor)
    outer.load({"momentum": momentum})
    outer.step(anchor, mean, 1)
    assert torch.equal(outer.tensors()["momentum"], expected_momentum) and torch.equal(anchor, expected)


@pytest.mark.parametrize(
    ("steps", "start", "expected"),
    [
        (50 * 100, "scratch", (0.7, 0.9)),
        (50 * 100 - 1, "scratch", (1.0, 0.5)),
        (50 * 30, "pretrained", (1.0, 0.0)),
        (100, "pretrained", (1.0, 0.0)),
    ],
)
def test_outer_defaults_follow_the_model_and_the_number_of_rounds(
    steps: int, start: Start, expected: tuple[float, float]
) -> None:
    assert OuterOptions().outer_rates(steps // 50, start) == expected


def test_outer_settings_given_by_hand_hold() -> None:
    options = OuterOptions(outer_lr=0.3, outer_momentum=0.0)
    assert options.outer_rates(200, "scratch") == (0.3, 0.0)


OWN = """
def heavy(anchor, mean, state, rate, momentum):
    speed = state.setdefault("speed", mean.clone().zero_())
    speed.mul_(momentum).add_(mean)
    anchor.sub_(speed * rate)

def broken(anchor, mean, state, rate, momentum):
    anchor[7]

def keeps_a_list(anchor, mean, state, rate, momentum):
    state["seen"] = [1]

def not_finite(anchor, mean, state, rate, momentum):
    anchor.div_(0.0)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


def test_a_function_of_ones_own_is_an_outer_optimizer_and_its_state_is_kept(own: Path) -> None:
    given = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    ends = []
    for name in ("sgd", f"{own}:heavy"):
        options, (anchor, *means) = OuterOptions(outer_optimizer=name, outer_momentum=0.8), given.clone()
        outer = options.make_outer(3, "scratch")
        outer.attach(anchor)
        for round_, mean in enumerate(means, start=1):
            outer.step(anchor, mean, round_)
            saved, outer = outer.tensors(), options.make_outer(3, "scratch")
            outer.attach(anchor)
            outer.load(saved)
        ends.append(anchor)
    assert torch.equal(*ends)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("broken", BadInput, r"IndexError.*own\.py, line 8"),
        ("keeps_a_list", BadInput, "something else as 'seen'"),
        ("not_finite", RunFailed, "not finite in round 1"),
        ("missing", BadInput, "no function 'missing'"),
    ],
)
def test_what_is_wrong_with_ones_own_function_is_said(own: Path, name: str, error: type[Exception], said: str) -> None:
    def one_step() -> None:
        outer = OuterOptions(outer_optimizer=f"{own}:{name}").make_outer(3, "scratch")
        outer.attach(torch.zeros(3))
        outer.step(torch.zeros(3), torch.ones(3), 1)

    with pytest.raises(error, match=said):
        one_step()


def test_a_plan_s_outer_rates_are_those_of_the_chosen_optimizer() -> None:
    chosen = StrategySettings(owned={"diloco": {"outer_optimizer": "adamw"}})
    costs = cost_model("diloco", chosen)
    planned = costs.settings(RunSpec(1000, "scratch"), SyncSchedule(10))
    assert (planned["diloco.outer_lr"], planned["diloco.outer_momentum"]) == (0.3, 0.9)
    assert costs.vectors == cost_model("diloco").vectors + 1
