"""Copies between a device and the host for the exchange: flat, and at the speed of the bus.

A device with its own queue, such as CUDA, copies asynchronously only to and from pinned memory, which comes from
torch's cache and returns there with the tensor. Other devices, such as MPS, copy synchronously.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from training.exchange.codecs import CastCodec, Codec, EncodedVector
from training.lazy import torch

_CODED_AT_ONCE = 1 << 22
"""Elements that a device encodes at a time: that takes a dozen bytes for each, while training fills its memory. A
multiple of every block."""


def is_asynchronous(device: torch.device) -> bool:
    """Return whether a device works asynchronously to the host, copies included."""
    return device.type not in ("cpu", "mps", "meta")


def free_memory_of(device: torch.device) -> int:
    """Return the bytes of an asynchronous device that nobody has; what torch has taken for its tensors, and keeps for
    more, is not among them. 0: not known."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return int(ask(device)[0]) if ask is not None else 0


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


def pinned_bytes(size: int) -> torch.Tensor:
    """Return :func:`pinned` memory of so many bytes."""
    return pinned(size, torch.uint8)


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


def fetch(values: torch.Tensor, codec: Codec, device: torch.device | None = None) -> torch.Tensor | EncodedVector:
    """Return flat fp32 ``values`` of a device on the host: encoded by an asynchronous device, if the codec can do that
    there and all values can be carried, else as they are.

    Args:
        device: where the mean is wanted; default: where the values are.
    """
    if not is_asynchronous(values.device) or codec.exact or not (codec.works_on_devices and codec.planes(1)):
        return to_host([values], torch.float32)
    encoded = EncodedVector(codec, values.numel(), device or values.device, pinned_bytes)
    for start in range(0, values.numel(), _CODED_AT_ONCE):
        stop = min(start + _CODED_AT_ONCE, values.numel())
        data = codec.encode_on_device(values[start:stop])
        assert data is not None, codec.name
        pieces = torch.split(data, list(codec.planes(stop - start)))
        for target, piece in zip(encoded.parts(start, stop), pieces, strict=True):
            target.copy_(piece, non_blocking=True)
    wait_for_device(values.device)
    return encoded if codec.carried(encoded.planes) else to_host([values], torch.float32)


def decoded_there(encoded: EncodedVector) -> torch.Tensor:
    """Return a vector decoded, flat fp32 on the device where it is wanted; the host does not wait for that."""
    device, codec = encoded.device, encoded.codec
    if not is_asynchronous(device):
        return encoded.decode().to(device)
    planes = [to_device(plane, device) for plane in encoded.planes]

    def piece(start: int) -> torch.Tensor:
        stop = min(start + _CODED_AT_ONCE, encoded.elements)
        parts = encoded.parts(start, stop, planes)
        return codec.decode_on_device(parts[0] if len(parts) == 1 else torch.cat(parts), stop - start)

    if encoded.elements <= _CODED_AT_ONCE:
        return piece(0)
    result = torch.empty(encoded.elements, device=device)
    for start in range(0, encoded.elements, _CODED_AT_ONCE):
        result[start : start + _CODED_AT_ONCE] = piece(start)
    return result


def decoded_on_device(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Return what other members decode of flat fp32 ``values``, on their asynchronous device and without waiting for
    it. ``codec`` works on devices."""
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


def moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a flat fp32 vector on an asynchronous device or the host; itself, if it is there."""
    if values.device == device:
        return values
    return to_device(values, device) if is_asynchronous(device) else to_host([values], torch.float32)


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
