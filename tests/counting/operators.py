"""Torch's operators as Python sees them, looked up before threads use them.

Torch makes an operator's object when a tensor with ``__torch_dispatch__`` uses it first, and keeps a pointer that does
not own it. Where two threads do so at the same time, the second object replaces the first, which is freed in use.
"""

from __future__ import annotations

import torch


def look_up_operators() -> None:
    """Make the objects of all of torch's operators."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace == "aten":
            packet, _, overload = operator.partition(".")
            getattr(getattr(torch.ops.aten, packet), overload or "default")
