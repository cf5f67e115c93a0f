"""What a step should cost: the formulas that the measurements are put beside.

Times in seconds, payloads in bytes, line rates in Mbit/s of each link in each direction. A wired link carries
:data:`LINE_SHARE` of its rate as payload of TCP.
"""

from __future__ import annotations

LINE_SHARE = 0.952
"""Payload over line rate: 1448 of 1538 bytes of an Ethernet frame, with a little for acknowledgements; measured."""
BYTES_PER_WEIGHT = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.03125, "mxfp4": 0.53125}
"""Payload of one weight, scales of the blocks of 32 included."""
OVERLAP = 0.4
"""Share of a step's compute that hides per-step exchange: backward is two thirds of it, and the last gradients of
backward cannot hide. Measured with DDP and buckets of 25 MB."""


def payload(weights: int, codec: str) -> float:
    """Return the bytes of one encoded vector of ``weights``."""
    return weights * BYTES_PER_WEIGHT[codec]


def bytes_per_second(mbit: float) -> float:
    """Return the payload a link of this rate carries in one direction."""
    return mbit * 1e6 / 8 * LINE_SHARE


def ring(size: float, members: int, mbit: float, latency: float = 0.0, pieces: int = 1) -> float:
    """Return the time of a ring all-reduce of ``size`` bytes in ``pieces`` buckets.

    The same for a reduce-scatter and all-gather by owner, which has ``2 latency`` in place of the ring's chain.
    """
    chain = 2 * (members - 1) * latency * pieces
    return 2 * (members - 1) / members * size / bytes_per_second(mbit) + chain


def star(size: float, mbit: float, latency: float = 0.0, hub_streams: int = 1) -> float:
    """Return the time of an exchange over a hub, where up and down overlap chunk by chunk.

    ``hub_streams``: how many members' payloads cross one link of this rate. 1 where the hub has a faster link than the
    members and is on none of their machines; ``n - 1`` where it is one of the ``n`` machines.
    """
    return hub_streams * size / bytes_per_second(mbit) + 2 * latency


def per_step(compute: float, exchange: float, overlap: float = OVERLAP) -> float:
    """Return the time of a step that exchanges gradients, part of it hidden behind backward."""
    return compute + max(0.0, exchange - overlap * compute)


def periodic(compute: float, exchange: float, interval: int) -> float:
    """Return the mean time of a step where training stands still for one exchange every ``interval`` steps."""
    return compute + exchange / interval
