"""Functions that ``torch.mps`` lacks and device meshes, tensor parallelism and FSDP2 need.

Metal runs work in the order in which it was queued, on the process's only device, and an operation of the process group
is complete when the host has waited for it. So these need do nothing, as on a CPU: the functions of ``torch.cpu`` for
device-agnostic code serve here too.
"""

from __future__ import annotations

from typing import Any

import torch

_AS_ON_A_CPU = ("Stream", "stream", "current_stream", "is_initialized", "set_device")


def complete(module: Any) -> None:
    """Add what a device's module lacks, and leave what it has."""
    missing = {name: getattr(torch.cpu, name) for name in _AS_ON_A_CPU} | {"current_device": lambda: 0}
    for name, stand_in in missing.items():
        if not hasattr(module, name):
            setattr(module, name, stand_in)


if torch.backends.mps.is_available():
    complete(torch.mps)
