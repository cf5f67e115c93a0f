"""Copies between a device and the host for the exchange: flat, and at the speed of the bus.

A device with its own queue, such as CUDA, copies asynchronously only to and from pinned memory, which comes from
torch's cache and returns there with the tensor. Other devices, such as MPS, copy synchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from training.exchange.codecs import CastCodec, Codec
from training.lazy import torch

_CODED_AT_ONCE = 1 << 22
"""Elements that a device encodes at a time: that takes a dozen bytes for each, while training fills its memory. A
multiple of every block."""


def is_asynchronous(device: torch.device) -> bool:
    """Return whether a device works asynchronously to the host, copies included."""
    return device.type not in ("cpu", "mps", "meta")


def common_async_device(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the device of all tensors, if it is the same for all and asynchronous."""
    devices = {tensor.device for tensor in tensors}
    return devices.pop() if len(devices) == 1 and all(map(is_asynchronous, devices)) else None


def pinned(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return flat memory that a CUDA device can access directly, or pageable memory where no more can be pinned:
    slower."""
    try:
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(elements, dtype=dtype, device="cpu")


def to_host(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return a new flat host vector with the concatenated ``tensors``.

    Args:
        dtype: of the vector; the device converts to it, or the host if the device copies synchronously.
    """
    elements, devices = sum(tensor.numel() for tensor in tensors), {tensor.device for tensor in tensors}
    alone = bool(devices) and all(map(is_asynchronous, devices))
    host, start = pinned(elements, dtype) if alone else torch.empty(elements, dtype=dtype, device="cpu"), 0
    for tensor in tensors:
        target = host[start : start + tensor.numel()]
        target.view(tensor.shape).copy_(tensor.detach(), non_blocking=alone)
        start += tensor.numel()
    for device in devices if alone else ():
        wait_for_device(device)
    return host


def wait_for_device(device: torch.device) -> None:
    """Wait until an asynchronous device has finished its queued work."""
    if is_asynchronous(device):
        torch.get_device_module(device).current_stream(device).record_event().synchronize()


def fetch_as_decoded(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Return flat fp32 ``values`` of a device on the host, as other members will decode them; values that ``codec``
    cannot carry are unchanged.

    An asynchronous device encodes them, if the codec can do that there, so that less is copied.
    """
    cuts = range(0, values.numel(), _CODED_AT_ONCE) if is_asynchronous(values.device) and not codec.exact else ()
    encoded = [codec.encode_on_device(values[start : start + _CODED_AT_ONCE]) for start in cuts]
    coded = [piece for piece in encoded if piece is not None]
    if not coded:
        return to_host([values], torch.float32)
    data, host, at = to_host(coded, torch.uint8), pinned(values.numel(), torch.float32), 0
    try:
        for start, piece in zip(cuts, coded, strict=True):
            codec.decode_into(data[at : at + piece.numel()], host[start : start + _CODED_AT_ONCE])
            at += piece.numel()
    except ValueError:  # not all values are finite
        return to_host([values], torch.float32)
    return host


def decoded_on_device(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Return what other members decode of flat fp32 ``values``, on their asynchronous device and without waiting for
    it: what :func:`fetch_as_decoded` fetches. ``codec`` works on devices."""
    result = torch.empty_like(values)
    for start in range(0, values.numel(), _CODED_AT_ONCE):
        piece = values[start : start + _CODED_AT_ONCE]
        data = codec.encode_on_device(piece)
        assert data is not None, codec.name
        result[start : start + _CODED_AT_ONCE] = codec.decode_on_device(data, piece.numel())
    return result


def encode_there(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return flat fp32 ``values`` encoded as flat uint8 on their device; fp32 shares memory with ``values``."""
    if values.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    if isinstance(codec, CastCodec):
        return values.to(codec.dtype).view(torch.uint8)
    return codec.encode(values).to(values.device)


def decode_there(codec: Codec, data: torch.Tensor, elements: int) -> torch.Tensor:
    """Return the fp32 values of :func:`encode_there`, on the same device; may share memory with ``data``."""
    if isinstance(codec, CastCodec) and data.is_cuda:
        return data.clone().view(codec.dtype).to(torch.float32)
    return codec.decode(data.to("cpu"), elements).to(data.device)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a host tensor on ``device``, copied asynchronously where that is possible. The host tensor must not change
    until the host has waited for the device."""
    return device_accessible(values, device).to(device, non_blocking=is_asynchronous(device))


def device_accessible(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return flat ``values`` in memory that ``device`` can access directly, if it can access any."""
    if not is_asynchronous(device) or values.device.type != "cpu" or values.is_pinned():
        return values
    return pinned(values.numel(), values.dtype).copy_(values)


class SideQueue:
    """Processes what a device has computed, in a thread and a device queue of its own: neither the caller nor the
    device's main queue waits.

    Actions run one after another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._runtime = device, torch.get_device_module(device)
        self._stream = self._runtime.Stream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="side queue")

    def submit(self, action: Callable[[torch.Tensor], None], values: torch.Tensor) -> Future[None]:
        """Call ``action(values)`` when the device has computed them; their memory is not reused before."""
        values.record_stream(self._stream)
        computed = self._runtime.current_stream(self._device).record_event()
        return self._thread.submit(self._do, action, values, computed)

    def _do(self, action: Callable[[torch.Tensor], None], values: torch.Tensor, computed: Any) -> None:
        with self._runtime.stream(self._stream):
            self._stream.wait_event(computed)
            action(values)

    def join(self) -> None:
        """Make the main queue wait for all submitted actions."""
        self._runtime.current_stream(self._device).wait_stream(self._stream)
