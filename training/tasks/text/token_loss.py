"""Cross entropy of many tokens in little memory.

Logits in 16 bits become fp32 for a loss, whose backward needs their softmax: of 8 texts of 1,024 tokens and 50,000
words that is 1.6 GB each, beside a gradient of 1.6 GB. Here a few rows at a time are in fp32, once in forward and once
more in backward, where their softmax is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from training.tasks.text.conversations import IGNORED

_ROW_ELEMENTS = 1 << 24
"""Logits that are in fp32 at the same time: 64 MiB."""
_MANY = 1 << 26
"""Logits from which their memory matters more than computing their softmax twice."""


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of tokens as a scalar of fp32, as :func:`torch.nn.functional.cross_entropy` of fp32
    logits does but for rounding.

    Args:
        logits: [tokens, vocabulary], 16 or 32 bits.
        labels: [tokens], int64; :data:`IGNORED` where a token does not count.
    """
    if logits.numel() < _MANY:
        return nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED)
    loss: torch.Tensor = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]  # torch has no types
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits as they are, and of each row the logarithm of the sum of its exponentials."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        sums = torch.empty(len(logits), device=logits.device)
        for rows in _spans(logits):
            sums[rows] = torch.logsumexp(logits[rows].float(), 1)
        counts = labels != IGNORED
        picked = logits.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1).float()
        number = counts.sum()
        ctx.save_for_backward(logits, labels, sums, number)
        return torch.where(counts, sums - picked, 0.0).sum() / number

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, labels, sums, number = ctx.saved_tensors
        shares = torch.where(labels != IGNORED, gradient / number, 0.0).unsqueeze(1)
        targets, gradients = labels.clamp(min=0).unsqueeze(1), torch.empty_like(logits)
        for rows in _spans(logits):
            softmax = (logits[rows].float() - sums[rows].unsqueeze(1)).exp_()  # logits stay as they are
            softmax.scatter_add_(1, targets[rows], softmax.new_full((len(softmax), 1), -1.0))
            gradients[rows] = softmax.mul_(shares[rows])
        return gradients, None


def _spans(logits: torch.Tensor) -> Iterator[slice]:
    """Yield the rows that are in fp32 at the same time."""
    step = max(1, _ROW_ELEMENTS // max(1, logits.shape[1]))
    return (slice(start, start + step) for start in range(0, len(logits), step))
