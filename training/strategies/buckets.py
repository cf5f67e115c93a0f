"""Gradients that travel together, and when they are complete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.exchange.base import MAX_FLAGS, MeanResult, Pending
from training.exchange.error_feedback import ErrorFeedback
from training.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = lazy("torch")


@dataclass
class Bucket:
    """Some parameters whose gradients are one flat vector, with a flag each beside it: "it has a gradient".

    A gradient is complete when it was added to as often as in the backward before: once, however often the parameter is
    used, but once for every use of a layer whose activations are recomputed by reentrant checkpointing. In the first
    backward nobody knows that, and the bucket is complete at its end.
    """

    parameters: list[nn.Parameter]
    feedback: ErrorFeedback | None = None
    pending: Pending[MeanResult] | None = None
    sent: torch.Tensor | None = None
    """What :attr:`pending` carries, where error feedback has to settle it."""
    added_late: int | None = None
    """A parameter whose gradient was added to after it had been sent."""
    _added: list[int] = field(default_factory=list)
    _expected: list[int] | None = None
    _stays: bool = False

    def arm(self) -> None:
        """The backward that completes the gradients begins."""
        if any(self._added):
            self._expected = [max(1, times) for times in self._added]
        self._added = [0] * len(self.parameters)
        self._stays = self.pending is not None

    def disarm(self) -> None:
        """That backward broke off; what was sent before stays, and what was counted in it says nothing."""
        self._added = [0] * len(self.parameters)

    def add(self, index: int) -> None:
        """The gradient of a parameter was added to."""
        self._added[index] += 1
        if self.pending is not None and not self._stays:
            self.added_late = index

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def complete(self) -> bool:
        """Whether all gradients are final, as far as the backward before tells."""
        return self._expected is not None and all(map(int.__ge__, self._added, self._expected))

    @property
    def flags(self) -> bytes:
        """One bit a parameter, the first one in the lowest bit of the first byte."""
        bits = sum((parameter.grad is not None) << index for index, parameter in enumerate(self.parameters))
        return bits.to_bytes(math.ceil(len(self.parameters) / 8), "little")

    def pack(self, scale: float = 1.0) -> torch.Tensor:
        """Return the gradients divided by ``scale`` (zeros where there is none) as one flat fp32 vector."""
        flat = torch.zeros(self.elements, device=self.parameters[0].device)
        offset = 0
        for parameter in self.parameters:
            if parameter.grad is not None:
                flat[offset : offset + parameter.numel()].copy_(parameter.grad.reshape(-1))
            offset += parameter.numel()
        return flat if scale == 1.0 else flat.div_(scale)

    def unpack(self, result: MeanResult, scale: float = 1.0) -> None:
        """Give every parameter the mean gradient times ``scale``; none where no member had one, as a single worker
        would."""
        mean = result.mean if scale == 1.0 else result.mean * scale
        used = int.from_bytes(result.flags, "little")
        offset = 0
        for index, parameter in enumerate(self.parameters):
            part = mean[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if not used >> index & 1:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = part.to(parameter.dtype).clone()
            else:
                parameter.grad.copy_(part)

    def overflow(self) -> None:
        """Make all gradients infinite: every member's loss scaler passes over the step, and lowers its scale."""
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, torch.inf)


def grouped(parameters: Sequence[nn.Parameter], limit: int) -> Iterator[Bucket]:
    """Cut ``parameters`` into runs on one device of about ``limit`` elements."""
    group: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        full = size + parameter.numel() > limit or len(group) == 8 * MAX_FLAGS
        if group and (full or parameter.device != group[0].device):
            yield Bucket(group)
            group, size = [], 0
        group.append(parameter)
        size += parameter.numel()
    if group:
        yield Bucket(group)
