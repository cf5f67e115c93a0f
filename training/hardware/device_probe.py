"""What a device does in practice: seconds of a small model's steps in each precision, products and copies.

The model is a stack of Transformer blocks in plain PyTorch, the same on every device and version.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import nn

_GAIN = 1.1
"""Speed-up over fp32 from which another precision is chosen automatically."""
_ROUNDS, _STEPS = 3, 5


class ProbeSize(NamedTuple):
    """The sizes of the measured model, matrices and copies."""

    width: int = 512
    layers: int = 4
    batch: int = 8
    length: int = 256
    matrix: int = 4096
    """Side of the matrices that are multiplied."""
    copied: int = 1 << 28
    """Bytes."""


USUAL = ProbeSize()
FOR_PROCESSORS = ProbeSize(128, 2, 4, 64, 512, 1 << 24)
TINY = ProbeSize(16, 1, 2, 8, 32, 1 << 12)


class TimedSteps(NamedTuple):
    """Duration and loss of some training steps."""

    seconds: float
    """Median of one step."""
    loss: float
    """After the last step."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss)


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all queued work."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


class ProbeSteps:
    """Training steps of the small model in one precision; ``None`` is fp32."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None, size: ProbeSize = USUAL) -> None:
        self._device, self._dtype, self._size = device, dtype, size
        generator = torch.Generator().manual_seed(0)
        block = functools.partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True, norm_first=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(*(block(size.width, 8, 4 * size.width) for _ in range(size.layers))).to(device)
        self._inputs = torch.randn(size.batch, size.length, size.width, generator=generator).to(device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def take(self, count: int) -> TimedSteps:
        """Take ``count`` steps, after one that warms up.

        Raises:
            RuntimeError: the device does not have the precision.
        """
        seconds = []
        for _ in range(count + 1):
            wait_for(self._device)
            start = time.perf_counter()
            with nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype):
                loss = nn.functional.mse_loss(self.model(self._inputs).float(), self._inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            wait_for(self._device)
            seconds.append(time.perf_counter() - start)
        return TimedSteps(statistics.median(seconds[1:]), float(loss.detach()))


@functools.cache
def bf16_gains(kind: str) -> bool:
    """Whether steps under bf16 autocast are finite and clearly faster than in fp32 on this machine's ``cuda``, ``mps``
    or ``cpu``; measured alternately, once a process."""
    try:
        probes = [ProbeSteps(torch.device(kind), dtype) for dtype in (None, torch.bfloat16)]
        rounds = [[probe.take(_STEPS) for probe in probes] for _ in range(_ROUNDS)]
    except (RuntimeError, TypeError):  # what back ends raise for a precision that they do not have
        return False
    finite = all(half.is_finite for _, half in rounds)
    return finite and statistics.median(full.seconds / half.seconds for full, half in rounds) >= _GAIN


def product_speed(device: torch.device, dtype: torch.dtype, size: ProbeSize = USUAL, count: int = 10) -> float:
    """Return floating-point operations a second of a matrix product in ``dtype``.

    Raises:
        RuntimeError: the device does not have it.
    """
    matrix = torch.ones(size.matrix, size.matrix, device=device, dtype=dtype)
    matrix @ matrix
    wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        matrix @ matrix
    wait_for(device)
    return count * 2 * size.matrix**3 / (time.perf_counter() - start)


def copy_speed(source: torch.Tensor, target: torch.Tensor, count: int = 5) -> float:
    """Return bytes a second of a copy between two tensors of one size."""
    waits = [tensor.device for tensor in (source, target)]
    target.copy_(source)
    start = 0.0
    for repeat in range(count + 1):
        target.copy_(source, non_blocking=source.is_pinned() or target.is_pinned())
        if repeat in (0, count):
            list(map(wait_for, waits))
            start = start or time.perf_counter()
    return count * source.nbytes / max(1e-9, time.perf_counter() - start)


def copy_speeds(device: torch.device, size: ProbeSize = USUAL) -> dict[str, float]:
    """Return bytes a second on the device, to it and from it, with CUDA also to and from pinned memory."""
    on_host = torch.zeros(size.copied, dtype=torch.uint8)
    on_device, second_on_device = torch.zeros_like(on_host, device=device), torch.zeros_like(on_host, device=device)
    speeds = {"on the device": copy_speed(on_device, second_on_device)}
    if device.type == "cpu":
        return speeds
    speeds |= {"to the device": copy_speed(on_host, on_device), "from the device": copy_speed(on_device, on_host)}
    if device.type == "cuda":
        pinned = on_host.pin_memory()
        speeds |= {"to it, pinned": copy_speed(pinned, on_device), "from it, pinned": copy_speed(on_device, pinned)}
    return speeds
