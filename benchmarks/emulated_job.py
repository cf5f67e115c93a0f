"""A job with the weights of Whisper tiny and a fixed time instead of its computing, for machines with too few cores.

The model is built from Whisper tiny's real shape with random weights. A step waits for :data:`SECONDS`: a third in
forward, the rest in backward, each parameter's share as it gives its gradient (made of its weights), so that buckets
can leave while "backward" runs. The optimizer's time is in it too: its step is left out in the processes that build
this job, and the weights move a little in backward. What an exchange costs is real and comes on top.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset
from transformers import WhisperConfig, WhisperForConditionalGeneration

from training.tasks.custom import CustomJob

SECONDS = 0.5


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
        values = parameter.detach()
        gradient = values * 1e-3
        values.sub_(gradient)
        time.sleep(max(0.0, ctx.due - time.monotonic()))
        return grads[0], gradient, None


class EmulatedWhisper(nn.Module):
    """Whisper tiny's weights behind a clock."""

    def __init__(self) -> None:
        super().__init__()
        shape: dict[str, Any] = {
            "d_model": 384,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "num_mel_bins": 80,
        }
        heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
        sizes = {"encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "max_source_positions": 1500}
        config = WhisperConfig(**shape, **heads, **sizes, vocab_size=51_865, max_target_positions=448)
        self.whisper = WhisperForConditionalGeneration(config)

    def weights(self) -> int:
        """Count what is trained."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def forward(self, batch: Any) -> torch.Tensor:
        start = time.monotonic()
        trained = [p for p in self.parameters() if p.requires_grad]
        left, total = self.weights(), self.weights()
        x = torch.zeros((), requires_grad=True)
        for parameter in trained:  # backward meets them in the opposite order
            x = _Touch.apply(x, parameter, start + SECONDS * (1 / 3 + 2 / 3 * left / total))
            left -= parameter.numel()
        time.sleep(max(0.0, start + SECONDS / 3 - time.monotonic()))
        return x


def _no_step(self: torch.optim.Optimizer, closure: Any = None) -> None:
    """The optimizer's time is part of :data:`SECONDS`."""


def build() -> CustomJob:
    """Return the job; its data are never looked at."""
    # Two cores cannot step four optimizers in the fixed time; this process trains nothing else.
    torch.optim.AdamW.step = _no_step  # type: ignore[method-assign]
    return CustomJob(EmulatedWhisper(), TensorDataset(torch.zeros(4096, 1)))
