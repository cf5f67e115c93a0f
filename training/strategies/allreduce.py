"""Per-step averaging of gradients, exact data parallelism.

Gradients are packed into flat buckets in the order in which backward makes them, and a bucket is sent while backward
still runs (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2).
The mean is weighted by what each member's loss is a mean over (samples, or tokens), so ``n`` members equal one worker
with the joint batch: ``g = sum_i (w_i / W) g_i``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from profiles.schema import StrategySettings
from training.exchange.base import Exchange, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec, ErrorFeedback, codec_by_name, roundtrip
from training.strategies.base import Strategy, StrategyContext, SyncReport
from training.strategies.flat import flatten, trainable, unflatten_into, weight_hash

_FLAG_BLOCK = 32
"""Flags start at a multiple of the largest codec block, so that they never share a scale with gradients."""


@dataclass
class _Bucket:
    """Some parameters whose gradients travel together, followed by one flag a parameter: "it has a gradient"."""

    parameters: list[nn.Parameter]
    missing: int = 0
    pending: Pending[MeanResult] | None = None
    feedback: ErrorFeedback | None = None

    @property
    def flags_at(self) -> int:
        return math.ceil(sum(p.numel() for p in self.parameters) / _FLAG_BLOCK) * _FLAG_BLOCK

    def pack(self) -> torch.Tensor:
        """Return gradients (zeros where there is none), padding, and flags as one flat fp32 vector."""
        flat = torch.zeros(self.flags_at + len(self.parameters), device=self.parameters[0].device)
        offset = 0
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                flat[offset : offset + parameter.numel()].copy_(parameter.grad.reshape(-1))
                flat[self.flags_at + index] = 1.0
            offset += parameter.numel()
        return flat

    def unpack(self, flat: torch.Tensor) -> None:
        """Give every parameter the mean gradient; none where no member had one, as a single worker would."""
        offset = 0
        used = flat[self.flags_at :].tolist()
        for index, parameter in enumerate(self.parameters):
            part = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if used[index] == 0.0:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = part.to(parameter.dtype).clone()
            else:
                parameter.grad.copy_(part)


@dataclass
class _StepState:
    step: int = 0
    weight: float = 0.0
    armed: bool = False
    launched: int = 0
    before: Traffic = field(default_factory=Traffic)


class AllReduce(Strategy):
    """Average gradients in every step."""

    name: ClassVar[str] = "allreduce"

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        settings = context.settings
        self._codec: Codec = codec_by_name("fp32" if settings.codec == "auto" else settings.codec)
        self._buckets: list[_Bucket] = []
        self._state = _StepState()
        self._members: tuple[int, ...] = ()
        self._warnings: list[str] = []

    @classmethod
    def summary(cls, settings: StrategySettings) -> str:
        codec = "fp32" if settings.codec == "auto" else settings.codec
        return f"gradients averaged in every step ({codec}), sent while backward runs; exact data parallelism"

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parameters = trainable(model)
        self._members = exchange.members
        if exchange.engine == "solo":
            return
        limit = int(self.context.settings.bucket_mb * 1e6 / 4)
        for group in _grouped(list(reversed(self._parameters)), limit):
            bucket = _Bucket(group)
            if self.context.settings.error_feedback:
                bucket.feedback = ErrorFeedback()
            self._buckets.append(bucket)
            for parameter in group:
                hook = functools.partial(self._on_gradient, bucket)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin_step(self, step: int, weight: float) -> None:
        self._state = _StepState(step=step, weight=weight, before=self._exchange.traffic.copy())
        self._warnings = []

    def last_backward(self) -> None:
        self._state.armed = True
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def _on_gradient(self, bucket: _Bucket, _: torch.Tensor) -> None:
        if not self._state.armed:
            return
        bucket.missing -= 1
        while self._state.launched < len(self._buckets) and self._buckets[self._state.launched].missing == 0:
            self._launch(self._buckets[self._state.launched])

    def _launch(self, bucket: _Bucket) -> None:
        """Start the next bucket; buckets start in the same order on every member."""
        values = bucket.pack()
        if bucket.feedback is not None:
            values = bucket.feedback.compensate(values)
            bucket.feedback.record(values, roundtrip(self._codec, values))
        name = f"grad/{self._state.step}/{self._state.launched}"
        bucket.pending = self._exchange.start_mean(name, values, self._state.weight, self._codec)
        self._state.launched += 1

    def gradients(self) -> None:
        while self._state.launched < len(self._buckets):
            self._launch(self._buckets[self._state.launched])
        for bucket in self._buckets:
            assert bucket.pending is not None
            result = bucket.pending.wait()
            bucket.pending = None
            bucket.unpack(result.mean)
            self._members = result.members
            if not result.included:
                self._warnings = [f"step {self._state.step}: this machine's gradients came after the deadline"]

    def end_step(self) -> SyncReport | None:
        interval = self.context.settings.verify_interval
        if self._exchange.engine == "solo" or not interval or (self._state.step + 1) % interval:
            return None
        return self._report(self._verified_hash(f"verify/{self._state.step}"))

    def finish(self) -> SyncReport | None:
        if self._exchange.engine == "solo":
            return None
        return self._report(self._verified_hash("verify/finish"))

    def _report(self, digest: str) -> SyncReport:
        traffic = self._exchange.traffic.since(self._state.before)
        return SyncReport(
            round=self._state.step + 1,
            bytes_sent=traffic.bytes_sent,
            bytes_received=traffic.bytes_received,
            seconds=traffic.transfer_seconds,
            wait=traffic.wait_seconds,
            members=self._members,
            weight_hash=digest,
            warnings=tuple(self._warnings),
        )

    def _verified_hash(self, name: str) -> str:
        """Compare weights over the members and mend a difference.

        The same gradients give the same weights on equal hardware; two kinds of processor may differ in the last bit
        of an optimizer step, so the lowest rank's weights are taken where hashes differ.
        """
        flat = flatten(self._parameters)
        digest = weight_hash(flat)
        hashes = self._exchange.gather(name, digest.encode())
        if len(set(hashes.values())) == 1:
            return digest
        lowest = float(self._exchange.rank == min(hashes))
        result = self._exchange.mean(f"{name}/mend", flat, lowest, codec_by_name("fp32"))
        drift = float((result.mean - flat).abs().max())
        unflatten_into(self._parameters, result.mean)
        self._warnings.append(
            f"step {self._state.step}: weights differed by up to {drift:.3g} and were set to member {min(hashes)}'s"
        )
        return weight_hash(result.mean)

    @property
    def synchronised(self) -> bool:
        return True

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for index, bucket in enumerate(self._buckets):
            if bucket.feedback is not None and bucket.feedback.residual is not None:
                found[f"residual/{index}"] = bucket.feedback.residual
        return found

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        for index, bucket in enumerate(self._buckets):
            if bucket.feedback is not None and f"residual/{index}" in tensors:
                device = bucket.parameters[0].device
                bucket.feedback.residual = tensors[f"residual/{index}"].to(device)


def _grouped(parameters: list[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    """Cut ``parameters`` into runs on one device of about ``limit`` elements."""
    group: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if group and (size + parameter.numel() > limit or parameter.device != group[0].device):
            yield group
            group, size = [], 0
        group.append(parameter)
        size += parameter.numel()
    if group:
        yield group
