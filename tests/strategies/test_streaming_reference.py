"""Streaming DiLoCo against a reference written from its papers: arXiv 2501.18512, algorithm 2, and 2604.21428."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from small_models import attached, in_a_group
from torch import nn

from tests.training.memory_exchange import RoomExchange
from training.strategies.streaming_diloco import StreamingDiLoCo

MEMBERS, P, H, ROUNDS = 3, 3, 6, 3
SHAPES = ((4, 5), (20,), (2, 10))
RATE, MOMENTUM = 0.7, 0.9
Vectors = list[list[torch.Tensor]]


def unit(vector: torch.Tensor) -> torch.Tensor:
    """phi, with phi(0) = 0."""
    return vector / vector.norm() if vector.norm() else vector


def merged(deltas: list[torch.Tensor], weights: list[float], merge: str) -> torch.Tensor:
    total = sum(weights)
    mean = sum(w / total * d for w, d in zip(weights, deltas))
    if merge == "mean":
        return mean
    length = sum(w / total * d.norm() for w, d in zip(weights, deltas))
    return length * unit(sum(w / total * unit(d) for w, d in zip(weights, deltas)))


def reference(
    steps: torch.Tensor, tokens: torch.Tensor, tau: int, alpha: float, merge: str, squared: bool
) -> tuple[Vectors, list[torch.Tensor]]:
    """Return the members' weights by fragment, and the global ones, after all ``steps``.

    Args:
        steps: what inner optimizers add: [T, members, fragments, elements].
        tokens: of each step and member: [T, members].
    """
    theta = [[torch.zeros(20, dtype=torch.float64) for _ in range(P)] for _ in range(MEMBERS)]
    outer = [torch.zeros(20, dtype=torch.float64) for _ in range(P)]
    speed = [torch.zeros(20, dtype=torch.float64) for _ in range(P)]
    since, flying = [0] * P, {}
    for t in range(1, len(steps) + 1):
        for m, p in itertools.product(range(MEMBERS), range(P)):
            theta[m][p] = theta[m][p] + steps[t - 1, m, p]
        for p in range(P):
            turn = p * H // P
            if t >= turn and (t - turn) % H == 0:
                work = [tokens[since[p] : t, m] for m in range(MEMBERS)]
                weights = [float(w.sum() ** 2 / max(1, int((w > 0).sum())) if squared else w.sum()) for w in work]
                deltas = [outer[p] - theta[m][p] for m in range(MEMBERS)]
                flying[p, t + tau], since[p] = merged(deltas, weights, merge), t
            if (p, t) in flying:
                delta = flying.pop((p, t))
                speed[p] = MOMENTUM * speed[p] + delta
                outer[p] = outer[p] - RATE * (delta + MOMENTUM * speed[p])
                for m in range(MEMBERS):
                    theta[m][p] = alpha * theta[m][p] + (1 - alpha) * outer[p]
    return theta, outer


class Layers(nn.Module):
    """A stack whose layers are the fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module() for _ in SHAPES])
        for layer, shape in zip(self.layers, SHAPES, strict=True):
            layer.weight = nn.Parameter(torch.zeros(shape))


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "alpha"), [(0, 0.0), (0, 0.5), (2, 0.0), (2, 0.5), (5, 0.5)])
@pytest.mark.parametrize(
    ("merge", "weighting"), [("mean", "tokens"), ("rda", "tokens"), ("rda", "tokens-squared-per-step")]
)
def test_three_rounds_are_those_of_the_papers(tau: int, alpha: float, merge: str, weighting: str) -> None:
    draw = torch.Generator().manual_seed(tau + 10 * len(weighting))
    steps = torch.randn(H * ROUNDS + H, MEMBERS, P, 20, generator=draw) * 0.05
    tokens = torch.randint(0, 4, (len(steps), MEMBERS), generator=draw) * torch.tensor([1.0, 2.0, 5.0])
    own = {"sync_interval": H, "fragments": P, "sync_delay": tau, "mixing": alpha, "merge": merge}
    own |= {"weighting": weighting, "outer_lr": RATE, "outer_momentum": MOMENTUM}

    def body(member: RoomExchange) -> Any:
        model = Layers()
        strategy = attached(StreamingDiLoCo, member, model, [], codec="fp32", owned={"streaming_diloco": own})
        reports = []
        for number, step in enumerate(steps[:, member.rank]):
            strategy.begin_step(number, float(tokens[number, member.rank]))
            for layer, change in zip(model.layers, step):
                layer.weight.data += change.view_as(layer.weight)
            reports.append(strategy.end_step())
        with strategy.consensus():
            agreed = [layer.weight.detach().flatten().clone() for layer in model.layers]
        return [layer.weight.detach().flatten() for layer in model.layers], agreed, reports

    theta, outer = reference(steps.double(), tokens, tau, alpha, merge, weighting != "tokens")
    for (own_weights, agreed, reports), expected in zip(in_a_group(MEMBERS, body), theta, strict=True):
        for found, wanted in zip([*own_weights, *agreed], [*expected, *outer], strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
        at = [number + 1 for number, report in enumerate(reports) if report is not None]
        turns = [t + tau for t in range(1, len(steps) + 1) if t % (H // P) == 0]
        assert at == [t for t in turns if t <= len(steps)]
