"""Machines whose measured steps differ by no more than what the measurements leave open count as equally fast."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from distributed.planning.cluster import Cluster, Machine, Measurement

_ERRORS = 2.0
"""Standard errors of a difference within which there is none: 95 of 100 equal machines are."""
_LEAST_ERROR = 0.01
"""Of every measurement, as a share: the next minute of the same machine differs by as much."""


def evened(cluster: Cluster) -> Cluster:
    """Return the cluster with the mean of their measurements for machines that are alike.

    Only such as were measured at the same batch sizes are compared, at the largest; one whose error is not known is
    taken as it is.
    """
    equal: dict[str, tuple[Measurement, ...]] = {}
    for group in _groups(cluster.machines):
        for each in group:
            equal[each.name] = _mean(group, each)
    if not equal:
        return cluster
    machines = tuple(one.measured_as(equal.get(one.name, one.measurements)) for one in cluster.machines)
    return Cluster(machines=machines, links=cluster.links, here=cluster.here)


def _groups(machines: Sequence[Machine]) -> Iterator[list[Machine]]:
    """Yield the groups of two and more machines none of which differs from the fastest of its group."""
    known = [one for one in machines if one.measurements and all(m.error for m in one.measurements)]
    group: list[Machine] = []
    for one in sorted(known, key=lambda one: (_batches(one), _largest(one).seconds, one.name)):
        if group and _batches(one) == _batches(group[0]) and _alike(_largest(one), _largest(group[0])):
            group.append(one)
            continue
        if len(group) > 1:
            yield group
        group = [one]
    if len(group) > 1:
        yield group


def _batches(machine: Machine) -> tuple[int, ...]:
    return tuple(sorted(one.batch for one in machine.measurements))


def _largest(machine: Machine) -> Measurement:
    return max(machine.measurements, key=lambda one: one.batch)


def _alike(one: Measurement, other: Measurement) -> bool:
    errors = (max(each.error, _LEAST_ERROR * each.seconds) for each in (one, other))
    return abs(one.seconds - other.seconds) <= _ERRORS * math.hypot(*errors)


def _mean(group: Sequence[Machine], machine: Machine) -> tuple[Measurement, ...]:
    """Return the machine's measurements with the group's mean times; what else was measured there stays."""
    times: dict[int, list[float]] = {}
    for each in group:
        for one in each.measurements:
            times.setdefault(one.batch, []).append(one.seconds)
    means = {batch: sum(found) / len(found) for batch, found in times.items()}
    return tuple(one.model_copy(update={"seconds": means[one.batch]}) for one in machine.measurements)
