"""Base of strategies that average gradients in every step: flat buckets, and the check that weights stay equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from training.exchange.base import MAX_FLAGS, Exchange, MeanResult, Traffic
from training.exchange.codecs import Codec
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.weights import difference_warning, non_finite_parameter, sync_weights


class GradientStrategy(Strategy):
    """Base class: members hold the same weights after every step, and compare their hashes at an interval."""

    merges = "gradients"
    scales_learning_rate = ("pretrained", "scratch")
    equal = "always"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._step, self._before = 0, Traffic()

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._name_of = dict(zip(self._parameters, self._names, strict=True))

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        self._step, self._before = step, self._exchange.traffic.copy()

    def _count_non_finite(self, buckets: Sequence[Bucket], codec: Codec, scale: float | None) -> None:
        """Count a step in which this member's gradients of some buckets are not in the mean, since they are not
        finite."""
        self._count_problem(self._non_finite_parameter(buckets[0], codec, scale) if buckets else "", scale)

    def _non_finite_parameter(self, bucket: Bucket, codec: Codec, scale: float | None) -> str:
        """Return the name of the first parameter of a bucket whose gradient is not finite."""
        names = [self._name_of[parameter] for parameter in bucket.parameters]
        return non_finite_parameter(names, bucket.parameters, bucket.pack(scale or 1.0), codec)

    def _count_problem(self, parameter_name: str, scale: float | None) -> None:
        """Count a step in which the gradient of a parameter is not finite; empty: all are."""
        self._non_finite_counter.count(
            parameter_name and f"step {self._step + 1}: the gradient of {parameter_name}", scaled=scale is not None
        )

    def end_step(self) -> SyncEvent | None:
        interval = self.context.settings.verify_interval
        if self._alone or not interval or (self._step + 1) % interval:
            return None
        return self._verify_weights()

    def finish(self) -> SyncEvent | None:
        return None if self._alone else self._verify_weights()

    def _verify_weights(self) -> SyncEvent:
        """Compare the members' weights, and repair a difference.

        Equal gradients give equal weights on equal hardware; different processors may differ in the last bit of an
        optimizer step. If hashes differ, all take the weights of the majority.
        """
        digest, drift, source = sync_weights(self._parameters, self._exchange, "verify")
        if source is not None:
            self.context.warn(difference_warning(drift, source))
        traffic = self._exchange.traffic.since(self._before)
        return sync_event(traffic, self._step + 1, self._members, digest, drift)

    @property
    def synchronised(self) -> bool:
        return True


@dataclass
class Bucket:
    """Parameters whose gradients form one flat vector, with a flag for each: "it has a gradient".

    A gradient is complete when it was accumulated as often as in the backward before: once, however often the parameter
    is used, but once for each use of a layer that reentrant checkpointing recomputes. In the first backward that is not
    known, and the bucket is complete at its end.
    """

    parameters: list[nn.Parameter]
    in_flight: bool = False
    """Whether this step's gradients were sent."""
    added_late: int | None = None
    """Index of a parameter whose gradient was accumulated after it had been sent; ``None``: none was."""
    _added: list[int] = field(default_factory=list)
    _expected: list[int] | None = None
    _was_sent_before: bool = False

    def arm(self) -> None:
        """Called before the backward that completes the gradients."""
        if any(self._added):
            self._expected = [max(1, times) for times in self._added]
        self._added = [0] * len(self.parameters)
        self._was_sent_before = self.in_flight

    def disarm(self) -> None:
        """Called if that backward failed; what was sent before stays valid, and its counts are discarded."""
        self._added = [0] * len(self.parameters)

    def add(self, index: int) -> None:
        """Count an accumulation into the gradient of a parameter."""
        self._added[index] += 1
        if self.in_flight and not self._was_sent_before:
            self.added_late = index

    @property
    def elements(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def complete(self) -> bool:
        """Whether all gradients are final, judged by the backward before."""
        return self._expected is not None and all(map(int.__ge__, self._added, self._expected))

    @property
    def flags(self) -> bytes:
        """One bit for each parameter with a gradient, the first in the lowest bit of the first byte."""
        bits = sum((parameter.grad is not None) << index for index, parameter in enumerate(self.parameters))
        return bits.to_bytes(math.ceil(len(self.parameters) / 8), "little")

    def pack(self, scale: float = 1.0) -> torch.Tensor:
        """Return the gradients divided by ``scale`` (zeros where there is none) as one flat fp32 vector."""
        flat = torch.empty(self.elements, device=self.parameters[0].device)
        views = self._split(flat)
        if without_gradient := [view for view, p in zip(views, self.parameters, strict=True) if p.grad is None]:
            torch._foreach_zero_(without_gradient)
        if with_gradient := [
            (view, p.grad) for view, p in zip(views, self.parameters, strict=True) if p.grad is not None
        ]:
            torch._foreach_copy_([view for view, _ in with_gradient], [gradient for _, gradient in with_gradient])
        return flat if scale == 1.0 else flat.div_(scale)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat vector in the shapes of the parameters."""
        pieces = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    def unpack(self, result: MeanResult, scale: float = 1.0, shares_mean: bool = False) -> None:
        """Set every parameter's gradient to the mean times ``scale``; ``None`` if no member had one.

        Args:
            shares_mean: gradients may be views of the mean, which nobody else uses.
        """
        mean = result.mean if scale == 1.0 else result.mean * scale
        used = int.from_bytes(result.flags, "little")
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index, (mean_gradient, parameter) in enumerate(zip(self._split(mean), self.parameters, strict=True)):
            if not used >> index & 1:
                parameter.grad = None
            elif shares_mean and parameter.dtype == mean.dtype and parameter.is_contiguous():
                parameter.grad = mean_gradient
            elif parameter.grad is None:
                parameter.grad = mean_gradient.to(parameter.dtype).clone()
            else:
                copies.append((parameter.grad, mean_gradient))
        if copies:
            torch._foreach_copy_([gradient for gradient, _ in copies], [mean_gradient for _, mean_gradient in copies])

    def overflow(self) -> None:
        """Make all gradients infinite, so that every member's loss scaler skips the step and lowers its scale."""
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, torch.inf)


def grouped(parameters: Sequence[nn.Parameter], limit: int) -> Iterator[Bucket]:
    """Yield buckets of consecutive parameters on one device, of about ``limit`` elements each."""
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
