"""Processes, chunks, and members that wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_figures import job, joined, machine, predict

from distributed.planning.cluster import Machine, Measurement
from distributed.planning.cost_model import expected_last
from distributed.planning.document import Candidate, Choice

EVERY_STEP = Choice(strategy="allreduce", codec="bf16", engine="torch", members=("a", "b", "c", "d"))
HUB_ON_A = Choice(strategy="allreduce", codec="fp32", engine="hub", hub="a", members=("a", "b"))


def on_fast_links(parameters: int, mbit: float = 100_000, **more: Any) -> Candidate:
    return predict(joined([machine("a", **more), machine("b", **more)], mbit), job(parameters), HUB_ON_A)


def test_all_processes_of_a_machine_share_its_cores() -> None:
    # 800 MB in and out of a member at 4400 Mbit/s, 1600 MB of the hub at 5200; with a core each the hub decides.
    assert on_fast_links(100_000_000).exchange == pytest.approx(2.462, rel=0.01)
    assert on_fast_links(100_000_000, cores=1).exchange == pytest.approx(1.455 + 2.462, rel=0.01)
    assert on_fast_links(100_000_000, cores=2).exchange == pytest.approx(2.462, rel=0.01)


def test_an_exchange_of_one_chunk_goes_through_one_part_after_the_other() -> None:
    # 0.8 MB at 100 Mbit/s up and down, through the hub and both ends: nothing of it at the same time.
    assert on_fast_links(200_000, 100).exchange == pytest.approx(2 * 0.064 + 0.0029 + 0.0049, abs=0.008)
    assert on_fast_links(20_000_000, 100).exchange == pytest.approx(6.4, rel=0.03)


def test_work_for_a_hidden_exchange_takes_compute_where_the_processor_trains() -> None:
    processor, device = (on_fast_links(1_000_000_000, 40_000, cores=8, device=kind) for kind in ("cpu", "mps"))
    credit = 0.4 * device.compute
    assert processor.members[0].busy - device.members[0].busy == pytest.approx(
        (14.55 + 24.62) / 8 * credit / device.exchange, rel=0.02
    )
    assert processor.members[1].busy < processor.members[0].busy


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 3)), min_size=1, max_size=6), st.integers(1, 500))
def test_the_last_of_a_group_is_never_earlier_than_its_slowest(each: list[tuple[float, float]], steps: int) -> None:
    means, deviations = zip(*each, strict=True)
    last = expected_last(means, deviations, steps)
    assert last >= max(means) * (1 - 1e-6)
    assert last <= expected_last(means, deviations) * (1 + 1e-6)
    assert expected_last(means, [0.0] * len(means), steps) == pytest.approx(max(means))


def test_the_last_of_equal_members() -> None:
    # Order statistics of the normal distribution: 0.564, 0.846, 1.029 standard deviations with 2, 3, 4 members.
    found = [expected_last([1.0] * members, [0.1] * members) for members in (2, 3, 4)]
    assert found == pytest.approx([1.0564, 1.0846, 1.1029], abs=0.002)


def test_members_whose_steps_vary_wait_for_each_other() -> None:
    measured = (Measurement(batch=8, seconds=1.0, spread=0.1),)
    machines = [Machine(name=name, measurements=measured) for name in "abcd"]
    every = predict(joined(machines, 1000), job(1_000_000), EVERY_STEP)
    merged = EVERY_STEP.model_copy(update={"strategy": "diloco", "interval": 100})
    assert every.skew == pytest.approx(0.103, abs=0.001)
    assert predict(joined(machines, 1000), job(1_000_000), merged).skew == pytest.approx(0.0103, abs=0.001)


def test_who_ends_its_step_sooner_has_begun_the_exchange_sooner() -> None:
    way = HUB_ON_A.model_copy(update={"members": ("a", "b", "c")})

    def step(cores: float, samples_per_second: float) -> float:
        members = [machine("a", 8, cores=8), machine("b", 8, cores=8), machine("c", samples_per_second, cores=cores)]
        return predict(joined(members, 1000), job(400_000, global_batch=3), way).step

    assert step(0.1, 8) > step(8, 8) + 0.05  # its processor is slow, and everybody waits for it
    assert step(0.1, 80) == pytest.approx(step(8, 80), rel=0.01)  # but not if it begins a tenth of a second before


def test_the_hubs_own_member_crosses_no_network() -> None:
    alike = on_fast_links(400_000, 20)
    members = [machine("a", 1), machine("b", 8)]
    slow_at_the_hub = predict(joined(members, 20), job(400_000, global_batch=2), HUB_ON_A)
    assert slow_at_the_hub.step - slow_at_the_hub.compute < alike.step - alike.compute
