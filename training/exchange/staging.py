"""Copies from a device to the host before something is exchanged: flat, and at the speed of the bus.

A device with a queue of its own, as CUDA's are, copies by itself only to and from pinned memory, which comes from
torch's cache and goes back there with the tensor. Other devices, MPS among them, copy as they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from training.lazy import torch


def is_asynchronous(device: torch.device) -> bool:
    """Return whether a device goes on by itself while the host does something else, copies included."""
    return device.type not in ("cpu", "mps", "meta")


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
    alone = bool(devices) and all(map(is_asynchronous, devices))
    host, start = pinned(elements, dtype) if alone else torch.empty(elements, dtype=dtype, device="cpu"), 0
    for tensor in tensors:
        part = host[start : start + tensor.numel()]
        part.view(tensor.shape).copy_(tensor.detach(), non_blocking=alone)
        start += tensor.numel()
    for device in devices if alone else ():
        torch.get_device_module(device).current_stream(device).record_event().synchronize()
    return host
