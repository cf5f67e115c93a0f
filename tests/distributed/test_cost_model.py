"""The cost model against a table that was calculated before it, against measurements, and against itself."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.planning.cost_model import (
    LINE_SHARE,
    Bottleneck,
    Flows,
    bottlenecks_of,
    split_samples,
    star_flows,
    transfer_seconds,
)
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link
from profiles.errors import BadInput
from training.exchange.codecs import codec_by_name
from training.strategies.allreduce import OVERLAP, overlap_credit
from training.strategies.costs import RunSpec, SyncSchedule, batch_efficiency, merge_efficiency
from training.strategies.diloco import DiLoCo, DiLoCoOptions
from training.strategies.registry import cost_model


def ring(size: float, members: int, rate: float) -> float:
    """All-reduce by a ring, or by owners: ``2 (n-1)/n S/B``, where B is the slowest link's rate."""
    return transfer_seconds(2 * (members - 1) / members * size, rate)


def star(size: float, members: int, rate: float) -> float:
    """One owner of everything, up and down at the same time: ``(n-1) S/B``."""
    return transfer_seconds((members - 1) * size, rate)


@pytest.mark.parametrize(
    ("line", "codec", "measured"),
    [(1000, "fp32", 2.35), (1000, "fp16", 1.53), (100, "fp32", 18.41), (100, "fp16", 9.29)],
)
def test_measured_steps_of_three_machines(line: float, codec: str, measured: float) -> None:
    """39 M parameters, 1 s of compute: within 4 % of what torch's DDP took."""
    exchange = ring(codec_by_name(codec).expected_bytes(39_000_000), 3, line * LINE_SHARE)
    assert 1.0 + max(0.0, exchange - OVERLAP) == pytest.approx(measured, rel=0.04)


# -------------------------------------------------------------------------------------------------------------- payload


@pytest.mark.parametrize("codec", ["fp32", "bf16", "fp16", "int8", "mxfp4"])
@settings(max_examples=20)
@given(elements=st.integers(1, 5000))
def test_payload_is_what_the_codec_makes(codec: str, elements: int) -> None:
    import torch

    codec_under_test = codec_by_name(codec)
    assert codec_under_test.expected_bytes(elements) == codec_under_test.encode(torch.ones(elements)).numel()


def test_one_bucket_hides_nothing() -> None:
    assert overlap_credit(1.0, 0.3, 1.0) == overlap_credit(1.0, 0.3, 7.0) == 0
    assert overlap_credit(1.0, 0.3, 1 / 3) == pytest.approx(0.2)
    assert overlap_credit(1.0, 9.0, 1 / 3) == OVERLAP


def test_the_first_bucket_leaves_when_it_is_full() -> None:
    # Three quarters of the gradients: half of the compute is over before backward has made them.
    assert overlap_credit(1.0, 9.0, 0.75) == pytest.approx(2 / 3 * 0.25)
    assert overlap_credit(1.0, 0.1, 0.75) == pytest.approx(0.075)


def test_payload_of_an_unknown_codec() -> None:
    with pytest.raises(BadInput, match="codec 'fp8'"):
        codec_by_name("fp8")


def test_a_sparse_mean_grows_with_the_members_but_not_beyond_a_dense_one() -> None:
    few, many = codec_by_name("topk:0.01"), codec_by_name("topk:0.5")
    assert few.expected_reply_bytes(1000, 3) == 3 * few.expected_bytes(1000)
    assert many.expected_reply_bytes(1000, 9) == codec_by_name("bf16").expected_bytes(1000)


# ---------------------------------------------------------------------------------- real links against one rate for all

NAMES = ("a", "b", "c", "d")


def network(mbit: float, wireless: str = "") -> Cluster:
    """Equal links among four machines; those named in ``wireless`` are on one channel of ``mbit``."""
    crossings = {(a, b): (a in wireless) + (b in wireless) for a in NAMES for b in NAMES}
    links = tuple(
        Link(source=a, target=b, mbit=mbit / max(1, crossings[a, b]), mbit_back=mbit / max(1, crossings[a, b]),
             air="home" if crossings[a, b] else "")
        for index, a in enumerate(NAMES)
        for b in NAMES[index + 1 :]
    )  # fmt: skip
    return Cluster(machines=tuple(ClusterMachine(name=name, wifi=name in wireless) for name in NAMES), links=links)


def slowest_part(cluster: Cluster, flows: Flows) -> Bottleneck:
    return max(bottlenecks_of(cluster, flows).values(), key=lambda bottleneck: bottleneck.seconds)


def by_owner(size: float) -> Flows:
    """What equal shares send: the mean of the stars."""
    flows = [star_flows(NAMES, owner, size, size) for owner in NAMES]
    return {
        (a, b): sum(star_of_owner.get((a, b), 0.0) for star_of_owner in flows) / 4
        for a, b in itertools.permutations(NAMES, 2)
    }


def test_flows_of_a_star_take_what_the_formula_says() -> None:
    flows = star_flows(NAMES, "b", 1e6, 1e6)
    assert slowest_part(network(100), flows).seconds == pytest.approx(star(1e6, 4, 100))


def test_flows_by_owner_take_what_the_formula_says() -> None:
    slowest = slowest_part(network(100), by_owner(1e6))
    assert slowest.seconds == pytest.approx(ring(1e6, 4, 100))


def test_an_owner_with_a_fast_interface_is_not_held_up_by_slow_members() -> None:
    cluster = network(100)
    fast = tuple(m.model_copy(update={"interface_mbit": 1000.0}) if m.name == "a" else m for m in cluster.machines)
    slowest = slowest_part(cluster.model_copy(update={"machines": fast}), star_flows(NAMES, "a", 1e6, 1e6))
    assert (slowest.kind, slowest.seconds) == ("link", pytest.approx(0.08))


@pytest.mark.parametrize(("wireless", "owner_wired"), [("abcd", False), ("bcd", True)])
def test_wifi_is_shared_and_crossed_twice(wireless: str, owner_wired: bool) -> None:
    slowest = slowest_part(network(100, wireless), star_flows(NAMES, "a", 1e6, 1e6))
    assert (slowest.kind, slowest.mbit) == ("air", pytest.approx(100))
    assert slowest.seconds == pytest.approx(transfer_seconds((2 if owner_wired else 4) * 3 * 1e6, 100))


def test_wifi_by_owner_costs_what_a_ring_costs() -> None:
    slowest = slowest_part(network(100, "abcd"), by_owner(1e6))
    assert slowest.seconds == pytest.approx(transfer_seconds(4 * 3 * 1e6, 100))


def test_members_on_one_machine_cross_no_network() -> None:
    assert star_flows(("a", "a", "b"), "a", 1.0, 2.0) == {("b", "a"): 1.0, ("a", "b"): 2.0}


# --------------------------------------------------------------------------------------------------------------- shares

speeds = st.lists(st.floats(0.1, 1000), min_size=1, max_size=6)


@given(speeds=speeds, batch=st.integers(1, 64), overhead=st.floats(0, 1))
def test_shares_are_whole_and_follow_speed(speeds: list[float], batch: int, overhead: float) -> None:
    n = len(speeds)
    batches = split_samples(batch * n, [overhead] * n, speeds, [10**6] * n)
    assert batches is not None
    assert sum(batches) == batch * n
    assert min(batches) >= 1
    order = sorted(range(n), key=lambda i: speeds[i])
    pairs = [(slow, fast) for slow, fast in itertools.pairwise(order) if speeds[slow] < speeds[fast]]
    assert all(batches[slow] <= batches[fast] for slow, fast in pairs)


@given(speeds=speeds, caps=st.lists(st.integers(1, 20), min_size=6, max_size=6), total=st.integers(1, 200))
def test_shares_keep_within_memory(speeds: list[float], caps: list[int], total: int) -> None:
    caps = caps[: len(speeds)]
    batches = split_samples(total, [0.0] * len(speeds), speeds, caps)
    if total < len(speeds) or total > sum(caps):
        assert batches is None
    else:
        assert batches is not None
        assert sum(batches) == total
        assert all(1 <= batch <= cap for batch, cap in zip(batches, caps, strict=True))


def test_shares_of_unequal_machines_end_together() -> None:
    """Speeds 1, .5, .25, .1: proportional shares are worth 1.85 of the fastest, equal ones 0.4."""
    batches = split_samples(74, [0.0] * 4, [1, 0.5, 0.25, 0.1], [1000] * 4)
    assert batches == [40, 20, 10, 4]
    assert 74 / max(b / v for b, v in zip(batches, [1, 0.5, 0.25, 0.1], strict=True)) == pytest.approx(1.85)


# ------------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    ("rounds", "start", "gain"),
    [(3, "pretrained", 1.0), (1000, "pretrained", 1.0), (3, "scratch", 0.04), (10, "scratch", 0.43)],
)
def test_gain_kept_is_the_measured_one(rounds: int, start: Any, gain: float) -> None:
    learnt = DiLoCo.costs.learning(RunSpec(10 * rounds, start), SyncSchedule(10), 3.0)
    assert learnt.share == pytest.approx(merge_efficiency(3.0, gain)) == pytest.approx((1 + 2 * gain) / 3)


def test_a_trained_language_model_needs_more_rounds_than_speech() -> None:
    def loss(rounds: int, texts: bool, name: str = "diloco", delay: int = 0, interval: int = 10) -> float:
        costs = cost_model(name)
        assert costs is not None
        return costs.learning(RunSpec(interval * rounds, texts=texts), SyncSchedule(interval, delay), 4.0).loss

    assert loss(10, texts=False) == 0.0 < 0.02 < loss(30, texts=True) < loss(10, texts=True)
    assert loss(200, texts=True, interval=2) == 0.0 < loss(200, texts=True) < loss(200, texts=True, interval=50)
    assert loss(10, texts=True, name="streaming_diloco", delay=5) > loss(10, texts=True, delay=5)


@pytest.mark.parametrize("start", ["pretrained", "scratch"])
def test_sparta_beside_diloco_loses_no_more_than_diloco(start: Any) -> None:
    sparta, diloco, composition = map(cost_model, ("sparta", "diloco", "sparta + diloco"))
    assert sparta is not None and diloco is not None and composition is not None
    run, schedule = RunSpec(500, start, texts=True), SyncSchedule(50)
    diloco_alone, combined = diloco.learning(run, schedule, 4.0), composition.learning(run, SyncSchedule(), 4.0)
    exchanged = sparta.learning(run, SyncSchedule(), 4.0)
    assert 0.02 < combined.loss == min(diloco_alone.loss, exchanged.loss)
    assert combined.share == max(diloco_alone.share, exchanged.share)


@pytest.mark.parametrize(("interval", "loss"), [(25, 0.028), (100, 0.063), (500, 0.094)])
def test_loss_from_scratch_by_interval_is_the_published_one(interval: int, loss: float) -> None:
    assert loss_increase(interval, 10_000, "scratch") == pytest.approx(loss)


def loss_increase(interval: int, rounds: int, start: Any) -> float:
    return DiLoCo.costs.learning(RunSpec(interval * rounds, start), SyncSchedule(interval), 2.0).loss


@pytest.mark.parametrize(
    ("name", "delay", "start", "longest_measured"),
    [
        ("diloco", 0, "pretrained", 50),
        ("streaming_diloco", 5, "pretrained", 50),
        ("noloco", 0, "pretrained", 50),
        ("local_sgd", 0, "scratch", 100),
        ("diloco", 0, "scratch", 500),
    ],
)
def test_an_interval_beyond_all_that_were_measured_costs_more(
    name: str, delay: int, start: Any, longest_measured: int
) -> None:
    costs = cost_model(name)
    assert costs is not None
    schedules = [SyncSchedule(times * longest_measured, delay) for times in (1, 2, 10)]
    measured, beyond, far = (costs.learning(RunSpec(10**6, start, texts=True), schedule, 4.0) for schedule in schedules)
    assert measured.loss < beyond.loss < far.loss
    assert measured.share >= beyond.share >= far.share >= 0.25


@given(st.integers(1, 500), st.integers(1, 2000), st.sampled_from(["pretrained", "scratch"]))
def test_more_rounds_cost_no_more_loss(interval: int, rounds: int, start: Any) -> None:
    fewer = loss_increase(interval, rounds, start)
    assert loss_increase(interval, rounds + 1, start) <= fewer + 1e-12


def test_batch_efficiency_without_a_larger_batch_is_one() -> None:
    assert [batch_efficiency(1, rule) for rule in ("off", "sqrt", "linear")] == [1, 1, 1]
    assert batch_efficiency(4, "off") == pytest.approx(2.11 / 4, abs=0.001)


@pytest.mark.parametrize("steps", [100, 1499, 1500, 40_000])
def test_a_plan_sets_the_outer_optimizer_of_the_strategy(steps: int) -> None:
    planned = DiLoCo.costs.settings(RunSpec(steps), SyncSchedule(50))
    defaults = DiLoCoOptions().outer_rates(steps // 50, "pretrained")
    assert (planned["diloco.outer_lr"], planned["diloco.outer_momentum"]) == defaults
