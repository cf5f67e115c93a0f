"""Per-step averaging of gradients, exact data parallelism.

Gradients are packed into flat buckets in the order in which backward makes them, and a bucket is sent while backward
still runs (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2).
The mean is weighted by what each member's loss is a mean over (samples, or tokens), so ``n`` members equal one worker
with the joint batch: ``g = sum_i (w_i / W) g_i``. Gradients travel without their loss scale. Under loss scaling a
gradient that is not finite makes all members pass over the step, as a single worker would; without it the mean is made
of the others' gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from profiles.declarations import Owning, Section, option
from profiles.errors import RunFailed
from training.events import SyncEvent
from training.exchange.base import MAX_FLAGS, Exchange, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec, codec_by_name
from training.exchange.error_feedback import ErrorFeedback
from training.lazy import lazy
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.costs import Compute, CostModel, Course, Learning, Rhythm
from training.strategies.registry import register
from training.strategies.weights import Refusals, difference_mended, equalised, trainable, unfit_parameter

if TYPE_CHECKING:
    import torch
    from torch import nn
else:
    torch = lazy("torch")

OVERLAP = 0.4
"""Share of a pass's compute that hides an exchange; measured with buckets of 25 MB."""
BACKWARD = 2 / 3
"""Share of a pass's compute that is backward: two products of matrices for each of forward."""


class AllReduceOptions(Section):
    """Options of :class:`AllReduce`."""

    bucket_mb: float = option(4.0, "size of a gradient bucket", unit="MB", gt=0, advanced=True, alias="bucket_mb")


class AllReduceCosts(CostModel):
    """Gradients of all trainable parameters in every step, partly hidden by backward."""

    sources: ClassVar[Mapping[str, str]] = {
        "exact": "allreduce: the mean gradient of the joint batch, exact (Li et al. 2020)",
        "bf16": "16-bit gradients: no difference reported (Li et al. 2020; Micikevicius et al. 2018)",
    }

    def hidden(self, exchange: float, compute: Compute, rhythm: Rhythm, settings: Owning) -> float:
        bucket = settings.of(AllReduceOptions).bucket_mb / (4e-6 * compute.trainable)
        return min(exchange, overlap_credit(compute.seconds / compute.passes, exchange, bucket))

    def learning(self, course: Course, rhythm: Rhythm, worth: float) -> Learning:
        return Learning(sources=("exact" if course.codec == "fp32" else "bf16",))


def overlap_credit(compute: float, exchange: float, bucket: float) -> float:
    """Return how much of an exchange the compute of its pass hides.

    At most :data:`OVERLAP` of it, and what backward has left to do when the first bucket is full; never the last
    bucket, which leaves when backward has ended: a model that fits in one bucket hides nothing.

    Args:
        bucket: share of all gradients that fill one, 1 for all of them.
    """
    first = min(1.0, bucket)
    last = 1.0 - (math.ceil(1.0 / first) - 1) * first
    return min(OVERLAP * compute, BACKWARD * (1.0 - first) * compute, exchange * (1.0 - last))


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


@dataclass
class _StepState:
    step: int = 0
    weight: float = 0.0
    scale: float | None = None
    armed: bool = False
    launched: int = 0
    before: Traffic = field(default_factory=Traffic)


@register
class AllReduce(Strategy):
    """Average gradients in every step."""

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "gradients averaged in every step, sent while backward runs; exact data parallelism"
    options = AllReduceOptions
    costs = AllReduceCosts()
    is_usual: ClassVar[bool] = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._codec: Codec = codec_by_name(self.codec(context.settings))
        self._buckets: list[Bucket] = []
        self._state = _StepState()
        self._members: tuple[int, ...] = ()
        self._refusals = Refusals(context.warn)

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parameters = trainable(model)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._members = exchange.members
        if exchange.engine == "solo":
            return
        limit = int(self.context.settings.of(AllReduceOptions).bucket_mb * 1e6 / 4)
        self._buckets = list(grouped(list(reversed(self._parameters)), limit))
        for bucket in self._buckets:
            if self.context.settings.error_feedback and self._codec.name != "fp32":
                bucket.feedback = ErrorFeedback(self._codec)
            for index, parameter in enumerate(bucket.parameters):
                hook = functools.partial(self._on_gradient, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        self._state = _StepState(step=step, weight=weight, scale=scale, before=self._exchange.traffic.copy())

    def last_backward(self) -> None:
        self._state.armed = True
        for bucket in self._buckets:
            bucket.arm()

    def backward_again(self) -> None:
        self._state.armed = False
        for bucket in self._buckets:
            bucket.disarm()

    def _on_gradient(self, bucket: Bucket, index: int, _: torch.Tensor) -> None:
        if not self._state.armed:
            return
        bucket.add(index)
        while self._state.launched < len(self._buckets) and self._buckets[self._state.launched].complete:
            self._launch(self._buckets[self._state.launched])

    def _launch(self, bucket: Bucket) -> None:
        """Start the next bucket; buckets start in the same order on every member."""
        values = bucket.pack(self._state.scale or 1.0)
        stream = ""
        if bucket.feedback is not None:
            values = bucket.sent = bucket.feedback.compensate(values)
            stream = f"grad/{self._state.launched}"
        name = f"grad/{self._state.step}/{self._state.launched}"
        bucket.pending = self._exchange.start_mean(name, values, self._state.weight, self._codec, bucket.flags, stream)
        self._state.launched += 1

    def gradients(self) -> None:
        while self._state.launched < len(self._buckets):
            self._launch(self._buckets[self._state.launched])
        self._check_complete()
        results = [self._wait_for(bucket) for bucket in self._buckets]
        self._note_refused(results)
        if self._state.scale is not None and any(result.refused for result in results):
            # Too large a loss scale, as it happens: all pass over the step, and what was kept stays as it was.
            for bucket in self._buckets:
                bucket.overflow()
            return
        for bucket, result in zip(self._buckets, results, strict=True):
            if bucket.feedback is not None and bucket.sent is not None:
                bucket.feedback.settle(bucket.sent, self._state.weight, result)
            bucket.unpack(result, self._state.scale or 1.0)
        if any(result.left_out and result.fit for result in results):
            self.context.warn(f"step {self._state.step + 1}: this machine's gradients came after the deadline")

    def _wait_for(self, bucket: Bucket) -> MeanResult:
        assert bucket.pending is not None
        result = bucket.pending.wait()
        bucket.pending = None
        self._members = result.members
        return result

    def _check_complete(self) -> None:
        for bucket in self._buckets:
            if bucket.added_late is not None:
                name = self._names[bucket.parameters[bucket.added_late]]
                raise RunFailed(
                    f"the gradient of {name} was added to after it had been sent: in step {self._state.step + 1} its "
                    "layer was recomputed more often than in the step before",
                    "checkpoint activations with use_reentrant=False",
                )

    def _note_refused(self, results: Sequence[MeanResult]) -> None:
        """Say which of this member's gradients are not in the mean because they are not finite."""
        state, where = self._state, ""
        for bucket, result in zip(self._buckets, results, strict=True):
            if not result.fit and not where:
                names = [self._names[parameter] for parameter in bucket.parameters]
                flat = bucket.pack(state.scale or 1.0)
                where = unfit_parameter(names, bucket.parameters, flat, self._codec)
        self._refusals.note(where and f"step {state.step + 1}: the gradient of {where}", scaled=state.scale is not None)

    def end_step(self) -> SyncEvent | None:
        interval = self.context.settings.verify_interval
        if self._exchange.engine == "solo" or not interval or (self._state.step + 1) % interval:
            return None
        return self._verified()

    def finish(self) -> SyncEvent | None:
        return None if self._exchange.engine == "solo" else self._verified()

    def _verified(self) -> SyncEvent:
        """Compare weights over the members and mend a difference.

        The same gradients give the same weights on equal hardware; two kinds of processor may differ in the last bit
        of an optimizer step, so those that most members hold are taken where hashes differ.
        """
        digest, drift, source = equalised(self._parameters, self._exchange, "verify")
        if source is not None:
            self.context.warn(difference_mended(drift, source))
        traffic = self._exchange.traffic.since(self._state.before)
        return sync_event(traffic, self._state.step + 1, self._members, digest, drift)

    @property
    def synchronised(self) -> bool:
        return True

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor | None] = {}
        for index, bucket in enumerate(self._buckets):
            if bucket.feedback is not None:
                owed = self._exchange.residual(f"grad/{index}", bucket.elements)
                found |= {f"residual/{index}": bucket.feedback.residual, f"mean_residual/{index}": owed}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        for index, bucket in enumerate(self._buckets):
            if bucket.feedback is None:
                continue
            if f"residual/{index}" in tensors:
                bucket.feedback.residual = tensors[f"residual/{index}"].to(bucket.parameters[0].device)
            if f"mean_residual/{index}" in tensors:
                self._exchange.restore_residual(f"grad/{index}", tensors[f"mean_residual/{index}"])
