"""Predicted times of exchanges and steps: small pure functions.

Units: seconds, bytes, and Mbit/s of payload in one direction (``rate``). ``a`` is the one-way latency.
:data:`LINE_SHARE` converts a line rate to a rate of payload, which measured rates are already.

Sources: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4
(reduce-scatter and all-gather); Li et al. 2020, "PyTorch Distributed", section 3.2 (overlap with backward); figures
measured for this project are in docs/inside/performance.md and named where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed.planning.documents.cluster import Cluster
from training.exchange.codecs import codec_by_name

LINE_SHARE = 0.952
"""Payload over line rate of wired TCP: 1448 of 1538 bytes of a frame and some acknowledgements; measured 0.94-0.952."""
MEMBER_MBIT = {"mesh": 13700.0, "nccl": 17000.0}
"""Payload, sent and received together, that a member processes per second of one core, with encryption if the engine
has it and without the codec (benchmarks/exchange_work.py). NCCL was not measured; its figure is that of gloo."""
OPERATION_SECONDS = {"mesh": 0.0003, "nccl": 0.0011}
"""Time of an empty exchange, by engine, if every process has a core (benchmarks/exchange_work.py)."""


def codec_seconds(parameters: int, codec: str, encoded: float, decoded: float) -> float:
    """Return the time in which one core encodes ``encoded`` vectors and decodes ``decoded`` ones."""
    encode, decode = codec_by_name(codec).nanoseconds
    return parameters * (encoded * encode + decoded * decode) * 1e-9


# ----------------------------------------------------------------------------------------------- one rate for all links


def contention_factor(members: int) -> float:
    """Return the time of an exchange over that of its bytes alone, since flows do not share a link evenly: 1 with two
    members, 1.15 with four and more (benchmarks/exchange_links.py), linear in between."""
    return 1.0 + 0.075 * min(2, max(0, members - 2))


def transfer_seconds(size: float, rate: float) -> float:
    """Return the time of ``size`` bytes at ``rate`` Mbit/s."""
    return size * 8 / (rate * 1e6)


# ------------------------------------------------------------------------------------------------------ links and flows

Flows = Mapping[tuple[str, str], float]
"""Bytes from one machine to another in one exchange."""


def star_flows(members: Sequence[str], owner: str, up: float, down: float) -> dict[tuple[str, str], float]:
    """Return the flows of an exchange in which each member sends ``up`` bytes to the owner and gets ``down`` back.

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
    """A resource that an exchange uses, and for how long."""

    kind: str
    """``link``, ``interface``, ``air`` or ``member``; ``none`` if nothing is exchanged."""
    subject: str
    peer: str
    """Machine at the other end of a link; else empty."""
    mbit: float
    seconds: float


NO_BOTTLENECK = Bottleneck("none", "", "", 0.0, 0.0)


def bottlenecks_of(cluster: Cluster, flows: Flows) -> dict[tuple[str, ...], Bottleneck]:
    """Return for how long each resource of the network is busy with these flows, which run at the same time.

    A link carries both directions at once, and so does a wired interface, which all flows of its machine share; a radio
    channel carries one byte at a time, and a byte between two of its stations twice.

    Args:
        flows: by names of machines; every pair has a usable link.
    """
    bottlenecks: dict[tuple[str, ...], Bottleneck] = {}
    interface_bytes: dict[tuple[str, str], float] = {}
    air_bytes: dict[str, float] = {}
    for (source, target), size in flows.items():
        link = cluster.link(source, target)
        if link is None:
            raise ValueError(f"no link from {source} to {target}")
        if cluster.can_be_bottleneck(link):
            bottlenecks["link", source, target] = Bottleneck(
                "link", source, target, link.mbit, transfer_seconds(size, link.mbit)
            )
        for interface in (("out", source), ("in", target)):
            interface_bytes[interface] = interface_bytes.get(interface, 0.0) + size
        if link.air:
            air_bytes[link.air] = air_bytes.get(link.air, 0.0) + size * cluster.crossings(link)
    for interface, size in interface_bytes.items():
        rate = cluster.interface(interface[1])
        bottlenecks[interface] = Bottleneck("interface", interface[1], "", rate, transfer_seconds(size, rate))
    for channel, size in air_bytes.items():
        rate = cluster.air_mbit(channel)
        bottlenecks["air", channel] = Bottleneck("air", channel, "", rate, transfer_seconds(size, rate))
    return bottlenecks


# ---------------------------------------------------------------------------------------------------------------- steps


def evaluation_seconds(samples: int, batches: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the time in which members evaluate samples that are divided among them by their batches.

    Args:
        seconds: for each member, those of one sample; 0: unknown.

    Returns:
        0 if the time of any member is unknown.
    """
    if not all(seconds):
        return 0.0
    return samples * max(batch * each for batch, each in zip(batches, seconds, strict=True)) / sum(batches)


def expected_slowest(means: Sequence[float], deviations: Sequence[float], steps: int = 1) -> float:
    """Return the mean time of a step if the members wait for the slowest every ``steps`` steps: the expected maximum of
    independent normal times.

    Clark 1961, "The greatest of a finite set of random variables": exact for two, applied pair by pair to more.

    Args:
        means: seconds of a step, by member.
        deviations: standard deviations of single steps.
        steps: steps between two waits.
    """
    sums = ((steps * mean, math.sqrt(steps) * spread) for mean, spread in zip(means, deviations, strict=True))
    slowest_first = sorted(sums, reverse=True)
    mean, deviation = slowest_first[0]
    for next_mean, next_deviation in slowest_first[1:]:
        a = math.hypot(deviation, next_deviation)  # Clark's names: deviation of the difference, and alpha
        if a == 0:
            continue
        alpha = (mean - next_mean) / a
        density, below = math.exp(-alpha * alpha / 2) / math.sqrt(2 * math.pi), (1 + math.erf(alpha / math.sqrt(2))) / 2
        moment = mean * below + next_mean * (1 - below) + a * density
        second_moment = (mean**2 + deviation**2) * below + (next_mean**2 + next_deviation**2) * (1 - below)
        second_moment += (mean + next_mean) * a * density
        mean, deviation = moment, math.sqrt(max(0.0, second_moment - moment**2))
    return mean / steps


# --------------------------------------------------------------------------------------------------------------- shares


def split_samples(
    total: int, overheads: Sequence[float], speeds: Sequence[float], caps: Sequence[int]
) -> list[int] | None:
    """Split ``total`` samples so that all members finish together: ``b_i = v_i (t - o_i)``, rounded, at least 1.

    Args:
        overheads: ``o_i``, seconds of a micro-batch that do not depend on its size.
        speeds: ``v_i``, samples per second.
        caps: the largest micro-batch that fits a member's memory.

    Returns:
        The batch of each member, or ``None`` if ``total`` samples cannot be split within the caps.
    """
    if total < len(speeds) or sum(caps) < total or min(caps, default=0) < 1 or min(speeds, default=0.0) <= 0:
        return None
    ideal = _level(total, overheads, speeds, caps)
    batches = [max(1, math.floor(value + 1e-9)) for value in ideal]
    order = range(len(batches))

    def finish(i: int, batch: int) -> float:
        return overheads[i] + batch / speeds[i]

    while sum(batches) < total:
        chosen = min((i for i in order if batches[i] < caps[i]), key=lambda i: (finish(i, batches[i] + 1), i))
        batches[chosen] += 1
    while sum(batches) > total:
        chosen = max((i for i in order if batches[i] > 1), key=lambda i: (finish(i, batches[i]), i))
        batches[chosen] -= 1
    return batches


def _level(total: int, overheads: Sequence[float], speeds: Sequence[float], caps: Sequence[int]) -> list[float]:
    """Return the batches with which all members finish at the same time, not rounded; by bisection."""

    def fill(finish: float) -> list[float]:
        return [
            min(float(cap), max(1.0, speed * (finish - overhead)))
            for overhead, speed, cap in zip(overheads, speeds, caps, strict=True)
        ]

    low, high = 0.0, max(overheads) + total / min(speeds)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(fill(middle)) < total else (low, middle)
    return fill(low)
