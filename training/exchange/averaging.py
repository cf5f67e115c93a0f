"""What the hub makes of the contributions to one part of a round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from training.exchange import wire
from training.exchange.base import weighted_mean
from training.exchange.rounds import Closing
from training.exchange.wire import BytesChunk, MeanChunk


@dataclass(frozen=True)
class Result:
    """Of one part."""

    frames: list[bytes] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    """Members whose contribution has no meaning, and why."""
    failure: str = ""


def averaged(closing: Closing) -> Result:
    """Average one chunk in rank order."""
    values: list[tuple[float, torch.Tensor]] = []
    contributors: list[int] = []
    broken: list[tuple[int, str]] = []
    for rank, contribution in closing.contributions:
        try:
            values.append((contribution.weight, contribution.payload.values()))
            contributors.append(rank)
        except ValueError as error:
            broken.append((rank, str(error)))
    if not values:
        return Result(broken=broken)
    first: MeanChunk = closing.contributions[0][1].payload
    try:
        payload = first.codec.reply.encode_view(weighted_mean(values))
    except ValueError as error:
        return Result(broken=broken, failure=f"has no mean: {error}")
    mean = replace(
        first,
        codec=first.codec.reply,
        weight=sum(weight for weight, _ in values),
        payload=payload.numpy().data,
        contributors=tuple(contributors),
        members=closing.members,
    )
    return Result([wire.pack_mean(mean)], broken)


def gathered(closing: Closing) -> Result:
    """Frames with the payloads of all contributors."""
    contributors = tuple(rank for rank, _ in closing.contributions)
    frames = []
    for rank, contribution in closing.contributions:
        for chunk, piece in enumerate(contribution.payload):
            frame = BytesChunk(closing.round.name, contribution.size, chunk, piece, rank, closing.members, contributors)
            frames.append(wire.pack_bytes(frame))
    return Result(frames)
