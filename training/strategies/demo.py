"""DeMo: the few largest DCT coefficients of each member's momentum are sent; the rest stays with the member.

Peng, Chen, Su, Quesnelle, Kingma and Liu 2024, "DeMo: Decoupled Momentum Optimization" (arXiv 2411.19870 v2), as in the
authors' code, github.com/bloc97/DeMo. In every step, for the momentum m of every tensor::

    m   <- beta m + lr g                         the member's own gradient
    q   <- top-k of DCT(m) in every chunk
    m   <- m - IDCT(q)                           what is not sent stays in the momentum
    Q   <- mean of q over its senders            all-gather of indices and values; index by index
    theta <- (1 - lr lambda) theta - lr sign(IDCT(Q))

It replaces the optimizer: :attr:`Demo.replaces_optimizer`. The paper's text has no ``lr`` in m, and sums q over all
members: in the few runs of docs/reference/strategies.md the loss ended no lower so, and higher in some. A gradient is
weighted by its samples, so that together members send the coefficients of the joint batch; a coefficient of zero does
not count as sent. ``max_grad_norm`` applies to each member's own gradient.

Chunks are ``chunk`` by ``chunk``, or as large as the tensor if that is smaller. A vector is one row, and a convolution
one row for every output; the last chunks of a row or column are padded with zeros, which are not updated. The transform
is an orthonormal DCT-II, as a matrix product. A chunk sends k coefficients, or all if it has fewer, with 16-bit
indices: ``k / chunk^2 (4 + 2) N`` bytes in fp32. What a codec rounds away stays in the momentum.

All members must compute the same signs on any processor:
:func:`~training.strategies.parts.cosine_transform.signs` sums integers only, which is exact in every order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from profiles.declarations import Section, option
from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, ExchangeError, Pending
from training.exchange.codecs import CastCodec, all_finite, codec_by_name
from training.exchange.staging import is_asynchronous, to_device, to_host
from training.lazy import nn, np, torch
from training.strategies.base import StrategyContext
from training.strategies.costs import Learning, OptionCosts, RunSpec, Start, SyncSchedule, merge_efficiency
from training.strategies.parts.cosine_transform import Chunks, signs
from training.strategies.parts.gradients import GradientStrategy
from training.strategies.registry import register

_GATHER_SIZE = 1 << 19
"""Coefficients in one gather: 3 MiB of indices and values of 32 bits."""
_INDEX_BYTES = 2
"""Bytes of an index on the wire."""
_TILE = 1 << 22
"""Elements that are transformed at the same time."""
_MAX_CHUNK = 256
"""Largest chunk: the sums of :func:`signs` stay below 2^53, and 16 bits index its elements."""
_LOSS: Mapping[Start, float] = {"pretrained": 0.010, "scratch": 0.075}
"""Loss over per-step averaging with AdamW, means of three seeds: ``benchmarks/strategies.py``, 240 steps. The paper,
with 300 M and 1 B parameters from scratch and thousands of steps, reports none (arXiv 2411.19870 v2)."""
_GAIN: Mapping[Start, float] = {"pretrained": 0.90, "scratch": 0.17}
"""Share of per-step averaging's gain over one machine, of the same runs."""


class DemoOptions(Section):
    """Options of :class:`Demo`."""

    chunk: int = option(64, "rows and columns of a block that is transformed by itself", ge=1, le=_MAX_CHUNK)
    topk: int = option(32, "coefficients that each block sends in a step", ge=1, le=_MAX_CHUNK**2)
    decay: float = option(0.999, "what is left of the momentum after a step", ge=0, lt=1)


class DemoCosts(OptionCosts[DemoOptions]):
    """Few coefficients in every step, from every member to all; for matrices much larger than a chunk, in fp32."""

    gathers = True
    codecs = ("fp32", "bf16")
    exact = False
    vectors = 1  # momentum
    merge_ns = 50.0  # of 1.3 M weights: transforms, top-k, and the inverse transform of the sum
    sources: ClassVar[Mapping[str, str]] = {
        "demo": "DeMo: own check, 0.9 M parameters, three seeds; in the paper at 1 B as AdamW (arXiv 2411.19870)"
    }

    def why_not_ranked(self, run: RunSpec) -> str:
        return "it is another optimizer, with a learning rate of its own"

    def elements(self, trainable: int) -> int:
        share = min(1.0, self._options.topk / self._options.chunk**2)
        return math.ceil(1.5 * share * trainable)  # an index takes half of a value

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        return Learning(merge_efficiency(effective_members, _GAIN[run.start]), _LOSS[run.start], ("demo",))


def _raw(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of values, flat; on their device if it copies asynchronously, else on the host."""
    return (values if is_asynchronous(values.device) else values.cpu()).view(torch.uint8).reshape(-1)


def _device_of_signs(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device  # MPS has no fp64


@register
class Demo(GradientStrategy):
    """Send the largest DCT coefficients of the momentum, and step by the sign of their mean."""

    name: ClassVar[str] = "demo"
    summary: ClassVar[str] = "few coefficients of each member's momentum in every step; an optimizer of signs itself"
    options = DemoOptions
    costs = DemoCosts(DemoOptions())
    replaces_optimizer: ClassVar[bool] = True

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._options = context.settings.of(DemoOptions)
        codec = codec_by_name(self.codec(context.settings))
        assert isinstance(codec, CastCodec), "it has no others"
        self._codec = codec
        self._weight = 0.0

    @classmethod
    def why_only_own_codecs(cls, settings: StrategySettings) -> str:
        return "is not for demo, which has chosen the few values that it sends"

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        return "with demo, whose momentum keeps what is not sent"

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._momenta = [torch.zeros_like(p, dtype=torch.float32).reshape(-1) for p in self._parameters]
        self._chunks = [Chunks.of(parameter.shape, self._options.chunk) for parameter in self._parameters]
        shapes = [parameter.shape for parameter in self._parameters]
        self._order = sorted(range(len(shapes)), key=lambda number: shapes.index(shapes[number]))  # on all members

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        if scale is not None:
            raise BadInput(f"{self.name} works without loss scaling", "set mixed_precision to bf16 or off")
        super().begin_step(step, weight, scale)
        self._weight = weight

    def gradients(self) -> None:
        """Set every gradient to the sign of the members' mean."""
        with torch.no_grad():
            if self._has_non_finite_gradient():
                self._weight = 0.0
            coded: Iterable[Any] = ((numbers, self._encoded(numbers)) for numbers in self._groups())
            if any(is_asynchronous(parameter.device) for parameter in self._parameters):
                coded = list(coded)  # so that the device has all its work before the host waits
            started = [(numbers, self._start_sending(numbers, *encoded)) for numbers, encoded in coded]
            for numbers, in_flight in started:
                self._apply_mean(numbers, in_flight)

    def _has_non_finite_gradient(self) -> bool:
        """Return whether one of this member's gradients is not finite, and count it; the step then has weight 0."""
        gradients = {p: p.grad for p in self._parameters if p.grad is not None and p.grad.numel()}
        norms = torch._foreach_norm(list(gradients.values()), math.inf) if gradients else ()
        largest: list[float] = (
            torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms]).tolist() if gradients else []
        )
        non_finite = next((self._name_of[p] for p, norm in zip(gradients, largest) if not math.isfinite(norm)), "")
        self._non_finite_counter.count(non_finite and f"step {self._step + 1}: the gradient of {non_finite}")
        return bool(non_finite)

    # ------------------------------------------------------------------------------------------------- sending

    def _count(self, number: int) -> int:
        """Return the number of coefficients that each chunk of a parameter sends."""
        return min(self._options.topk, self._chunks[number].size)

    def _groups(self) -> Iterator[list[int]]:
        """Yield groups of parameter numbers whose coefficients fill one gather, those of one shape side by side."""
        group, size = list[int](), 0
        for number in self._order:
            group.append(number)
            size += self._chunks[number].number * self._count(number)
            if size >= _GATHER_SIZE:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield those of a group of parameters that are transformed together: of one shape, on one device, and together
        at most :data:`_TILE` elements."""

        def kind(number: int) -> tuple[Any, ...]:
            parameter = self._parameters[number]
            return parameter.shape, parameter.device, parameter.dtype

        for _, alike in itertools.groupby(numbers, kind):
            batch = list(alike)
            step = max(1, _TILE // max(1, self._parameters[batch[0]].numel()))
            yield from (batch[start : start + step] for start in range(0, len(batch), step))

    def _encoded(self, numbers: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Extract the coefficients of some parameters from the momentum; return indices and values as bytes, which the
        device may still be computing."""
        extracted = [self._extracted(batch) for batch in self._batches(numbers) if self._chunks[batch[0]].number]
        return [indices for indices, _ in extracted], [values for _, values in extracted]

    def _start_sending(
        self, numbers: list[int], indices: list[torch.Tensor], values: list[torch.Tensor]
    ) -> list[Pending[dict[int, bytes]]]:
        """Start to send indices and values."""
        data = to_host([*indices, *values], torch.uint8).numpy()
        count, width, in_flight = sum(map(len, indices)) // _INDEX_BYTES, self._codec.max_encoded_bytes(1), []
        index_bytes, value_bytes = data[: _INDEX_BYTES * count], data[_INDEX_BYTES * count :]
        for start in range(0, count, _GATHER_SIZE):
            stop = start + _GATHER_SIZE
            piece = (
                index_bytes[_INDEX_BYTES * start : _INDEX_BYTES * stop].tobytes()
                + value_bytes[width * start : width * stop].tobytes()
            )
            in_flight.append(self._exchange.start_gather(f"demo/{self._step}/{numbers[0]}/{start}", piece))
        return in_flight

    def _extracted(self, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return indices and values of the coefficients that parameters of one shape send, chunk after chunk, as
        bytes."""
        momenta, chunks = [self._momenta[number] for number in batch], self._chunks[batch[0]]
        torch._foreach_mul_(momenta, self._options.decay)
        gradients = {number: self._parameters[number].grad for number in batch}
        flat = {number: one.reshape(-1).float() for number, one in gradients.items() if one is not None}
        if flat and self._weight > 0.0:
            share = self._weight * float(self._optimizer.param_groups[0]["lr"])
            torch._foreach_add_([self._momenta[number] for number in flat], list(flat.values()), alpha=share)
        stacked = momenta[0] if len(momenta) == 1 else torch.stack(momenta)
        coefficients = chunks.encoded(chunks.cut(stacked))
        indices = coefficients.abs().topk(self._count(batch[0]), dim=1).indices
        values = coefficients.gather(1, indices).to(self._codec.dtype)
        sent = torch.zeros_like(coefficients).scatter_(1, indices, values.float())
        decoded = chunks.joined(chunks.decoded(sent)).reshape(len(batch), -1)
        torch._foreach_sub_(momenta, list(decoded.unbind()))
        return _raw(indices.to(torch.int16)), _raw(values)

    # ---------------------------------------------------------------------------------------------- receiving

    def _apply_mean(self, numbers: Sequence[int], in_flight: Sequence[Pending[dict[int, bytes]]]) -> None:
        """Set the gradients of a group of parameters to the sign of the mean."""
        payloads = [pending.wait() for pending in in_flight]
        if payloads:
            self._members = tuple(sorted(payloads[-1]))
        counts = {number: self._chunks[number].number * self._count(number) for number in numbers}
        device = _device_of_signs(self._parameters[numbers[0]].device)
        coefficients = [
            (to_device(indices, device), to_device(values, device))
            for indices, values in self._decoded(payloads, sum(counts.values()))
        ]
        offset = 0
        for batch in self._batches(numbers):
            end = offset + sum(counts[number] for number in batch)
            self._set_gradients(batch, [(indices[offset:end], values[offset:end]) for indices, values in coefficients])
            offset = end

    def _set_gradients(self, batch: Sequence[int], coefficients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set the gradients of parameters of one shape to the signs of the members' mean."""
        parameters = [self._parameters[number] for number in batch]
        shape, like = (len(batch), *parameters[0].shape), parameters[0]
        update = self._update(batch, coefficients) if like.numel() else torch.zeros(shape)
        for parameter, gradient in zip(parameters, update.reshape(shape).to(like.device, like.dtype), strict=True):
            parameter.grad = gradient

    def _decoded(self, payloads: Sequence[Mapping[int, bytes]], count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return indices and values of all members in rank order, with zeros for missing ones.

        Raises:
            ExchangeError: a member sent malformed data.
        """
        coefficients = []
        width = self._codec.max_encoded_bytes(1)
        for rank in sorted({rank for piece in payloads for rank in piece}):
            indices, values = torch.zeros(count, dtype=torch.int64), torch.zeros(count)
            for start, piece in zip(range(0, count, _GATHER_SIZE), payloads, strict=True):
                chunk_count = min(_GATHER_SIZE, count - start)
                data = piece.get(rank, bytes((2 + width) * chunk_count))
                if len(data) != (2 + width) * chunk_count:
                    raise ExchangeError(
                        f"member {rank} sent {len(data)} bytes of coefficients, not {(2 + width) * chunk_count}"
                    )
                indices[start : start + chunk_count] = torch.from_numpy(
                    np.frombuffer(data, "<u2", chunk_count).astype(np.int64)
                )
                value_bytes = torch.frombuffer(bytearray(data[2 * chunk_count :]), dtype=torch.uint8)
                values[start : start + chunk_count] = self._codec.decode(value_bytes, chunk_count)
            if not all_finite(values):
                raise ExchangeError(f"member {rank} sent coefficients that are not finite")
            coefficients.append((indices, values))
        return coefficients

    def _update(self, batch: Sequence[int], coefficients: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the signs of the members' mean for parameters of one shape: [parameters, rows, columns] as in
        :class:`Chunks`."""
        chunks, count = self._chunks[batch[0]], self._count(batch[0])
        device = _device_of_signs(self._parameters[batch[0]].device)
        chunk_signs, step, number = [], max(1, _TILE // chunks.size), len(batch) * chunks.number
        for first_chunk in range(0, number, step):
            rows = min(step, number - first_chunk)
            total = torch.zeros(rows, chunks.size, device=device)
            senders = torch.zeros_like(total)
            for indices, values in coefficients:  # a member's indices are distinct, so sums are in rank order
                span = slice(first_chunk * count, (first_chunk + rows) * count)
                row_indices = indices[span].view(rows, count).clamp(max=chunks.size - 1).to(device)
                sent = values[span].view(rows, count).to(device)
                total.scatter_add_(1, row_indices, sent)
                senders.scatter_add_(1, row_indices, (sent != 0.0).float())  # zeros: a member without samples
            # Processors agree on quotients in fp64, but not on those in fp32.
            chunk_signs.append(signs(total.double() / senders.clamp(min=1.0), chunks.height, chunks.width))
        return chunks.joined(torch.cat(chunk_signs) if len(chunk_signs) > 1 else chunk_signs[0])

    # ------------------------------------------------------------------------------------------------ between steps

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"momentum/{number}": momentum for number, momentum in enumerate(self._momenta)}

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        for number, momentum in enumerate(self._momenta):
            if f"momentum/{number}" in tensors:
                momentum.copy_(tensors[f"momentum/{number}"])
