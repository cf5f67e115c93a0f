"""What the means of one stream are, by definition: what encoding one mean lost is added to the next."""

from __future__ import annotations

import torch

from training.exchange.base import weighted_mean
from training.exchange.codecs import codec_by_name, roundtrip


def contribution(rank: int, number: int, elements: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(100 * number + rank))


def stream_means(codec_name: str, elements: int, size: int, rounds: int) -> list[torch.Tensor]:
    """Return the means of a stream whose members contribute :func:`contribution` with equal weights."""
    codec, owed, means = codec_by_name(codec_name), torch.zeros(elements), []
    for number in range(rounds):
        decoded = [(1.0, roundtrip(codec, contribution(rank, number, elements))) for rank in range(size)]
        mean = weighted_mean(decoded)
        # A sparse reply has no room for what is owed where nobody sent anything; there it waits.
        now = owed * (mean != 0) if codec.reply.name == "sparse" else owed
        means.append(roundtrip(codec.reply, mean + now))
        owed = owed - now + (mean + now - means[-1])
    return means
