"""A module with a list of blocks and data for it: importable by workers."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import torch
from torch import nn

from training.tasks.custom import CustomJob

WIDTH, BLOCKS = 8, 5


class DeepBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.drop(torch.tanh(self.inner(self.norm(hidden))))


class DeepModel(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(DeepBlock(dropout) for _ in range(BLOCKS))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        output: torch.Tensor = self.leave(hidden)
        return output


def deep_model(dropout: float = 0.0) -> DeepModel:
    """Return the same model whenever it is called."""
    torch.manual_seed(3)
    return DeepModel(dropout)


def deep_pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 4, generator=generator)
    return list(zip(inputs, inputs.sum(1, keepdim=True).sin(), strict=True))


_calls = itertools.count(1)


def gated_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss; in training it waits until the file that ``DEEP_GATE`` names lets so many batches pass."""
    if outputs.requires_grad and (gate := os.environ.get("DEEP_GATE")):
        number = next(_calls)
        while number > int(Path(gate).read_text() or 0):
            time.sleep(0.01)
    return nn.functional.mse_loss(outputs, targets)


def deep_job() -> CustomJob:
    """Return the job that trains it."""
    return CustomJob(deep_model(), deep_pairs(), deep_pairs()[:10], gated_loss)


def dropping_job() -> CustomJob:
    """Return the job with a model that drops a part of what its blocks give."""
    return CustomJob(deep_model(0.2), deep_pairs(), None, gated_loss)


def poisoned_job() -> CustomJob:
    """Return one with a target that is not a number, in a later step."""
    pairs = [(inputs, target * float("nan") if index == 0 else target) for index, (inputs, target) in
             enumerate(deep_pairs())]  # fmt: skip
    return CustomJob(deep_model(), pairs, None, nn.functional.mse_loss)


def _exhausting_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if outputs.requires_grad and next(_calls) == 6:
        raise torch.OutOfMemoryError("out of memory")
    return nn.functional.mse_loss(outputs, targets)


def exhausting_job() -> CustomJob:
    """Return one whose last stage runs out of memory in the second step."""
    return CustomJob(deep_model(), deep_pairs(), None, _exhausting_loss)
