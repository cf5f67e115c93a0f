"""What the measurements in the lab are put beside: the product's cost formulas on links that are all alike.

Times in seconds, payloads in bytes, line rates in Mbit/s of each link in each direction. No cost of processors is in
them: what is missing to a measurement is what the machine, not the network, adds.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed.planning.cost_model import LINE_SHARE, transfer_seconds
from training.exchange.codecs import codec_by_name
from training.strategies.allreduce import OVERLAP


def payload_bytes(parameters: int, codec: str) -> float:
    """Return the encoded size of a vector, as its codec states it."""
    return codec_by_name(codec).expected_bytes(parameters)


def ring(size: float, members: int, mbit: float) -> float:
    """Return the time of an exchange in which every member sends ``2 (n-1)/n`` of ``size``: a ring, or by owner."""
    return transfer_seconds(2 * (members - 1) / members * size, mbit * LINE_SHARE)


def per_step(compute: float, exchange: float) -> float:
    """Return the time of a step that exchanges gradients, as much of it hidden as DDP was measured to hide."""
    return compute + max(0.0, exchange - OVERLAP * compute)


def periodic_step(compute: float, exchange: float, interval: int) -> float:
    """Return the mean time of a step with an exchange every ``interval`` steps."""
    return compute + exchange / interval
