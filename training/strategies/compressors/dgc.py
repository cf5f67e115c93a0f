"""Deep Gradient Compression: the largest accumulated gradients are sent, with momentum before compression.

Lin, Han, Mao, Wang and Dally 2018, "Deep Gradient Compression" (arXiv 1712.01887), algorithm 4: a member keeps a
momentum U and what has not been sent, V, of every gradient G::

    G <- G, clipped to max_grad_norm / sqrt(n)      local gradient clipping
    U <- m U + G                                    momentum correction
    V <- V + U
    sent <- the largest of V
    U, V <- 0 where they were sent                  momentum factor masking

and all step by the weighted mean of what was sent, without another momentum, which is taken from ``optimizer = sgd``,
whose weight decay acts on the mean. In the first steps a quarter is sent, then a quarter of that, down to
``dgc_share`` (section 3.3).

The codec ``topk`` encodes it, with 16-bit values. So the largest are those of a piece of a bucket (up to 262,144
elements), where the paper selects by layer; rounding errors stay in V, or with the owner that rounds the mean. What
came too late, and the gradient of an unused tensor, stay in U and V. Both belong to their member and leave with it; a
newcomer starts with zeros, as all did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from profiles.declarations import OptionsByOwner, Section, option
from profiles.errors import BadInput
from training.exchange.base import MeanResult, Pending
from training.exchange.codecs import Codec, codec_by_name, roundtrip
from training.exchange.residuals import Residual
from training.lazy import torch
from training.strategies.compressors.base import BucketContext, Compressor, Price, StepContext, register, unused

_STAGE_RATIO = 0.25
"""Share of the first warm-up stage, and ratio of each stage to the one before."""


class DGCOptions(Section):
    """Options of :class:`DGC`."""

    dgc_share: float = option(
        0.001, "share of the gradient's elements that dgc sends in a step", gt=0, le=1, advanced=True
    )
    dgc_warmup: float = option(
        0.05,
        "steps in which dgc's share falls from a quarter to dgc_share; below 1: a share of the run",
        ge=0,
        advanced=True,
    )


def share_at(step: int, share: float, warmup: float) -> float:
    """Return the share of elements that is sent in a step.

    Args:
        share: of all steps after the warm-up.
        warmup: steps of the warm-up, in stages of equal length.
    """
    stages = sum(_STAGE_RATIO**stage > share for stage in range(1, 64))
    return share if step >= warmup or not stages else _STAGE_RATIO ** (1 + math.floor(step * stages / warmup))


@register
class DGC(Compressor):
    """Send the largest elements, with momentum correction and factor masking."""

    name: ClassVar[str] = "dgc"
    summary: ClassVar[str] = "few large elements, for optimizer = sgd"
    options = DGCOptions
    clips: ClassVar[bool] = True

    @classmethod
    def price(cls, settings: OptionsByOwner) -> Price:
        """Return the costs after the warm-up: the codec's work, and an estimate for the two sums."""
        source = (
            "DGC: as with momentum SGD at 0.1 % of the gradient, from scratch, ResNet50 and LSTM (arXiv 1712.01887)"
        )
        codec = f"topk:{settings.of(DGCOptions).dgc_share!r}"
        return Price((codec,), lambda trainable: trainable, 5, 4.0, 0.0, source)

    @classmethod
    def take_over(cls, optimizer: torch.optim.Optimizer) -> float:
        groups = optimizer.param_groups
        is_plain_sgd = isinstance(optimizer, torch.optim.SGD) and not any(
            g["nesterov"] or g["dampening"] for g in groups
        )
        momenta = {float(group["momentum"]) for group in groups} if is_plain_sgd else set()
        if len(momenta) != 1:
            problem = (
                f"allreduce.compressor = dgc with {type(optimizer).__name__}: it corrects the momentum of plain SGD"
            )
            raise BadInput(problem, "set optimizer = sgd, or allreduce.compressor = powersgd")
        for group in groups:
            group["momentum"] = 0.0
        return momenta.pop()

    def __init__(self, context: BucketContext) -> None:
        super().__init__(context)
        options = context.settings.of(DGCOptions)
        self._share = options.dgc_share
        self._warmup = options.dgc_warmup if options.dgc_warmup >= 1 else options.dgc_warmup * context.total_steps
        self._stream = f"grad/{context.index}"
        self._momentum: torch.Tensor | None = None
        self._unsent: torch.Tensor | None = None
        self._proposed: tuple[torch.Tensor, torch.Tensor] | None = None
        """Momentum and unsent values if this step is accepted."""
        self._step_context = StepContext(0, 0.0, b"")
        self._codec: Codec = context.codec
        self._pending: Pending[MeanResult] | None = None
        self._result: MeanResult | None = None

    def start(self, values: torch.Tensor, step_context: StepContext) -> None:
        momentum = values if self._momentum is None else values.add_(self._momentum, alpha=self.context.momentum)
        unsent = momentum.clone() if self._unsent is None else momentum + self._unsent
        share = share_at(step_context.step, self._share, self._warmup)
        self._codec = self.context.codec if share == self._share else codec_by_name(f"topk:{share!r}")
        self._step_context, self._proposed = step_context, (momentum, unsent)
        name = f"grad/{step_context.step}/{self.context.index}"
        exchange = self.context.exchange
        self._pending = exchange.start_mean(
            name, unsent, step_context.weight, self._codec, step_context.flags, self._stream
        )

    def wait(self) -> MeanResult:
        assert self._pending is not None
        self._result = self._pending.wait()
        return self._result

    def settle(self) -> None:
        assert self._result is not None and self._proposed is not None
        result, (momentum, unsent) = self._result, self._proposed
        self._result = self._proposed = self._pending = None
        if not result.is_finite:
            return  # the state before the step stays
        if self._step_context.weight > 0.0:
            sent = roundtrip(self._codec, unsent)
            for start, stop in result.left_out:
                sent[start:stop] = 0.0
            for span in unused(self.context.shapes, result.flags):
                sent[span] = 0.0
            unsent -= sent
            momentum[sent != 0] = 0.0
        self._momentum, self._unsent = momentum, unsent

    def tensors(self) -> dict[str, torch.Tensor]:
        index, tensors = self.context.index, dict[str, torch.Tensor]()
        if self._momentum is not None and self._unsent is not None:
            tensors = {f"dgc/momentum/{index}": self._momentum, f"dgc/unsent/{index}": self._unsent}
        residual = self.context.exchange.residual(self._stream)
        return tensors | (residual.tensors(f"mean_residual/{index}") if residual is not None else {})

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        index = self.context.index
        if f"dgc/momentum/{index}" in tensors:
            self._momentum = tensors[f"dgc/momentum/{index}"].to(device, copy=True)
            self._unsent = tensors[f"dgc/unsent/{index}"].to(device, copy=True)
        if (residual := Residual.of(tensors, f"mean_residual/{index}")) is not None:
            self.context.exchange.restore_residual(self._stream, residual)
