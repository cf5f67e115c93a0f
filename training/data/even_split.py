"""Whole samples for members of unequal speed."""

from __future__ import annotations

import math
from collections.abc import Mapping

_NONE: Mapping[int, float] = {}


def longest(sizes: Mapping[int, int], seconds: Mapping[int, float], fixed: Mapping[int, float] = _NONE) -> float:
    """Return the seconds until the last member has computed its samples; see :func:`split_evenly`."""
    return max(fixed.get(rank, 0.0) + size * seconds[rank] for rank, size in sizes.items())


def split_evenly(total: int, seconds: Mapping[int, float], fixed: Mapping[int, float] = _NONE) -> dict[int, int]:
    """Split ``total`` samples, at least one each, so that the last member is done as early as possible.

    Args:
        seconds: that each member computes for a sample, by rank.
        fixed: seconds beside those for its samples, by rank.
    """
    offsets = {rank: fixed.get(rank, 0.0) for rank in seconds}
    samples_by_then = math.fsum(offsets[rank] / value for rank, value in seconds.items())
    end = (total + samples_by_then) / math.fsum(1 / value for value in seconds.values())
    sizes = {rank: max(1, math.floor((end - offsets[rank]) / value)) for rank, value in seconds.items()}
    while sum(sizes.values()) < total:
        sizes[min(sizes, key=lambda rank: (offsets[rank] + (sizes[rank] + 1) * seconds[rank], rank))] += 1
    while sum(sizes.values()) > total:
        large = [rank for rank, size in sizes.items() if size > 1]
        sizes[max(large, key=lambda rank: (offsets[rank] + sizes[rank] * seconds[rank], rank))] -= 1
    return sizes
