"""What an exchange and a step should cost: small pure functions.

Units: seconds, bytes, and Mbit/s of payload in one direction (``rate``). ``a`` is the one-way latency.
:data:`LINE_SHARE` turns a line rate into a rate; measured rates are payload already.

Sources: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4
(reduce-scatter and all-gather); Li et al. 2020, "PyTorch Distributed", section 3.2 (overlap with backward); the figures
that were measured for this project are in docs/inside/performance.md and named where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed.planning.cluster import Cluster
from training.exchange.codecs import codec_by_name

LINE_SHARE = 0.952
"""Payload over line rate of wired TCP: 1448 of 1538 bytes of a frame and some acknowledgements; measured 0.94-0.952."""
MEMBER_MBIT = {"mesh": 13700.0, "nccl": 17000.0}
"""Payload, in and out together, that a member works through in a second of one core, sealing it where the engine does,
beside the codec's work (benchmarks/exchange_work.py). NCCL was never measured: it has what gloo takes in clear."""
OPERATION = {"mesh": 0.0003, "nccl": 0.0011}
"""Seconds of an exchange of nothing, by engine, where every process has a core (benchmarks/exchange_work.py)."""


def codec_seconds(parameters: int, codec: str, encoded: float, decoded: float) -> float:
    """Return the time of one core to encode ``encoded`` vectors and decode ``decoded`` ones."""
    encode, decode = codec_by_name(codec).nanoseconds
    return parameters * (encoded * encode + decoded * decode) * 1e-9


# ----------------------------------------------------------------------------------------------- one rate for all links


def turns_factor(members: int) -> float:
    """Return how much longer an exchange takes than its bytes need, as flows never share a link evenly: 1 with two
    members, 1.15 with four (benchmarks/exchange_links.py); straight between, 1.15 beyond."""
    return 1.0 + 0.075 * min(2, max(0, members - 2))


def transfer(size: float, rate: float) -> float:
    """Return the time of ``size`` bytes at ``rate`` Mbit/s."""
    return size * 8 / (rate * 1e6)


# --------------------------------------------------------------------------------------------- links as they really are

Flows = Mapping[tuple[str, str], float]
"""Bytes from one machine to another in one exchange."""


def star_flows(members: Sequence[str], owner: str, up: float, down: float) -> dict[tuple[str, str], float]:
    """Every member sends ``up`` bytes to the one that owns everything, and gets ``down`` bytes back.

    Args:
        members: the machine of each member; a machine may appear several times.
        owner: the owner's machine.
    """
    flows: dict[tuple[str, str], float] = {}
    for member in members:
        if member != owner:
            flows[member, owner] = flows.get((member, owner), 0.0) + up
            flows[owner, member] = flows.get((owner, member), 0.0) + down
    return flows


@dataclass(frozen=True)
class Bottleneck:
    """What takes longest in an exchange."""

    kind: str
    """``link``, ``interface``, ``air`` or ``member``; ``none`` where nothing is exchanged."""
    subject: str
    other: str
    mbit: float
    seconds: float


NOTHING = Bottleneck("none", "", "", 0.0, 0.0)


def parts_of(cluster: Cluster, flows: Flows) -> dict[tuple[str, ...], Bottleneck]:
    """Return how long every part of the network is busy with these flows, which run side by side.

    A link carries its two directions at once, so does a wired interface, which all flows of its machine share; a radio
    channel carries one byte at a time, and a byte between two of its stations twice.

    Args:
        flows: by names of machines; every pair has a usable link.
    """
    found: dict[tuple[str, ...], Bottleneck] = {}
    through: dict[tuple[str, str], float] = {}
    air: dict[str, float] = {}
    for (source, target), size in flows.items():
        link = cluster.link(source, target)
        if link is None:
            raise ValueError(f"no link from {source} to {target}")
        if cluster.narrows(link):
            found["link", source, target] = Bottleneck("link", source, target, link.mbit, transfer(size, link.mbit))
        for key in (("out", source), ("in", target)):
            through[key] = through.get(key, 0.0) + size
        if link.air:
            air[link.air] = air.get(link.air, 0.0) + size * cluster.crossings(link)
    for key, size in through.items():
        rate = cluster.interface(key[1])
        found[key] = Bottleneck("interface", key[1], "", rate, transfer(size, rate))
    for channel, size in air.items():
        rate = cluster.air_mbit(channel)
        found["air", channel] = Bottleneck("air", channel, "", rate, transfer(size, rate))
    return found


# ---------------------------------------------------------------------------------------------------------------- steps


def expected_last(means: Sequence[float], deviations: Sequence[float], steps: int = 1) -> float:
    """Return the mean time of a step where members wait for the last of them after so many steps: the mean of the
    largest of independent normal times.

    Clark 1961, "The greatest of a finite set of random variables": exact for two, one after the other for more.

    Args:
        means: seconds of a step, by member.
        deviations: standard deviations of single steps.
    """
    grown = ((steps * mean, math.sqrt(steps) * spread) for mean, spread in zip(means, deviations, strict=True))
    pairs = sorted(grown, reverse=True)
    mean, deviation = pairs[0]
    for other, spread in pairs[1:]:
        apart = math.hypot(deviation, spread)
        if apart == 0:
            continue
        x = (mean - other) / apart
        density, below = math.exp(-x * x / 2) / math.sqrt(2 * math.pi), (1 + math.erf(x / math.sqrt(2))) / 2
        first = mean * below + other * (1 - below) + apart * density
        second = (mean**2 + deviation**2) * below + (other**2 + spread**2) * (1 - below)
        second += (mean + other) * apart * density
        mean, deviation = first, math.sqrt(max(0.0, second - first**2))
    return mean / steps


# --------------------------------------------------------------------------------------------------------------- shares


def shares(total: int, overheads: Sequence[float], speeds: Sequence[float], caps: Sequence[int]) -> list[int] | None:
    """Split ``total`` samples so that all members finish together: ``b_i = v_i (t - o_i)``, whole, at least 1.

    Args:
        caps: the largest micro-batch that fits a member's memory.

    Returns:
        One batch a member, or ``None`` where ``total`` samples cannot be split so.
    """
    if total < len(speeds) or sum(caps) < total or min(caps, default=0) < 1 or min(speeds, default=0.0) <= 0:
        return None
    ideal = _level(total, overheads, speeds, caps)
    found = [max(1, math.floor(value + 1e-9)) for value in ideal]
    order = range(len(found))

    def finish(i: int, batch: int) -> float:
        return overheads[i] + batch / speeds[i]

    while sum(found) < total:
        chosen = min((i for i in order if found[i] < caps[i]), key=lambda i: (finish(i, found[i] + 1), i))
        found[chosen] += 1
    while sum(found) > total:
        chosen = max((i for i in order if found[i] > 1), key=lambda i: (finish(i, found[i]), i))
        found[chosen] -= 1
    return found


def _level(total: int, overheads: Sequence[float], speeds: Sequence[float], caps: Sequence[int]) -> list[float]:
    """Fill all members up to one finishing time, by bisection."""

    def at(moment: float) -> list[float]:
        return [
            min(float(cap), max(1.0, speed * (moment - overhead)))
            for overhead, speed, cap in zip(overheads, speeds, caps, strict=True)
        ]

    low, high = 0.0, max(overheads) + total / min(speeds)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) < total else (low, middle)
    return at(low)
