"""Small clusters and jobs to plan for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from distributed.measuring.link_figures import LinkFigures, PairFigures
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link, Measurement
from distributed.planning.documents.corrections import NO_CORRECTIONS, Corrections
from distributed.planning.documents.document import Candidate, Choice, Job
from distributed.planning.prediction import Predictor

TINY, LARGE = 39_000_000, 1_550_000_000


def machine(name: str, speed: float = 8.0, **fields: Any) -> ClusterMachine:
    """A machine that does a step of 8 samples in ``8 / speed`` seconds."""
    measured = (Measurement(batch=8, seconds=8 / speed),) if speed else ()
    return ClusterMachine(name=name, measurements=measured, **fields)


def cluster(speeds: Sequence[float], mbit: float = 950.0, slow: dict[str, float] | None = None) -> Cluster:
    """Machines ``a``, ``b``, ... with equal links; those in ``slow`` have a slower interface."""
    machines = tuple(machine("abcdefgh"[index], speed) for index, speed in enumerate(speeds))
    return joined(machines, mbit, slow)


def joined(machines: Sequence[ClusterMachine], mbit: float = 950.0, slow: dict[str, float] | None = None) -> Cluster:
    """Link every pair."""

    def rate(*ends: ClusterMachine) -> float:
        return min((slow or {}).get(end.name, mbit) for end in ends)

    links = tuple(
        Link(source=a.name, target=b.name, mbit=rate(a, b), mbit_back=rate(a, b), rtt_ms=0.6)
        for index, a in enumerate(machines)
        for b in machines[index + 1 :]
    )
    return Cluster(machines=tuple(machines), links=links)


def job(parameters: int = TINY, **fields: Any) -> Job:
    """A fine-tune of 1000 steps for 4 machines."""
    return Job(**{"trainable": parameters, "total": parameters, "samples": 32_000} | fields)


def measured_pair(source: str = "a", target: str = "b", mbit: float = 100.0, **overrides: Any) -> PairFigures:
    """A pair of machines as measured; ``more`` are other figures."""
    defaults = {"mbit_back": 90, "rtt_ms": 0.5, "interface": "eth0", "interface_back": "eth0", "address": "10.0.0.2"}
    zero = dict.fromkeys(("jitter_ms", "loss", "loss_back", "other_mbit"), 0.0)
    figures = LinkFigures(
        mbit=mbit, **{"wireless": False, "wireless_back": False, "paths": (), **defaults, **zero, **overrides}
    )
    return PairFigures(source=source, target=target, figures=figures)


speeds = st.lists(st.floats(0.5, 50), min_size=1, max_size=3)
rates = st.floats(1, 10_000)
jobs = st.builds(
    job,
    parameters=st.sampled_from([1_000_000, TINY, 244_000_000]),
    samples=st.integers(1_000, 100_000),
    batch=st.integers(1, 16),
    start=st.sampled_from(["pretrained", "scratch"]),
    lora=st.booleans(),
    preference=st.sampled_from(["fastest", "closest-to-exact", "least-traffic"]),
)


def predict(cluster: Cluster, job: Job, choice: Choice, corrections: Corrections = NO_CORRECTIONS) -> Candidate:
    """Return what one choice should cost."""
    return Predictor(cluster, job, corrections).predict(choice)
