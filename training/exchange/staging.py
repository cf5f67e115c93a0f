"""Copies from a device to the host before something is exchanged: flat, and at the speed of the bus.

A CUDA device copies by itself only to and from pinned memory, which comes from torch's cache and goes back there with
the tensor. Other devices, MPS among them, copy as they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.lazy import torch


def pinned(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat memory that a CUDA device reaches by itself, or, where no more can be pinned, any: slower."""
    try:
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(elements, dtype=dtype, device="cpu")


def to_host(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a new flat vector of the host with ``tensors``, one behind another.

    Args:
        dtype: of the vector; the device converts to it, or the host where the device does not copy by itself.
    """
    elements, devices = sum(tensor.numel() for tensor in tensors), {tensor.device for tensor in tensors}
    on_cuda = {device.type for device in devices} == {"cuda"}
    host, start = pinned(elements, dtype) if on_cuda else torch.empty(elements, dtype=dtype, device="cpu"), 0
    for tensor in tensors:
        part = host[start : start + tensor.numel()]
        part.view(tensor.shape).copy_(tensor.detach(), non_blocking=on_cuda)
        start += tensor.numel()
    for device in devices if on_cuda else ():
        torch.cuda.current_stream(device).record_event().synchronize()
    return host
