from __future__ import annotations

import pytest
import torch

from training.strategies.costs import Start
from training.strategies.diloco import DiLoCoOptions, nesterov_step


def test_the_outer_step_is_torchs_nesterov_sgd() -> None:
    generator = torch.Generator().manual_seed(0)
    anchor, momentum = torch.randn(1000, generator=generator), torch.zeros(1000)
    reference = torch.nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        gradient = torch.randn(1000, generator=generator)
        reference.grad = gradient.clone()
        optimizer.step()
        nesterov_step(anchor, momentum, gradient, 0.7, 0.9)
    torch.testing.assert_close(anchor, reference.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("elements", [0, 1, 1000, (1 << 18) - 1, (1 << 18) + 1, 3 << 18])
def test_the_outer_step_rounds_every_product_and_sum_by_itself(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    anchor, momentum, mean = torch.randn(3, elements, generator=generator).unbind()
    expected_momentum = momentum * 0.9 + mean
    expected = anchor - (expected_momentum * 0.9 + mean) * 0.7
    nesterov_step(anchor, momentum, mean, 0.7, 0.9)
    assert torch.equal(momentum, expected_momentum) and torch.equal(anchor, expected)


@pytest.mark.parametrize(
    ("steps", "start", "expected"),
    [
        (50 * 30, "scratch", (0.7, 0.9)),
        (50 * 30 - 1, "scratch", (1.0, 0.5)),
        (50 * 30, "pretrained", (1.0, 0.0)),
        (100, "pretrained", (1.0, 0.0)),
    ],
)
def test_outer_defaults_follow_the_model_and_the_number_of_rounds(
    steps: int, start: Start, expected: tuple[float, float]
) -> None:
    assert DiLoCoOptions(sync_interval=50).outer_optimizer(steps, start) == expected


def test_outer_settings_given_by_hand_hold() -> None:
    options = DiLoCoOptions(sync_interval=50, outer_lr=0.3, outer_momentum=0.0)
    assert options.outer_optimizer(10_000, "scratch") == (0.3, 0.0)
