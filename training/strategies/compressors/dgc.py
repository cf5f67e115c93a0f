"""Deep Gradient Compression: the largest of what gradients have added up to travel, with momentum before, not after.

Lin, Han, Mao, Wang and Dally 2018, "Deep Gradient Compression" (arXiv 1712.01887), algorithm 4: a member keeps a
momentum U and what has not been sent, V, of every gradient G::

    G <- G, clipped to max_grad_norm / sqrt(n)      local gradient clipping
    U <- m U + G                                    momentum correction
    V <- V + U
    sent <- the largest of V
    U, V <- 0 where they were sent                  momentum factor masking

and all step by the weighted mean of what was sent, without another momentum: it is taken from ``optimizer = sgd``,
whose weight decay acts on the mean. In the first steps a quarter is sent, then a quarter of that, down to
``dgc_share`` (section 3.3).

The codec ``topk`` carries it, with 16-bit values. So the largest are those of a piece of a bucket (up to 262,144
elements), where the paper takes a layer; what rounding loses stays in V, or with who rounds the mean. What came too
late, and the gradient of a tensor that nobody used, stay in U and V. Both belong to their member, and leave with it; a
newcomer begins with zeros, as all did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from profiles.declarations import Owning, Section, option
from profiles.errors import BadInput
from training.exchange.base import MeanResult, Pending
from training.exchange.codecs import Codec, codec_by_name, roundtrip
from training.exchange.residuals import Residual
from training.lazy import torch
from training.strategies.compressors.base import BucketContext, Compressor, Price, StepContext, register, unused

_STAGE = 0.25
"""The share of the first stage of the warm-up, and of each one in the one before."""


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
    """Return the share that is sent in a step.

    Args:
        share: that of all steps after the warm-up.
        warmup: steps that it takes, in stages of equal length.
    """
    stages = sum(_STAGE**stage > share for stage in range(1, 64))
    return share if step >= warmup or not stages else _STAGE ** (1 + math.floor(step * stages / warmup))


@register
class DGC(Compressor):
    """The largest elements, with momentum correction and factor masking."""

    name: ClassVar[str] = "dgc"
    summary: ClassVar[str] = "few large elements, for optimizer = sgd"
    options = DGCOptions
    clips: ClassVar[bool] = True

    @classmethod
    def price(cls, settings: Owning) -> Price:
        """Return the costs after the warm-up. Beside the codec's work, that of the two sums, which was not measured."""
        said = "DGC: as with momentum SGD at 0.1 % of the gradient, from scratch, ResNet50 and LSTM (arXiv 1712.01887)"
        codec = f"topk:{settings.of(DGCOptions).dgc_share!r}"
        return Price((codec,), lambda trainable: trainable, 5, 4.0, 0.0, said)

    @classmethod
    def take_over(cls, optimizer: torch.optim.Optimizer) -> float:
        groups = optimizer.param_groups
        usual = isinstance(optimizer, torch.optim.SGD) and not any(g["nesterov"] or g["dampening"] for g in groups)
        momenta = {float(group["momentum"]) for group in groups} if usual else set()
        if len(momenta) != 1:
            what = f"allreduce.compressor = dgc with {type(optimizer).__name__}: it corrects the momentum of plain SGD"
            raise BadInput(what, "set optimizer = sgd, or allreduce.compressor = powersgd")
        for group in groups:
            group["momentum"] = 0.0
        return momenta.pop()

    def __init__(self, place: BucketContext) -> None:
        super().__init__(place)
        own = place.settings.of(DGCOptions)
        self._share = own.dgc_share
        self._warmup = own.dgc_warmup if own.dgc_warmup >= 1 else own.dgc_warmup * place.total_steps
        self._stream = f"grad/{place.index}"
        self._momentum: torch.Tensor | None = None
        self._unsent: torch.Tensor | None = None
        self._next: tuple[torch.Tensor, torch.Tensor] | None = None
        """Momentum and what is unsent, as this step makes them."""
        self._turn = StepContext(0, 0.0, b"")
        self._codec: Codec = place.codec
        self._pending: Pending[MeanResult] | None = None
        self._result: MeanResult | None = None

    def start(self, values: torch.Tensor, turn: StepContext) -> None:
        momentum = values if self._momentum is None else values.add_(self._momentum, alpha=self.place.momentum)
        unsent = momentum.clone() if self._unsent is None else momentum + self._unsent
        share = share_at(turn.step, self._share, self._warmup)
        self._codec = self.place.codec if share == self._share else codec_by_name(f"topk:{share!r}")
        self._turn, self._next = turn, (momentum, unsent)
        name = f"grad/{turn.step}/{self.place.index}"
        exchange = self.place.exchange
        self._pending = exchange.start_mean(name, unsent, turn.weight, self._codec, turn.flags, self._stream)

    def wait(self) -> MeanResult:
        assert self._pending is not None
        self._result = self._pending.wait()
        return self._result

    def settle(self) -> None:
        assert self._result is not None and self._next is not None
        result, (momentum, unsent) = self._result, self._next
        self._result = self._next = self._pending = None
        if not result.fit:
            return  # what was kept before stays
        if self._turn.weight > 0.0:
            sent = roundtrip(self._codec, unsent)
            for start, stop in result.left_out:
                sent[start:stop] = 0.0
            for where in unused(self.place.shapes, result.flags):
                sent[where] = 0.0
            unsent -= sent
            momentum[sent != 0] = 0.0
        self._momentum, self._unsent = momentum, unsent

    def tensors(self) -> dict[str, torch.Tensor]:
        index, found = self.place.index, dict[str, torch.Tensor]()
        if self._momentum is not None and self._unsent is not None:
            found = {f"dgc/momentum/{index}": self._momentum, f"dgc/unsent/{index}": self._unsent}
        owed = self.place.exchange.residual(self._stream)
        return found | (owed.tensors(f"mean_residual/{index}") if owed is not None else {})

    def load(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        index = self.place.index
        if f"dgc/momentum/{index}" in tensors:
            self._momentum = tensors[f"dgc/momentum/{index}"].to(device, copy=True)
            self._unsent = tensors[f"dgc/unsent/{index}"].to(device, copy=True)
        if (kept := Residual.of(tensors, f"mean_residual/{index}")) is not None:
            self.place.exchange.restore_residual(self._stream, kept)
