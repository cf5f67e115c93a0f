"""Jobs for hosts with a share of a core: two that wait for a device of their own, and one that computes.

*small* and *large* emulate a device whose speed goes with the host's quota: forward and backward are waiting, each
parameter's gradient comes in its time, so that buckets can leave while "backward" runs; the optimizer's time is in it
too. What an exchange costs is real. *computed* is a transformer of the small one's size on made-up data; its compute is
real as well, and exchanges take from it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from training.hardware.resources import free_cores
from training.tasks.custom import CustomJob

_LENGTH = 64
"""Vectors of a sample: compute for each weight."""
_SMALL_SAMPLE, _LARGE_SAMPLE = 0.0075, 0.015
"""Seconds of a sample on the emulated device of a host with a whole core."""


class _Encoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean(dim=1))


class _Touch(torch.autograd.Function):
    """Hands ``x`` on; in backward waits until ``due`` and gives the parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, due: float) -> torch.Tensor:
        ctx.save_for_backward(parameter)
        ctx.due = due
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (parameter,) = ctx.saved_tensors
        gradient = parameter.detach() * 1e-3
        time.sleep(max(0.0, ctx.due - time.monotonic()))
        return grads[0], gradient, None


class _Emulated(nn.Module):
    """An encoder's weights behind a clock."""

    def __init__(self, encoder: nn.Module, sample: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.sample = sample

    def forward(self, batch: Any) -> torch.Tensor:
        start, seconds = time.monotonic(), _samples(batch) * self.sample / free_cores()
        trained = [p for p in self.parameters() if p.requires_grad]
        left = total = sum(p.numel() for p in trained)
        x = torch.zeros((), requires_grad=True)
        for parameter in trained:  # backward meets them in the opposite order
            x = _Touch.apply(x, parameter, start + seconds * (1 / 3 + 2 / 3 * left / total))
            left -= parameter.numel()
        time.sleep(max(0.0, start + seconds / 3 - time.monotonic()))
        return x


def _samples(batch: Any) -> int:
    return len(batch if isinstance(batch, torch.Tensor) else batch[0])


def computed() -> CustomJob:
    """0.4 M weights: one bucket."""
    dice = torch.Generator().manual_seed(1)
    samples = torch.randn(768, _LENGTH, 128, generator=dice)
    wanted = torch.randint(10, (768,), generator=dice)
    return CustomJob(_Encoder(128, 2), TensorDataset(samples, wanted), None, nn.functional.cross_entropy)


def wide() -> CustomJob:
    """The same with larger batches, as :func:`many`."""
    return computed()


def _no_step(self: torch.optim.Optimizer, closure: Any = None) -> None:
    """The optimizer's time is part of the emulated device's."""


def _emulated(encoder: nn.Module, sample: float) -> CustomJob:
    torch.optim.AdamW.step = _no_step  # type: ignore[method-assign]
    return CustomJob(_Emulated(encoder, sample), TensorDataset(torch.zeros(768, 1)))


def small() -> CustomJob:
    """0.4 M weights: one bucket."""
    return _emulated(_Encoder(128, 2), _SMALL_SAMPLE)


def many() -> CustomJob:
    """The same with larger batches, of which a slow machine's share is more than a few samples."""
    return small()


def large() -> CustomJob:
    """1.3 M weights: two buckets."""
    return _emulated(_Encoder(192, 3), _LARGE_SAMPLE)
