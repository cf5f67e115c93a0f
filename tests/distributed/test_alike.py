from __future__ import annotations

import pytest
from planner_figures import job, joined

from distributed.planning.documents.cluster import Cluster, ClusterMachine, Measurement
from distributed.planning.documents.corrections import average_equal_machines
from distributed.planning.planner import plan


def machines(*seconds: float, error: float = 0.02) -> Cluster:
    """Machines ``a``, ``b``, ... that took so long for a step of 32 samples."""

    def machine(name: str, step_seconds: float) -> ClusterMachine:
        measurements = tuple(
            Measurement(batch=batch, seconds=share * step_seconds, error=share * error, peak=1_000 * batch)
            for batch, share in ((16, 0.55), (32, 1.0))
        )
        return ClusterMachine(name=name, measurements=measurements)

    return joined([machine("abcd"[index], step_seconds) for index, step_seconds in enumerate(seconds)])


@pytest.mark.parametrize(
    ("seconds", "error", "equal"),
    [((1.0, 1.05), 0.02, True), ((1.0, 1.02), 0.001, True), ((1.0, 1.05), 0.001, False), ((1.0, 1.5), 0.05, False)],
)
def test_differences_within_their_errors_are_none(seconds: tuple[float, float], error: float, equal: bool) -> None:
    best = plan(machines(*seconds, error=error), job(1_000_000, batch=32)).best
    assert best is not None
    shares = {member.micro_batch for member in best.members}
    assert (len(shares) == 1) is equal


def test_who_is_really_slower_stays_slower() -> None:
    averaged = average_equal_machines(machines(1.0, 1.03, 2.0, 2.04))
    times = [machine.measurements[1].seconds for machine in averaged.machines]
    assert times == pytest.approx([1.015, 1.015, 2.02, 2.02])
    assert [machine.measurements[1].peak for machine in averaged.machines] == [32_000] * 4


def test_a_chain_of_small_differences_is_not_one_group() -> None:
    times = [
        machine.measurements[1].seconds for machine in average_equal_machines(machines(1.0, 1.05, 1.10, 1.15)).machines
    ]
    assert times[0] < times[-1]


def test_figures_without_errors_are_taken_as_they_are() -> None:
    cluster = machines(1.0, 1.01, error=0.0)
    assert average_equal_machines(cluster) is cluster
