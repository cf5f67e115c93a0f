"""A job of one's own: a small network that tells three spirals apart.

Save these lines as ``profiles/saved/spirals.ini`` and run
``.venv/bin/muster train spirals --local 2``::

    [profile:spirals]
    task = custom
    model_path = examples.custom.spirals:build
    learning_rate = 1e-2
    batch_size = 64
    max_steps = 300

``build`` returns everything a run needs. The model is any ``nn.Module``; here its forward gives scores and a loss
function turns them into the loss. The loss function could be left out if forward gave the loss itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from training.tasks.custom import CustomJob

ARMS = 3


def spirals(points: int, seed: int) -> TensorDataset:
    """Points [n, 2] on three noisy spiral arms, and which arm each is on [n]."""
    dice = torch.Generator().manual_seed(seed)
    arm = torch.randint(ARMS, (points,), generator=dice)
    along = torch.rand(points, generator=dice)
    angle = 4 * along + arm * (2 * torch.pi / ARMS) + 0.15 * torch.randn(points, generator=dice)
    return TensorDataset(torch.stack([along * angle.cos(), along * angle.sin()], dim=1), arm)


def accuracy(scores: Tensor, arm: Tensor) -> dict[str, float]:
    """Share of the points given to the right arm."""
    return {"accuracy": float((scores.argmax(dim=1) == arm).float().mean())}


def build() -> CustomJob:
    """Model, data sets, loss and metrics."""
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ARMS))
    return CustomJob(
        model=model,
        train=spirals(3000, seed=1),
        validation=spirals(600, seed=2),
        loss=nn.functional.cross_entropy,
        metrics=accuracy,
    )
