"""Copies from a device to the host before something is exchanged: flat, at once, and beside what the device computes.

A CUDA device copies by itself only to and from pinned memory, and only on a stream of its own while it computes on
another: the copy waits for what was queued before it, and nothing that is queued later waits for the copy. Pinned
memory comes from torch's cache and goes back there with the tensor. Other devices, MPS among them, copy as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

from training.lazy import torch


class Staged:
    """A copy under way.

    Args:
        host: where it arrives.
        arrived: returns when it has.
    """

    def __init__(self, host: torch.Tensor, arrived: Callable[[], object] = lambda: None) -> None:
        self._host = host
        self._arrived = arrived

    def wait(self) -> torch.Tensor:
        """Return the copy, complete."""
        self._arrived()
        return self._host


class Cuda(Protocol):
    """What is used of ``torch.cuda``."""

    def Stream(self, device: Any) -> Any: ...

    def current_stream(self, device: Any) -> Any: ...

    def stream(self, stream: Any) -> Any: ...


def pinned(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat memory that a CUDA device reaches by itself, or, where no more can be pinned, any: slower."""
    try:
        return torch.empty(elements, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(elements, dtype=dtype)


class SideStream:
    """A CUDA device's stream for copies alone.

    Args:
        cuda: default: ``torch.cuda``.
        room: gives flat memory of the host, of so many elements of a type.
    """

    def __init__(
        self, device: torch.device, cuda: Cuda | None = None, room: Callable[[int, torch.dtype], torch.Tensor] = pinned
    ) -> None:
        self._device, self._room = device, room
        self._cuda: Cuda = cuda or torch.cuda
        self._stream = self._cuda.Stream(device)

    def to_host(self, tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Staged:
        """Start to copy ``tensors``, one behind another. They may be written to, by what is queued after the copy's end
        was waited for, and may be dropped at any time."""
        host = self._room(sum(tensor.numel() for tensor in tensors), dtype)
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            _fill(host, tensors, non_blocking=True)
            arrived = self._stream.record_event()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return Staged(host, arrived.synchronize)


def to_host(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Staged:
    """Start to copy ``tensors``, one behind another, to a new flat vector of the host.

    Args:
        dtype: of the vector; the device converts to it, or the host where the device does not copy by itself.
    """
    tensors = [tensor.detach() for tensor in tensors]
    if {tensor.device.type for tensor in tensors} == {"cuda"} and len({tensor.device for tensor in tensors}) == 1:
        return _side_stream(tensors[0].device).to_host(tensors, dtype)
    host = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    _fill(host, tensors, non_blocking=False)
    return Staged(host)


_side_stream = cache(SideStream)


def _fill(host: torch.Tensor, tensors: Sequence[torch.Tensor], non_blocking: bool) -> None:
    start = 0
    for tensor in tensors:
        part = host[start : start + tensor.numel()]
        part.view(tensor.shape).copy_(tensor, non_blocking=non_blocking)
        start += tensor.numel()
