"""Received bytes as a tensor, without a copy."""

from __future__ import annotations

import numpy as np
import torch


def tensor_view(payload: memoryview) -> torch.Tensor:
    """Return ``payload`` as a flat uint8 tensor over the same memory. It must never be written to."""
    if len(payload) == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_numpy(np.asarray(_Readable(payload)))


class _Readable:
    """Shows read-only memory to numpy as writable, because torch warns of read-only memory on every call."""

    def __init__(self, payload: memoryview) -> None:
        self._keep = payload
        address = np.frombuffer(payload, dtype=np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (len(payload),), "typestr": "|u1", "data": (address, False), "version": 3}
