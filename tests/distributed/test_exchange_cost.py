"""Processes, chunks, and members that wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_figures import job, joined, machine, predict

from distributed.planning.cost_model import MEMBER_MBIT, OPERATION_SECONDS, contention_factor, expected_slowest
from distributed.planning.documents.cluster import ClusterMachine, Measurement
from distributed.planning.documents.document import Candidate, Choice

EVERY_STEP = Choice(strategy="allreduce", codec="bf16", engine="mesh", members=("a", "b", "c", "d"))
FP32 = EVERY_STEP.model_copy(update={"codec": "fp32"})
TWO = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a", "b"))


def on_fast_links(parameters: int, mbit: float = 100_000, **fields: Any) -> Candidate:
    return predict(joined([machine("a", **fields), machine("b", **fields)], mbit), job(parameters), TWO)


def test_all_processes_of_a_machine_share_its_cores() -> None:
    # 800 MB in and out of each member: of a machine with both, the processes share its cores.
    moving = 8e-6 * 800e6 / MEMBER_MBIT["mesh"]

    def together(cores: float) -> float:
        box = [machine(name, identity="box", cores=cores) for name in "ab"]
        return predict(joined(box, 1), job(100_000_000), TWO).exchange

    assert on_fast_links(100_000_000).exchange == pytest.approx(moving, rel=0.2)
    assert together(2) == pytest.approx(moving, rel=0.2)
    assert together(1) == pytest.approx(2 * together(2), rel=0.01)


def test_an_exchange_of_one_piece_goes_through_one_part_after_the_other() -> None:
    # 0.08 MB at 100 Mbit/s: what is so small is one piece, and no part works while another does.
    small, large = (on_fast_links(size, 100, cores=0.001).exchange for size in (20_000, 20_000_000))
    network, work = 8e-6 * 80_000 / 100, 1000 * 8e-6 * 160_000 / MEMBER_MBIT["mesh"]
    assert small == pytest.approx(network + work + 1000 * OPERATION_SECONDS["mesh"], rel=0.1)
    assert large < 1000 * (network + work)


def test_work_for_a_hidden_exchange_takes_compute_where_the_processor_trains() -> None:
    processor, device = (on_fast_links(1_000_000_000, 40_000, cores=8, device=kind) for kind in ("cpu", "mps"))
    hidden = 0.4 * device.compute / device.exchange
    work = 8e-6 * 8e9 / MEMBER_MBIT["mesh"] / 8
    assert processor.members[0].busy - device.members[0].busy == pytest.approx(work * hidden, rel=0.2)
    assert processor.members[1].busy == processor.members[0].busy


def test_an_exchange_may_take_longer_than_its_bytes_with_many_flows() -> None:
    four = predict(joined([machine(name) for name in "abcd"], 100), job(20_000_000), FP32)
    assert four.exchange == pytest.approx(8e-6 * 1.5 * 80e6 / 100 * contention_factor(4), rel=0.01)


@pytest.mark.parametrize(
    ("strategy", "codec", "size"),
    [("sparseloco", "topk2bit:0.015625", 200e6 / 64 * 14 / 8), ("demo", "fp32", 200e6 * 32 / 64**2 * 6)],
)
def test_what_goes_from_every_member_to_all_is_owned_by_nobody(strategy: str, codec: str, size: float) -> None:
    machines = [machine(name, cores=4) for name in "abcd"]
    choice = FP32.model_copy(update={"strategy": strategy, "codec": codec})
    candidate = predict(joined(machines, 100), job(200_000_000), choice)
    assert candidate.exchange == pytest.approx(8e-6 * 3 * size / 100 * contention_factor(4), rel=0.05)
    assert {member.shard for member in candidate.members} == {0.25}


@pytest.mark.parametrize(("weights", "times"), [(6_000, 3.0), (60_000, 1.5)])
def test_a_short_vector_goes_in_one_round_to_all(weights: int, times: float) -> None:
    candidate = predict(joined([machine(name) for name in "abcd"], 100), job(weights), FP32)
    moved = candidate.members[0].bytes_per_hour * candidate.step / 3600
    assert moved == pytest.approx(2 * times * 4 * weights, rel=0.02)


@pytest.mark.parametrize(
    ("asked", "codec", "size"), [("auto", "fp32", 0.53125), ("fp32", "fp32", 4), ("auto", "bf16", 2)]
)
def test_each_part_of_a_composition_has_its_own_codec_unless_one_is_asked_for(
    asked: str, codec: str, size: float
) -> None:
    """Four bits for DiLoCo beside SPARTA's weights; a plan sets what both have."""
    choice = FP32.model_copy(update={"strategy": "sparta + diloco", "codec": codec})
    candidate = predict(joined([machine(name) for name in "abcd"], 100), job(20_000_000, codec=asked), choice)
    moved = candidate.members[0].bytes_per_hour * candidate.step / 3600
    assert moved == pytest.approx(3 * 20e6 * (0.005 * (2 if codec == "bf16" else 4) + size / 50), rel=0.02)


@pytest.mark.parametrize("members", [2, 4, 8])
def test_pairs_move_as_much_however_many_there_are(members: int) -> None:
    names = "abcdefgh"[:members]
    choice = FP32.model_copy(update={"strategy": "noloco", "interval": 50, "members": tuple(names)})
    candidate = predict(joined([machine(name) for name in names], 100), job(20_000_000), choice)
    assert candidate.exchange == pytest.approx(8e-6 * 2 * 80e6 / 100 * contention_factor(2), rel=0.02)


def test_islands_move_what_groups_of_their_size_do() -> None:
    def exchange(size: int, names: str) -> float:
        owned = {"fedavg": {"island_size": size}}
        choice = FP32.model_copy(update={"strategy": "fedavg", "interval": 50, "members": tuple(names)})
        return predict(joined([machine(name) for name in names], 100), job(20_000_000, owned=owned), choice).exchange

    assert exchange(3, "abcdef") == pytest.approx(exchange(0, "abc"), rel=0.02)
    assert exchange(8, "abcdef") == exchange(0, "abcdef")


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 3)), min_size=1, max_size=6), st.integers(1, 500))
def test_the_last_of_a_group_is_never_earlier_than_its_slowest(members: list[tuple[float, float]], steps: int) -> None:
    means, deviations = zip(*members, strict=True)
    expected = expected_slowest(means, deviations, steps)
    assert expected >= max(means) * (1 - 1e-6)
    assert expected <= expected_slowest(means, deviations) * (1 + 1e-6)
    assert expected_slowest(means, [0.0] * len(means), steps) == pytest.approx(max(means))


def test_the_last_of_equal_members() -> None:
    # Order statistics of the normal distribution: 0.564, 0.846, 1.029 standard deviations with 2, 3, 4 members.
    expected = [expected_slowest([1.0] * members, [0.1] * members) for members in (2, 3, 4)]
    assert expected == pytest.approx([1.0564, 1.0846, 1.1029], abs=0.002)


def test_members_whose_steps_vary_wait_for_each_other() -> None:
    measured = (Measurement(batch=8, seconds=1.0, spread=0.1),)
    machines = [ClusterMachine(name=name, measurements=measured) for name in "abcd"]
    every_step = predict(joined(machines, 1000), job(1_000_000), EVERY_STEP)
    merged = EVERY_STEP.model_copy(update={"strategy": "diloco", "interval": 100})
    assert every_step.skew == pytest.approx(0.103, abs=0.001)
    assert predict(joined(machines, 1000), job(1_000_000), merged).skew == pytest.approx(0.0103, abs=0.001)


def test_a_slow_processor_owns_less_and_holds_up_the_others() -> None:
    choice = TWO.model_copy(update={"members": ("a", "b", "c"), "codec": "mxfp4"})

    def exchange(cores: float) -> Candidate:
        members = [machine("a", 8, cores=8), machine("b", 8, cores=8), machine("c", 8, cores=cores)]
        return predict(joined(members, 10_000), job(4_000_000), choice)

    assert exchange(0.1).exchange > 2 * exchange(8).exchange
    assert exchange(0.1).members[2].shard < 0.2 < exchange(8).members[2].shard
