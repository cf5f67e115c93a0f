"""What the hub makes of the contributions to one part of a round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from training.exchange import wire
from training.exchange.base import joined, weighted_mean
from training.exchange.codecs import codec_by_name
from training.exchange.error_feedback import MeanResiduals
from training.exchange.rounds import Closing
from training.exchange.wire import BytesChunk, MeanChunk, ResidualChunk, tensor_view

FP32 = codec_by_name("fp32")


@dataclass(frozen=True)
class Result:
    """Of one part."""

    frames: list[bytes] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    """Members whose contribution has no meaning, and why."""
    not_finite: list[int] = field(default_factory=list)
    """Members whose contribution held NaN or infinity, though they did not say so; it is not in the mean."""
    failure: str = ""


def averaged(closing: Closing, residuals: MeanResiduals) -> Result:
    """Average one chunk in rank order."""
    first: MeanChunk = closing.contributions[0][1].payload
    values: list[tuple[float, torch.Tensor]] = []
    contributors: list[int] = []
    result = Result()
    for rank, contribution in closing.contributions:
        try:
            numbers = contribution.payload.values()
        except ValueError as error:
            result.broken.append((rank, str(error)))
            continue
        sent, usual = len(contribution.payload.flags), len(first.flags)
        if sent != usual:
            result.broken.append((rank, f"{sent} bytes of flags where the others sent {usual}"))
            continue
        if contribution.payload.codec.carries(numbers):
            values.append((contribution.weight, numbers))
            contributors.append(rank)
        else:
            result.not_finite.append(rank)
    if not contributors and not result.not_finite:
        return result
    mean = weighted_mean(values) if values else torch.zeros(first.bounds[1] - first.bounds[0])
    codec = first.codec.reply
    try:
        payload = residuals.encode(
            first.stream, first.bounds[0], mean, codec, codec.encode_view, lambda data: codec.decode(data, mean.numel())
        )
    except ValueError as error:
        return replace(result, failure=f"has no mean: {error}")
    frames = {rank: contribution.payload for rank, contribution in closing.contributions}
    told = [rank for rank in contributors if frames[rank].refused]
    reply = replace(
        first,
        codec=codec,
        weight=sum(weight for weight, _ in values),
        payload=payload.numpy().data,
        contributors=tuple(contributors),
        members=closing.members,
        refused=tuple(sorted([*told, *result.not_finite])),
        flags=joined([frames[rank].flags for rank in contributors], len(first.flags)),
    )
    return replace(result, frames=[wire.pack(reply)])


def answered(frame: ResidualChunk, residuals: MeanResiduals) -> list[bytes]:
    """Take a chunk of a stream's residual back, or return the frame that tells it."""
    start, stop = frame.bounds
    if len(frame.payload):
        residuals.restore(frame.stream, start, FP32.decode(tensor_view(frame.payload), stop - start).clone())
        return []
    kept = residuals.part(frame.stream, start, stop)
    payload = wire.EMPTY if kept is None else FP32.encode(kept).numpy().data
    return [wire.pack(replace(frame, payload=payload))]


def gathered(closing: Closing) -> Result:
    """Frames with the payloads of all contributors."""
    contributors = tuple(rank for rank, _ in closing.contributions)
    frames = []
    for rank, contribution in closing.contributions:
        size = sum(len(piece) for piece in contribution.payload)
        for chunk, piece in enumerate(contribution.payload):
            frame = BytesChunk(closing.round.name, size, chunk, piece, rank, closing.members, contributors)
            frames.append(wire.pack(frame))
    return Result(frames)
