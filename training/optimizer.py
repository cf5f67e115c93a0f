"""AdamW with weight decay on matrices only."""

from __future__ import annotations

import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import TrainingSettings


def build_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; biases, norms and other vectors are not decayed.

    Raises:
        BadInput: there are none.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise BadInput("the model has no weights to train: all are frozen (requires_grad = False)", "leave some free")
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = all(map(_is_plain, trained)) or None  # on others than processors torch chooses what is fast by itself
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, settings.adam_beta2), fused=fused
    )


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether one pass over the memory does it, instead of a dozen.

    It takes weight, gradient and moments place by place as they lie in memory. Those of a snapshot and those of a mean
    over members lie row by row; a weight that lies otherwise (``channels_last``) would get the update of another one.
    """
    return parameter.device.type == "cpu" and parameter.dtype == torch.float32 and parameter.is_contiguous()


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Give every parameter group the learning rate ``value``."""
    for group in optimizer.param_groups:
        group["lr"] = value
