"""Who meets whom where means are those of a few members, new ones in every round.

It follows from the run's seed, the round, and who is there: everybody finds it out alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence


def shuffled(ranks: Sequence[int], seed: int, round_: int) -> list[int]:
    """Return ranks in the order of their hashes, which no version of anything changes."""
    return sorted(ranks, key=lambda rank: hashlib.sha256(f"{seed}/{round_}/{rank}".encode()).digest())


def islands(ranks: Sequence[int], size: int) -> list[list[int]]:
    """Cut ranks, in their order, into as few islands of at most ``size`` as there must be; 0: one of all."""
    count = math.ceil(len(ranks) / size) if size else 1
    return [list(ranks[len(ranks) * i // count : len(ranks) * (i + 1) // count]) for i in range(count)]
