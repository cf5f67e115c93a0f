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
