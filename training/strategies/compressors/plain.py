"""No compression besides the codec's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from profiles.declarations import OptionsByOwner
from training.exchange.base import MeanResult, Pending
from training.exchange.error_feedback import ErrorFeedback
from training.lazy import torch
from training.strategies.compressors.base import BucketContext, Compressor, Price, StepContext, register


@register
class Uncompressed(Compressor):
    """One mean of the whole bucket; with ``error_feedback``, a lossy codec's error is added to the next one."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "gradients as they are"

    @classmethod
    def price(cls, settings: OptionsByOwner) -> Price:
        source = "allreduce: the mean gradient of the joint batch, exact (Li et al. 2020)"
        return Price(("fp32", "bf16"), lambda trainable: trainable, 1, 0.0, 1.0, source)

    def __init__(self, context: BucketContext) -> None:
        super().__init__(context)
        keeps_residual = context.settings.error_feedback and context.codec.name != "fp32"
        self._feedback = (
            ErrorFeedback(context.codec, context.exchange, f"grad/{context.index}") if keeps_residual else None
        )
        self._in_flight: tuple[StepContext, torch.Tensor | None, Pending[MeanResult]] | None = None
        self._result: MeanResult | None = None

    def start(self, values: torch.Tensor, step_context: StepContext) -> None:
        name, context, feedback = f"grad/{step_context.step}/{self.context.index}", self.context, self._feedback
        values = feedback.compensate(values) if feedback is not None else values
        stream = feedback.stream if feedback is not None else ""
        pending = context.exchange.start_mean(
            name, values, step_context.weight, context.codec, step_context.flags, stream
        )
        self._in_flight = (step_context, values if feedback is not None else None, pending)

    def wait(self) -> MeanResult:
        assert self._in_flight is not None
        self._result = self._in_flight[2].wait()
        return self._result

    def settle(self) -> None:
        assert self._in_flight is not None and self._result is not None
        step_context, sent, _ = self._in_flight
        if self._feedback is not None and sent is not None:
            self._feedback.settle(sent, step_context.weight, self._result)
        self._in_flight = self._result = None

    def tensors(self) -> dict[str, torch.Tensor]:
        return {} if self._feedback is None else self._feedback.tensors(f"/{self.context.index}")

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        if self._feedback is not None:
            self._feedback.load(tensors, f"/{self.context.index}")
