"""The GPUs of this machine, counted without torch: the process that starts a run never loads it."""

from __future__ import annotations

import os
import subprocess

_PATIENCE = 10.0


def count_gpus() -> int:
    """Return how many NVIDIA GPUs a worker that is started here can use; ``CUDA_VISIBLE_DEVICES`` is obeyed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:  # CUDA takes the entries before the first that is no GPU
        named = [entry.strip() for entry in visible.split(",")]
        return next((place for place, entry in enumerate(named) if entry in ("", "-1")), len(named))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_PATIENCE).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def gpu_memory() -> int:
    """Return the bytes of the smallest NVIDIA GPU of this machine; 0 where there is none, or it does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    sizes = [int(line) for line in listed.split() if line.isdecimal()]
    return min(sizes, default=0) * 2**20
