"""What measured figures are corrected by before they predict anything. Pure.

Machines whose steps differ by no more than what the measurements leave open count as equally fast; and how far off
earlier predictions for these machines were gives factors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from pydantic import Field

from distributed.planning.cluster import Cluster, ClusterMachine, Document, Measurement, Name, Text

BOUND = 3.0
"""No factor is larger, nor smaller than its inverse: a run that was disturbed must not rule the next plan."""
PRIOR = 1.0
"""So many observations of "it was as predicted" are added to every history."""

Factor = Annotated[float, Field(ge=1 / BOUND, le=BOUND)]


def bounded(ratio: float) -> float:
    """Return a ratio within the bound."""
    return min(BOUND, max(1 / BOUND, ratio))


def shrunk(ratios: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted geometric mean of measured / predicted, drawn towards 1 as if one more had been exact.

    Args:
        weights: how much each counts, 0 to 1.
    """
    total = PRIOR + sum(weights)
    return math.exp(sum(w * math.log(bounded(r)) for r, w in zip(ratios, weights, strict=True)) / total)


class ExchangeCorrection(Document):
    """What exchanges of a strategy over an engine took, over what was predicted, where a machine took part."""

    machine: Name
    strategy: Text
    engine: Text
    factor: Factor


class Corrections(Document):
    """Factors on predicted times; without entries nothing changes."""

    compute: dict[Name, Factor] = Field(default_factory=dict)
    """By machine: on the time of a step alone."""
    exchange: tuple[ExchangeCorrection, ...] = ()

    def exchange_of(self, members: Iterable[str], strategy: str, engine: str) -> float:
        """Return the factor on an exchange of a group: the geometric mean of its machines', 1 for who has none."""
        known = {one.machine: one.factor for one in self.exchange if (one.strategy, one.engine) == (strategy, engine)}
        return statistics.geometric_mean([known.get(name, 1.0) for name in members])

    def applied(self, cluster: Cluster) -> Cluster:
        """Return the cluster with machines as fast as they proved to be."""
        if not self.compute:
            return cluster
        machines = []
        for machine in cluster.machines:
            factor = self.compute.get(machine.name, 1.0)
            found = tuple(m.model_copy(update={"seconds": m.seconds * factor}) for m in machine.measurements)
            machines.append(machine.measured_as(found))
        return Cluster(machines=tuple(machines), links=cluster.links, here=cluster.here)


NO_CORRECTIONS = Corrections()


# ------------------------------------------------------------------------------------------------------- equal machines

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


def _groups(machines: Sequence[ClusterMachine]) -> Iterator[list[ClusterMachine]]:
    """Yield the groups of two and more machines none of which differs from the fastest of its group."""
    known = [one for one in machines if one.measurements and all(m.error for m in one.measurements)]
    group: list[ClusterMachine] = []
    for one in sorted(known, key=lambda one: (_batches(one), _largest(one).seconds, one.name)):
        if group and _batches(one) == _batches(group[0]) and _alike(_largest(one), _largest(group[0])):
            group.append(one)
            continue
        if len(group) > 1:
            yield group
        group = [one]
    if len(group) > 1:
        yield group


def _batches(machine: ClusterMachine) -> tuple[int, ...]:
    return tuple(sorted(one.batch for one in machine.measurements))


def _largest(machine: ClusterMachine) -> Measurement:
    return max(machine.measurements, key=lambda one: one.batch)


def _alike(one: Measurement, other: Measurement) -> bool:
    errors = (max(each.error, _LEAST_ERROR * each.seconds) for each in (one, other))
    return abs(one.seconds - other.seconds) <= _ERRORS * math.hypot(*errors)


def _mean(group: Sequence[ClusterMachine], machine: ClusterMachine) -> tuple[Measurement, ...]:
    """Return the machine's measurements with the group's mean times; what else was measured there stays."""
    times: dict[int, list[float]] = {}
    for each in group:
        for one in each.measurements:
            times.setdefault(one.batch, []).append(one.seconds)
    means = {batch: sum(found) / len(found) for batch, found in times.items()}
    return tuple(one.model_copy(update={"seconds": means[one.batch]}) for one in machine.measurements)
