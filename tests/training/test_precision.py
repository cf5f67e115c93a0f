"""Loss scaling where a member has no sample in a step, and the norm of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.hardware.device import Precision, select_precision, total_norm

CPU = torch.device("cpu")


def parts() -> tuple[Precision, nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.ones(2))
    return Precision(torch.float16, CPU), weight, torch.optim.SGD([weight], lr=1.0)


@pytest.mark.parametrize(("max_norm", "norm"), [(1.0, 0.0), (0.0, None)])
def test_a_step_without_any_gradient_changes_nothing(max_norm: float, norm: float | None) -> None:
    precision, weight, optimizer = parts()
    for has_sample in (False, True, False):
        if has_sample:
            precision.scaler.scale(weight.sum()).backward()
        found = precision.clip(optimizer, [weight], max_norm)
        precision.step(optimizer, [weight])
        assert has_sample or found == norm
        optimizer.zero_grad()
    assert float(weight.detach()[0]) == pytest.approx(1.0 - (0.5**0.5 if max_norm else 1.0), abs=1e-5)


def test_gradients_of_the_others_do_for_a_member_that_never_had_a_loss() -> None:
    precision, weight, optimizer = parts()
    weight.grad = torch.full((2,), 0.25 * (precision.loss_scale or 1.0))
    precision.clip(optimizer, [weight], 0.0)
    precision.step(optimizer, [weight])
    assert weight.tolist() == [0.75, 0.75]


def test_there_is_a_loss_scale_only_with_fp16() -> None:
    assert [Precision(kind, CPU).loss_scale for kind in (None, torch.bfloat16)] == [None, None]
    assert Precision(torch.float16, CPU).loss_scale == 65536.0


@pytest.mark.parametrize(
    ("hardware", "pays", "found"), [(True, True, torch.bfloat16), (True, False, None), (False, True, None)]
)
def test_auto_is_bf16_on_a_cpu_that_has_it_for_a_task_that_gains(
    hardware: bool, pays: bool, found: torch.dtype | None
) -> None:
    assert select_precision("auto", CPU, pays, lambda: hardware) is found
    assert select_precision("off", CPU, pays, lambda: hardware) is None


def test_a_norm_is_the_same_whole_and_divided() -> None:
    """The squares of a large tensor, added up in 32 bits, are off by 1e-5 and more."""
    weight = nn.Parameter(torch.empty(1200, 800))
    weight.grad = torch.randn(1200, 800, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.vector_norm(weight.grad, dtype=torch.float64))
    halves = [half.contiguous() for half in weight.grad.split(400, dim=1)]
    norm = Precision(None, CPU).clip(torch.optim.SGD([weight], lr=1.0), [weight], 1.0)
    assert [norm, float(total_norm(halves))] == pytest.approx([exact, exact], rel=1e-6)
    assert float(torch.linalg.vector_norm(weight.grad, dtype=torch.float64)) == pytest.approx(1.0, rel=1e-5)
