"""How far off predictions for these machines were: factors that the next prediction takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import Field

from distributed.planning.cluster import Cluster, Document, Name, Text

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

    def compute_of(self, name: str) -> float:
        """Return the factor on a machine's compute."""
        return self.compute.get(name, 1.0)

    def exchange_of(self, members: Iterable[str], strategy: str, engine: str) -> float:
        """Return the factor on an exchange of a group: the geometric mean of its machines', 1 for who has none."""
        known = {one.machine: one.factor for one in self.exchange if (one.strategy, one.engine) == (strategy, engine)}
        logs = [math.log(known.get(name, 1.0)) for name in members]
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    def applied(self, cluster: Cluster) -> Cluster:
        """Return the cluster with machines as fast as they proved to be."""
        if not self.compute:
            return cluster
        machines = []
        for machine in cluster.machines:
            factor = self.compute_of(machine.name)
            found = tuple(m.model_copy(update={"seconds": m.seconds * factor}) for m in machine.measurements)
            machines.append(machine.measured_as(found))
        return Cluster(machines=tuple(machines), links=cluster.links, here=cluster.here)


NONE = Corrections()
