"""Trainable parameters as one flat fp32 vector, and what members do when values are not finite or not equal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from profiles.errors import BadInput, RunFailed
from profiles.quantities import figure_text
from training.exchange.base import Exchange, ExchangeError, MeanResult
from training.exchange.codecs import Codec, all_finite, codec_by_name
from training.exchange.mean.broadcast import broadcast
from training.exchange.staging import (
    common_async_device,
    device_accessible,
    is_asynchronous,
    to_host,
    wait_for_device,
)
from training.lazy import lazy, nn, torch

if TYPE_CHECKING:
    import xxhash
else:
    xxhash = lazy("xxhash")


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters, each once, in the model's order."""
    return [p for p in model.parameters() if p.requires_grad]


def refuse_unsuitable(model: nn.Module) -> None:
    """Reject a model with trained weights that members cannot exchange, or with weights that are not there yet.

    Raises:
        BadInput: there is one.
    """
    for name, weights in model.named_parameters():
        if isinstance(weights, torch.nn.parameter.UninitializedParameter):
            raise BadInput(f"{name} of the model has no shape yet", "call the model with a batch before you give it")
        if weights.requires_grad and weights.is_complex():
            raise BadInput(f"{name} of the model is complex", "train real weights: torch.view_as_complex(weights)")
        if weights.is_meta:
            raise BadInput(f"{name} of the model has no values: it is on the meta device", "load or initialise them")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise BadInput(f"the gradients of {name or 'the embedding'} are sparse", "leave out sparse=True")


def flatten(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> torch.Tensor:
    """Concatenate tensors to a new flat fp32 vector on ``device`` (default: the tensors' own)."""
    if device is not None and device.type == "cpu":
        return to_host(list(tensors), torch.float32)
    pieces = [t.detach().reshape(-1).to(device=device, dtype=torch.float32) for t in tensors]
    return torch.cat(pieces) if pieces else torch.empty(0)


def unflatten_into(parameters: Sequence[torch.Tensor], values: torch.Tensor) -> None:
    """Copy a flat vector back into the tensors that it was made of."""
    original = values
    if not parameters:
        return
    values = device_accessible(values, parameters[0].device)
    with torch.no_grad():
        pieces = torch.split(values, [parameter.numel() for parameter in parameters])
        views = [piece.view_as(parameter) for piece, parameter in zip(pieces, parameters, strict=True)]
        if is_asynchronous(values.device):
            torch._foreach_copy_(list(parameters), views)
            return
        for parameter, view in zip(parameters, views, strict=True):
            parameter.copy_(view, non_blocking=is_asynchronous(parameter.device))
    if values is original and values.device.type == "cpu":  # the caller may overwrite it as soon as this returns
        for device in {parameter.device for parameter in parameters}:
            wait_for_device(device)


class Differences(NamedTuple):
    """How a member's flat vector differs from a mean; names as in :class:`~training.records.events.SyncEvent`."""

    drift: float
    delta_norm: float
    correlation: float | None
    """``None``: one of the two is constant."""


NOT_COMPARED = (None, None, None)
_TILE = 65_536
"""Elements that stay in a processor's cache while they are read several times."""
_TILE_OF_A_DEVICE = 1 << 22
"""The same for a device, where each tile costs several kernel launches."""


def differences(values: torch.Tensor, mean: torch.Tensor, out: torch.Tensor | None = None) -> Differences:
    """Compare flat vectors; ``out`` takes their difference and may be ``values``.

    The correlation is from ``2 cov(a, b) = var(a) + var(b) - var(a - b)``, exact if the two are nearly equal.
    """
    if not values.numel():
        return Differences(0.0, 0.0, None)
    tile = _TILE if values.device.type == "cpu" else _TILE_OF_A_DEVICE
    queued: list[torch.Tensor] = []
    for start in range(0, values.numel(), tile):
        pair = values[start : start + tile], mean[start : start + tile]
        difference = pair[0] - pair[1]
        numbers = [number for vector in (*pair, difference) for number in (torch.dot(vector, vector), vector.sum())]
        queued.append(torch.stack([*numbers, *torch.aminmax(difference)]))
        if out is not None:
            out[start : start + tile] = difference
    tiles = torch.stack(queued).tolist()
    squares, totals = ([sum(row[first + 2 * n] for row in tiles) for n in range(3)] for first in (0, 1))
    farthest = max(abs(end) for row in tiles for end in row[6:])
    variance, mean_variance, difference_variance = (
        s - total * total / values.numel() for s, total in zip(squares, totals, strict=True)
    )
    scale = math.sqrt(max(0.0, variance) * max(0.0, mean_variance))
    correlation = min(1.0, max(-1.0, (variance + mean_variance - difference_variance) / (2 * scale))) if scale else None
    return Differences(farthest, math.sqrt(squares[2]), correlation)


def mean_of_all(values: torch.Tensor, exchange: Exchange, name: str) -> MeanResult:
    """Return the plain mean of all members' flat vectors, or ``values`` if no member contributed."""
    result = exchange.mean(name, values, 1.0, codec_by_name("fp32"))
    return result if result.weight else replace(result, mean=values)


@contextmanager
def holding_mean(parameters: Sequence[torch.Tensor], exchange: Exchange, name: str) -> Iterator[None]:
    """Hold the plain mean of all members in ``parameters``, and restore this member's values afterwards.

    A collective: all members enter it together.
    """
    weights = flatten(parameters, torch.device("cpu"))
    wide = [(parameter, parameter.detach().clone()) for parameter in parameters if parameter.dtype == torch.float64]
    unflatten_into(parameters, mean_of_all(weights, exchange, name).mean)
    try:
        yield
    finally:
        unflatten_into(parameters, weights)
        with torch.no_grad():
            for parameter, value in wide:  # of which the vector has 32 bits
                parameter.copy_(value)


_ROW = 1024
"""Numbers of 64 bits that are added for a hash: two values of a row that change places go unseen."""


def weight_hash(*tensors: torch.Tensor) -> str:
    """Return 16 hex digits that detect differences of tensors and resist no attack: XXH3 over the sums of rows of the
    bits of their values in fp32. A device that works asynchronously adds them up, so that little is copied to the
    host."""
    sums = [part for tensor in tensors for part in _row_sums(tensor.detach())]
    if common_async_device(sums) is not None:
        sums = [torch.cat(sums)]
    return xxhash.xxh3_64_hexdigest(to_host(sums, torch.int64).numpy().data)


def _row_sums(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of the whole rows, and of the rest, where the values are."""
    values = values.to(torch.float32).reshape(-1).contiguous()
    if not is_asynchronous(values.device):
        values = values.to("cpu")
    if values.storage_offset() % 2:  # no number of 64 bits begins there
        values = values.clone()
    even = values.numel() // 2 * 2
    bits = values[:even].view(torch.int64)
    whole = bits.numel() // _ROW * _ROW
    rest = bits[whole:].sum().view(1)
    if even < values.numel():
        rest += values[even:].view(torch.int32).to(torch.int64) & 0xFFFF_FFFF
    return bits[:whole].view(-1, _ROW).sum(1), rest


MAX_NON_FINITE = 3
"""After this many contributions in a row that are not finite the member leaves the run."""
MAX_OVERFLOWS = 32
"""The same under loss scaling, where some are normal: after so many halvings a scale of 65,536 is used up."""


class NonFiniteCounter:
    """Counts consecutive contributions of this member that are not finite.

    Args:
        warn: called with one line for each.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._count = 0

    def count(self, problem: str, scaled: bool = False) -> None:
        """Count one contribution.

        Args:
            problem: names what is not finite, for the message; empty: everything is finite.
            scaled: whether loss scaling is on, under which an overflow is normal and not reported.

        Raises:
            RunFailed: there were too many in a row.
        """
        self._count = self._count + 1 if problem else 0
        if not problem:
            return
        if self._count == (MAX_OVERFLOWS if scaled else MAX_NON_FINITE):
            raise RunFailed(
                f"{problem} is not finite on this machine, {self._count} times in a row",
                "lower learning_rate, set max_grad_norm = 1, or mixed_precision = off",
            )
        if not scaled:
            self._warn(f"{problem} is not finite on this machine; the others continue without this contribution")


def non_finite_parameter(
    names: Sequence[str], parameters: Sequence[torch.Tensor], flat: torch.Tensor, codec: Codec
) -> str:
    """Return the name of the first of ``parameters``, concatenated in ``flat``, that ``codec`` cannot encode."""
    offset = 0
    for name, parameter in zip(names, parameters, strict=True):
        if not codec.carries(flat[offset : offset + parameter.numel()]):
            return name
        offset += parameter.numel()
    return "a parameter"


def majority(hashes: Mapping[int, bytes]) -> int:
    """Return the lowest rank among the members with the most frequent hash; if all differ, the lowest rank."""
    votes = Counter(hashes.values())
    return min(hashes, key=lambda rank: (-votes[hashes[rank]], rank))


def broadcast_from(source: int, flat: torch.Tensor, exchange: Exchange, name: str) -> tuple[torch.Tensor, float]:
    """Return member ``source``'s flat fp32 vector, bit for bit, and the largest distance of any member from it.

    A collective: all members call it together.

    Raises:
        ExchangeError: the member sends a vector of another size, or values that are not finite.
    """
    values = flat.detach().to("cpu", torch.float32).contiguous()
    own_data = values.numpy().tobytes()
    data = broadcast(exchange, name, own_data, source, len(own_data))
    if len(data) != len(own_data):
        raise ExchangeError(f"member {source} sent another '{name}' than the others hold")
    source_values = torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
    if not all_finite(source_values):
        raise ExchangeError(f"member {source} handed over '{name}' with values that are not finite")
    largest = torch.finfo(torch.float32).max
    distance = torch.nan_to_num((source_values - values).abs(), nan=largest, posinf=largest)
    drift = float(distance.max()) if distance.numel() else 0.0
    drifts = exchange.gather(f"{name}/drift", repr(drift).encode())
    return source_values.to(flat.device), max([drift, *map(_distance, drifts.values())])


def sync_weights(parameters: Sequence[torch.Tensor], exchange: Exchange, name: str) -> tuple[str, float, int | None]:
    """Make all members hold the weights of the majority, else of the lowest rank; sent only if hashes differ.

    Returns:
        Their hash, the largest difference between members, and the rank they were taken from (``None``: all agreed).
    """
    digest = weight_hash(*parameters)
    hashes = exchange.gather(name, digest.encode())
    if len(set(hashes.values())) == 1:
        return digest, 0.0, None
    source = majority(hashes)
    flat, drift = broadcast_from(source, flatten(parameters, torch.device("cpu")), exchange, f"{name}/mend")
    unflatten_into(parameters, flat)
    return weight_hash(*parameters), drift, source


def _distance(report: bytes) -> float:
    """Parse the distance that a member reports; 0 if it is malformed."""
    try:
        value = float(report)
    except ValueError:
        return 0.0
    return value if 0.0 <= value <= torch.finfo(torch.float32).max else 0.0


def difference_warning(drift: float, source: int) -> str:
    """Return the warning for weights that differed and were replaced by :func:`broadcast_from`."""
    return f"weights differed by up to {figure_text(drift)} between the members and were set to member {source}'s"


def agreement_flags(digest: str) -> bytes:
    """Return a hash's bits and their inverse: combined by "or" over the members they show whether all were equal."""
    bits = bytes.fromhex(digest)
    return bits + bytes(255 - byte for byte in bits)


def hashes_differ(flags: bytes) -> bool:
    """Return whether combined :func:`agreement_flags` come from different hashes."""
    half = len(flags) // 2
    return any(map(int.__and__, flags[:half], flags[half:]))
