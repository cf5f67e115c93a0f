"""Memory that runs out: how it is known, and how what an attempt has left is given back."""

from __future__ import annotations

import gc

import torch

from profiles.errors import RunFailed
from profiles.options import less_memory

_SIGNS = ("out of memory", "can't allocate memory", "not enough memory")
"""What back ends without an error class of their own say (MPS, the CPU's allocator)."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a device, or of the machine, does not suffice."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def does_not_fit(error: Exception, device: torch.device, task: str) -> RunFailed:
    """Return what is to be raised where even one sample alone is too much."""
    said = " ".join(str(error).split())[:200]
    return RunFailed(
        f"one sample alone does not fit into the memory ({device.type}): {said}",
        ", ".join([*(f"set {way}" for way in less_memory(task)), "use smaller samples", "or take a smaller model"]),
    )


def give_back(device: torch.device) -> None:
    """Free what nobody refers to any more, on ``device`` too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
