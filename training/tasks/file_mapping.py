"""Tensors in files instead of memory, for copies of large models."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch


def map_to_file(tensor: torch.Tensor, folder: Path) -> torch.Tensor:
    """Copy a tensor of the CPU to a file mapping, whose pages the system can write back and evict if memory is tight.

    Args:
        folder: for the file, which is unlinked at once.
    """
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        data = tensor.contiguous().reshape(-1).view(torch.uint8)  # numpy knows no bf16
        data.numpy().tofile(file)  # a full disk raises here; in the mapping it would be a signal
        file.flush()
        mapped = torch.from_file(file.name, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape)
