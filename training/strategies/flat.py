"""Trainable parameters as one flat fp32 vector, and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from training.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = lazy("torch")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters to train, each once, in the model's order."""
    return [p for p in model.parameters() if p.requires_grad]


def flatten(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Concatenate to a new flat fp32 vector on ``device`` (default: where they are)."""
    parts = [t.detach().reshape(-1).to(device=device, dtype=torch.float32) for t in tensors]
    return torch.cat(parts) if parts else torch.empty(0)


def unflatten_into(parameters: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Copy a flat vector back into the tensors it came from."""
    offset = 0
    with torch.no_grad():
        for parameter in parameters:
            part = values[offset : offset + parameter.numel()]
            parameter.copy_(part.view_as(parameter))
            offset += parameter.numel()


def weight_hash(values: torch.Tensor) -> str:
    """Return 16 hex digits of BLAKE2b over the little-endian fp32 bytes."""
    data = values.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return hashlib.blake2b(data.data, digest_size=8).hexdigest()
