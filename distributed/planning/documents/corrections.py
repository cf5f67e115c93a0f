"""Corrections of measured figures before they are used for predictions. Pure functions.

Machines whose step times differ by no more than the error of measurement count as equally fast; and the errors of
earlier predictions for these machines become factors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from pydantic import Field

from distributed.planning.documents.cluster import Cluster, ClusterMachine, Document, Measurement, Name, Text

LARGEST_FACTOR = 3.0
"""Bound of every factor and of its inverse: one disturbed run must not decide the next plan."""
PRIOR_WEIGHT = 1.0
"""Weight of an exact prediction that is added to every history."""

Factor = Annotated[float, Field(ge=1 / LARGEST_FACTOR, le=LARGEST_FACTOR)]


def clamped(ratio: float) -> float:
    """Return a ratio within the bounds of a factor."""
    return min(LARGEST_FACTOR, max(1 / LARGEST_FACTOR, ratio))


def shrunk_mean(ratios: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted geometric mean of measured over predicted times, shrunk towards 1 by :data:`PRIOR_WEIGHT`.

    Args:
        weights: weight of each ratio, 0 to 1.
    """
    total = PRIOR_WEIGHT + sum(weights)
    return math.exp(sum(w * math.log(clamped(r)) for r, w in zip(ratios, weights, strict=True)) / total)


class ExchangeCorrection(Document):
    """Measured over predicted time of a strategy's exchanges over an engine in which a machine took part."""

    machine: Name
    strategy: Text
    engine: Text
    factor: Factor


class Corrections(Document):
    """Factors on predicted times, from the errors of earlier predictions."""

    compute: dict[Name, Factor] = Field(default_factory=dict)
    """Factor on the time of a step without exchanges, by machine."""
    exchange: tuple[ExchangeCorrection, ...] = ()

    def exchange_factor(self, members: Iterable[str], strategy: str, engine: str) -> float:
        """Return the factor on an exchange of a group: the geometric mean of its machines' factors, 1 without one."""
        corrections = (c for c in self.exchange if (c.strategy, c.engine) == (strategy, engine))
        factors = {correction.machine: correction.factor for correction in corrections}
        return statistics.geometric_mean([factors.get(name, 1.0) for name in members])

    def apply(self, cluster: Cluster) -> Cluster:
        """Return the cluster with corrected step times of its machines."""
        if not self.compute:
            return cluster
        machines = []
        for machine in cluster.machines:
            factor = self.compute.get(machine.name, 1.0)
            corrected = tuple(m.model_copy(update={"seconds": m.seconds * factor}) for m in machine.measurements)
            machines.append(machine.with_measurements(corrected))
        return Cluster(machines=tuple(machines), links=cluster.links, here=cluster.here)


NO_CORRECTIONS = Corrections()


# ------------------------------------------------------------------------------------------------------- equal machines

_STANDARD_ERRORS = 2.0
"""Standard errors within which a difference is not significant: the differences of 95 % of equal machines are."""
_LEAST_ERROR = 0.01
"""Smallest relative error of a measurement: the same machine differs by as much from minute to minute."""


def average_equal_machines(cluster: Cluster) -> Cluster:
    """Return the cluster with averaged measurements of machines whose step times do not differ significantly.

    Machines measured at the same batch sizes are compared, at the largest one. A machine whose error is not known keeps
    its measurements.
    """
    means_by_name: dict[str, tuple[Measurement, ...]] = {}
    for group in _equal_groups(cluster.machines):
        for machine in group:
            means_by_name[machine.name] = _mean(group, machine)
    if not means_by_name:
        return cluster
    machines = tuple(
        machine.with_measurements(means_by_name.get(machine.name, machine.measurements)) for machine in cluster.machines
    )
    return Cluster(machines=machines, links=cluster.links, here=cluster.here)


def _equal_groups(machines: Sequence[ClusterMachine]) -> Iterator[list[ClusterMachine]]:
    """Yield groups of at least two machines that do not differ significantly from the fastest of the group."""
    comparable = [
        machine for machine in machines if machine.measurements and all(m.error for m in machine.measurements)
    ]
    group: list[ClusterMachine] = []
    for machine in sorted(comparable, key=lambda machine: (_batches(machine), _largest(machine).seconds, machine.name)):
        if group and _batches(machine) == _batches(group[0]) and _are_equal(_largest(machine), _largest(group[0])):
            group.append(machine)
            continue
        if len(group) > 1:
            yield group
        group = [machine]
    if len(group) > 1:
        yield group


def _batches(machine: ClusterMachine) -> tuple[int, ...]:
    return tuple(sorted(measurement.batch for measurement in machine.measurements))


def _largest(machine: ClusterMachine) -> Measurement:
    return max(machine.measurements, key=lambda measurement: measurement.batch)


def _are_equal(left: Measurement, right: Measurement) -> bool:
    errors = (max(measurement.error, _LEAST_ERROR * measurement.seconds) for measurement in (left, right))
    return abs(left.seconds - right.seconds) <= _STANDARD_ERRORS * math.hypot(*errors)


def _mean(group: Sequence[ClusterMachine], machine: ClusterMachine) -> tuple[Measurement, ...]:
    """Return the machine's measurements with the group's mean times; their other values stay."""
    times: dict[int, list[float]] = {}
    for member in group:
        for measurement in member.measurements:
            times.setdefault(measurement.batch, []).append(measurement.seconds)
    means = {batch: sum(seconds) / len(seconds) for batch, seconds in times.items()}
    return tuple(
        measurement.model_copy(update={"seconds": means[measurement.batch]}) for measurement in machine.measurements
    )
