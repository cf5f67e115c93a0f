"""SPARTA and DiLoCo at once equal a reference: a part is averaged in every step, and every H steps an outer step."""

from __future__ import annotations

import pytest
import torch
from members import Member
from small_models import in_a_group
from torch import nn

from profiles.schema import StrategySettings
from tests.training.memory_exchange import RoomExchange
from training.strategies.sparta import SpartaOptions

SIZE, STEPS, INTERVAL, RATE, MU = 50, 9, 3, 0.7, 0.9
WEIGHTS = (1.0, 2.0, 3.0)
SPARTA = SpartaOptions(share=0.2)


class Vector(nn.Module):
    """What the reference trains."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(SIZE))


def change(step: int, rank: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank)) / 10


def reference(steps: int) -> torch.Tensor:
    """What all members hold at the end of so many steps: Douillard et al. 2023, algorithm 1, with SPARTA in its inner
    steps."""
    anchor, momentum = torch.ones(SIZE), torch.zeros(SIZE)
    held = [anchor.clone() for _ in WEIGHTS]
    for step in range(steps):
        for rank, own in enumerate(held):
            own += change(step, rank)
        chosen = torch.from_numpy(SPARTA.selected_indices(step, SIZE, seed=7))
        mean = torch.stack([own[chosen] for own in held]).mean(0)
        for own in held:
            own[chosen] = mean
        if (step + 1) % INTERVAL == 0 or step + 1 == steps:
            delta = torch.zeros(SIZE)
            for weight, own in zip(WEIGHTS, held, strict=True):
                delta += weight / sum(WEIGHTS) * (anchor - own)
            momentum = MU * momentum + delta
            anchor = anchor - RATE * (delta + MU * momentum)
            held = [anchor.clone() for _ in WEIGHTS]
    return anchor


@pytest.mark.parametrize("steps", [STEPS, STEPS - 1])
def test_three_members_over_three_rounds_of_which_the_last_may_be_shorter(steps: int) -> None:
    own = {"sparta": SPARTA, "diloco": {"sync_interval": INTERVAL, "outer_lr": RATE, "outer_momentum": MU}}
    settings = StrategySettings(strategy="sparta + diloco", codec="fp32", owned=own, verify_interval=0)

    def body(exchange: RoomExchange) -> torch.Tensor:
        member = Member(settings, exchange, make=Vector)
        for step in range(steps):
            member.strategy.begin_step(step, WEIGHTS[exchange.rank])
            member.model.values.data += change(step, exchange.rank)
            member.strategy.end_step()
        member.strategy.finish()
        return member.weights()

    first, *others = in_a_group(3, body)
    assert all(torch.equal(one, first) for one in others)
    torch.testing.assert_close(first, reference(steps), atol=1e-6, rtol=0)
