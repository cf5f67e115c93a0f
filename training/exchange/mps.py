"""What ``torch.mps`` lacks of a device's module, which device meshes, tensor parallelism and FSDP2 ask for.

Work of Metal runs in the order in which it was queued, on one device of the process, and an operation of the process
group is complete when the host has waited for it. So there is nothing to do, as on a CPU: what ``torch.cpu`` has for
code that knows of no device serves here too.
"""

from __future__ import annotations

from typing import Any

import torch

_AS_ON_A_CPU = ("Stream", "stream", "current_stream", "is_initialized", "set_device")


def complete(module: Any) -> None:
    """Give a device's module what it lacks, and leave what it has."""
    lacks = {name: getattr(torch.cpu, name) for name in _AS_ON_A_CPU} | {"current_device": lambda: 0}
    for name, stand_in in lacks.items():
        if not hasattr(module, name):
            setattr(module, name, stand_in)


if torch.backends.mps.is_available():
    complete(torch.mps)
