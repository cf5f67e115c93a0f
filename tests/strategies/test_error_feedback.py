"""Error feedback of a member and of whoever averages, against a reference written from its definition."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from small_models import in_a_group
from torch import nn

from tests.strategies.settings import strategy_settings
from tests.training.memory_exchange import RoomExchange
from training.exchange.codecs import codec_by_name, roundtrip
from training.strategies.allreduce import AllReduce
from training.strategies.base import Strategy, StrategyContext
from training.strategies.diloco import DiLoCo

ROUNDS, ELEMENTS = 60, 96
Late = Callable[[int], Collection[int]]
NEVER: Late = lambda number: ()  # noqa: E731
SOMETIMES: Late = lambda number: {number // 7 % 4} if number % 7 == 3 else ()  # noqa: E731
STEP = {"mxfp4": 1.0, "int8": 1 / 32, "topk:0.1": 0.5}
"""About the distance between neighbouring numbers of a format, for the values below."""


def deltas(rank: int, small: float = 1.0, rounds: int = ROUNDS) -> torch.Tensor:
    """What a member has to give in every round: random, one component of each block large."""
    values = torch.randn(rounds, ELEMENTS, generator=torch.Generator().manual_seed(rank)) * small + 0.3 * small
    values[:, ::32] = 1.0
    return values


def reference(size: int, codec_name: str, late: Late, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Karimireddy et al. 2019, algorithm 2, at the members and once more at the mean.

    Returns:
        the sum of all means, the same without any encoding, and what the encodings of the last round lost.
    """
    codec = codec_by_name(codec_name)
    kept, plain = [torch.zeros(ELEMENTS) for _ in range(size)], [torch.zeros(ELEMENTS) for _ in range(size)]
    owner, applied, meant = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for number in range(ROUNDS):
        mean, true, on_time = (
            torch.zeros(ELEMENTS),
            torch.zeros(ELEMENTS),
            [r for r in range(size) if r not in late(number)],
        )
        for rank in range(size):
            kept[rank] = kept[rank] + given[rank][number]
            plain[rank] = plain[rank] + given[rank][number]
            if rank in on_time:
                sent = roundtrip(codec, kept[rank])
                mean, kept[rank] = mean + sent * (1.0 / len(on_time)), kept[rank] - sent
                true, plain[rank] = true + plain[rank] * (1.0 / len(on_time)), torch.zeros(ELEMENTS)
        owed = owner * (mean != 0) if codec_name.startswith("topk") else owner
        reply = roundtrip(codec.reply, mean + owed)
        owner = owner + mean - reply
        applied, meant = applied + reply, meant + true
    return applied, meant, owner + sum(kept[r] - plain[r] for r in range(size)) / size


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(ELEMENTS))


def train(make: type[Strategy], codec: str, late: Late, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return by member the sum of what a strategy applied."""
    rounds = len(given[0])
    options = {"error_feedback": True, "codec": codec, "verify_interval": 0}
    settings = strategy_settings(**options, sync_interval=1, outer_lr=1.0, outer_momentum=0.0)

    def body(member: RoomExchange) -> torch.Tensor:
        strategy, model, applied = make(StrategyContext(settings, rounds, 0)), Vector(), torch.zeros(ELEMENTS)
        strategy.attach(model, member)
        for number in range(rounds):
            before = model.w.detach().clone()
            strategy.begin_step(number, 1.0)
            strategy.last_backward()
            (model.w * given[member.rank][number]).sum().backward()
            strategy.gradients()
            with torch.no_grad():
                model.w -= model.w.grad
                applied += model.w.grad
            model.w.grad = None
            if strategy.end_step() is not None:  # weights were merged: what was applied is how far they went
                applied += before - model.w.detach() - given[member.rank][number]
        return applied

    def late_in(name: str) -> Any:
        return late(int(name.split("/")[1]))

    return in_a_group(len(given), body, late_in)


@pytest.mark.slow
@pytest.mark.parametrize("codec", STEP)
@pytest.mark.parametrize(
    ("strategy", "late"),
    [(AllReduce, NEVER), (AllReduce, SOMETIMES), (DiLoCo, SOMETIMES)],
    ids=["exact", "late", "diloco, late"],
)
def test_what_is_applied_lags_by_one_rounds_losses(strategy: type[Strategy], codec: str, late: Late) -> None:
    given = [deltas(rank) for rank in range(4)]
    applied, meant, last_losses = reference(4, codec, late, given)
    for found in train(strategy, codec, late, given):
        # Where a sum rounds the other way, a number takes the next step of its format, and the rest evens it out.
        torch.testing.assert_close(found, applied, rtol=1e-4, atol=1e-3 if strategy is AllReduce else STEP[codec])
    if late is NEVER:
        torch.testing.assert_close(meant - applied, last_losses, rtol=0, atol=2e-3)
    assert float((meant - applied).norm() / meant.norm()) < (0.1 if codec.startswith("topk") else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "codec"), [(AllReduce, "int8"), (DiLoCo, "mxfp4")])
def test_small_components_beside_a_large_one_arrive(strategy: type[Strategy], codec: str) -> None:
    given = [deltas(rank, small=0.002, rounds=200) for rank in range(3)]
    meant = sum(values.sum(0) for values in given) / 3
    small = torch.arange(ELEMENTS) % 32 != 0
    found = train(strategy, codec, NEVER, given)[0]
    largest = 1 / 4 if codec == "mxfp4" else 1 / 127.5
    assert float((found - meant)[small].abs().max()) <= 2.1 * largest  # a member's encoding and the mean's, once each
    assert float(found[small].sum() / meant[small].sum()) == pytest.approx(1.0, abs=0.1)
