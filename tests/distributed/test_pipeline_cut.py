"""The cut of a model into the stages of a pipeline, and the predicted time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import machine

from distributed.planning.documents.cluster import Cluster, Link
from distributed.planning.layouts.cut import Boundary, StageChain, StageDevice
from distributed.planning.layouts.pipeline_step import PipelineStep, pipeline_step, shard_bytes, tensor_bytes
from tests.layouts.pipeline_clock import BACKWARD, FORWARD, finish_times
from training.layouts.orders import micro_batches_under_way

LLAMA_3B, LARGE_V3 = 3.21e9, 1.55e9
"""Parameters."""


def linked(names: str, mbit: float = 1e6, rtt_ms: float = 0.0) -> Cluster:
    links = tuple(Link(source=a, target=b, mbit=mbit, mbit_back=mbit, rtt_ms=rtt_ms) for a, b in combinations(names, 2))
    return Cluster(machines=tuple(machine(name) for name in names), links=links)


def device(name: str, seconds: Sequence[float], ends: Sequence[int] = ()) -> StageDevice:
    """A device that holds anything, or stages that end where ``ends`` says."""
    return StageDevice(name, tuple(seconds), lambda under_way: ends or [len(seconds)] * len(seconds))


def chain(speeds: Sequence[float], blocks: int, micro_batches: int = 16, extra: int = 0) -> StageChain:
    """Devices of these speeds, which take a second for a block at speed 1; links cost nothing."""
    devices = tuple((device("abcd"[rank], [1 / speed] * blocks),) for rank, speed in enumerate(speeds))
    return StageChain(devices, (Boundary(0.0, 0.0),) * blocks, linked("abcd"), micro_batches, extra)


def efficiency(chain: StageChain, seconds: float, speeds: Sequence[float]) -> float:
    """Samples per second over those of all devices without a pipeline."""
    return chain.micro_batches * chain.blocks / sum(speeds) / seconds


# ------------------------------------------------------------------------------------------------------- a step's time


@pytest.mark.parametrize(
    ("sizes", "micro_batches", "expected"),
    [((9, 5, 2), 16, 0.826), ((16, 8, 4), 16, 0.889), ((9, 5, 2), 32, 0.868), ((19, 9, 4), 16, 0.866)],
)
def test_speeds_of_1_a_half_and_a_quarter(sizes: tuple[int, ...], micro_batches: int, expected: float) -> None:
    speeds = (1.0, 0.5, 0.25)
    pipeline = chain(speeds, sum(sizes), micro_batches)
    bounds = (0, sizes[0], sizes[0] + sizes[1], sum(sizes))
    assert efficiency(pipeline, pipeline.planned(bounds).seconds, speeds) == pytest.approx(expected, abs=0.0005)
    best = pipeline.best()
    assert best is not None and efficiency(pipeline, best.seconds, speeds) >= expected - 0.0005
    assert sizes != (16, 8, 4) or best.bounds == bounds


def test_three_equal_stages_of_300_ms_take_5_4_seconds() -> None:
    """As measured over links of no cost; 16 micro-batches leave a bubble of 2 / 18."""
    step = predicted([0.3] * 3, [0.0] * 2, 0, 16)
    assert step.seconds == pytest.approx(5.4) and step.exposed == 0
    assert step.bubble == pytest.approx(2 / 18)


@pytest.mark.parametrize(("extra", "expected"), [(0, 6.91), (1, 5.65), (16, 5.65)])
def test_at_100_mbit_a_stage_that_runs_ahead_hides_its_transfers(extra: int, expected: float) -> None:
    """1 x 512 x 768 numbers in bf16 take 63 ms each way: with 1F1B every micro-batch waits for its round trip."""
    transfer = 2 * 512 * 768 * 2 * 8 / 100e6
    step = predicted([0.3] * 3, [transfer] * 2, extra, 16)
    assert step.seconds == pytest.approx(expected, abs=0.005)


def test_bytes_of_a_step_of_8_texts_of_512_tokens_on_three_machines() -> None:
    hidden, mbit = 8 * 512 * 3072, 1e6 / 8  # bytes a second of 1 Mbit/s
    assert shard_bytes(LLAMA_3B, 3) / (100 * mbit) == pytest.approx(1030, rel=0.01)
    assert tensor_bytes(hidden, 28, 3) / (100 * mbit) == pytest.approx(300, rel=0.01)
    again = tensor_bytes(hidden, 28, 3, checkpointing=True)  # measured: an all-reduce more for each block
    assert again == pytest.approx(tensor_bytes(hidden, 28, 3) * 5 / 4)
    assert shard_bytes(LARGE_V3, 3) / (100 * mbit) == pytest.approx(500, rel=0.01)


def simulated(compute: Sequence[float], ways: Sequence[float], extra: int, micro_batches: int) -> float:
    """Seconds of a step if every stage does its works in order; the ways are equal."""
    slowness = [seconds / (FORWARD + BACKWARD) for seconds in compute]
    ends = finish_times(len(compute), micro_batches, extra, ways[0] / 2 if ways else 0.0, slowness)
    return max(ends.values())


def predicted(compute: Sequence[float], ways: Sequence[float], extra: int, micro_batches: int) -> PipelineStep:
    under_way = [micro_batches_under_way(n, len(compute), micro_batches, extra) for n in range(len(compute))]
    return pipeline_step(compute, ways, under_way, micro_batches)


@given(st.integers(1, 5), st.integers(20, 40), st.integers(0, 3), st.floats(0, 0.5))
def test_the_predicted_step_is_that_of_the_order_if_stages_are_equal(
    stages: int, micro_batches: int, extra: int, way: float
) -> None:
    compute, ways = [1.0] * stages, [way] * (stages - 1)
    step = predicted(compute, ways, extra, micro_batches)
    assert simulated(compute, ways, extra, micro_batches) <= step.seconds + 1e-9
    if extra or not way:
        assert simulated(compute, ways, extra, micro_batches) == pytest.approx(step.seconds)


@settings(max_examples=50)
@given(
    st.lists(st.floats(0.2, 1), min_size=2, max_size=4), st.floats(0, 0.3), st.integers(0, 2), st.sampled_from([8, 32])
)
def test_unequal_stages_take_at_most_as_long_as_predicted(
    compute: list[float], way: float, extra: int, micro_batches: int
) -> None:
    ways = [way] * (len(compute) - 1)
    step = predicted(compute, ways, extra, micro_batches)
    assert 0.7 * step.seconds <= simulated(compute, ways, extra, micro_batches) <= step.seconds + 1e-9


# --------------------------------------------------------------------------------------------------------------- a cut


@st.composite
def chains(draw: st.DrawFn) -> StageChain:
    """Few blocks on few devices, each with its own speed for each block, memory and links."""
    stages, members = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]))
    blocks = draw(st.integers(stages, 7))
    names = "abcd"[: stages * members]
    links = tuple(
        Link(source=a, target=b, mbit=draw(st.floats(10, 1000)), mbit_back=draw(st.floats(10, 1000)), rtt_ms=1, air=air)
        for a, b in combinations(names, 2)
        for air in (draw(st.sampled_from(["", "radio"])),)
    )
    lengths = st.lists(st.integers(0, blocks), min_size=blocks, max_size=blocks)

    def any_device(name: str) -> StageDevice:
        seconds = draw(st.lists(st.floats(0.01, 1), min_size=blocks, max_size=blocks))
        ends = [min(blocks, start + length) for start, length in enumerate(draw(lengths))]
        return device(name, seconds, draw(st.sampled_from([[], ends])))

    sizes = st.floats(0, 5e6)
    boundaries = tuple(Boundary(draw(sizes), draw(sizes)) for _ in range(blocks))
    devices = [any_device(name) for name in names]
    return StageChain(
        tuple(tuple(devices[stage::stages]) for stage in range(stages)),
        boundaries,
        Cluster(machines=tuple(machine(name) for name in names), links=links),
        draw(st.sampled_from([1, 4, 16])),
        draw(st.integers(0, 2)),
        trained=tuple(draw(st.lists(st.integers(0, 10**6), min_size=blocks, max_size=blocks))),
        tied_bytes=draw(st.sampled_from([0.0, 1e7])),
        embedding=draw(st.integers(0, blocks - 1)),
    )


def every_cut(pipeline: StageChain) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, pipeline.blocks), len(pipeline.columns) - 1):
        yield (0, *inner, pipeline.blocks)


@settings(max_examples=150, deadline=None)
@given(chains())
def test_no_cut_that_fits_is_faster(pipeline: StageChain) -> None:
    fitting = [bounds for bounds in every_cut(pipeline) if pipeline.fits(bounds)]
    best = pipeline.best()
    assert (best is None) == (not fitting)
    if best is not None:
        assert (
            best.bounds[0] == 0 and best.bounds[-1] == pipeline.blocks and len(best.bounds) == len(pipeline.columns) + 1
        )
        assert all(start < end for start, end in pairwise(best.bounds))
        assert pipeline.fits(best.bounds)
        assert best.seconds == pytest.approx(min(pipeline.planned(bounds).seconds for bounds in fitting))


@given(st.lists(st.floats(0.1, 4), min_size=2, max_size=4), st.integers(4, 64))
def test_no_cut_is_slower_than_the_even_one(speeds: list[float], blocks: int) -> None:
    pipeline, stages = chain(speeds, blocks), len(speeds)
    best = pipeline.best()
    assert best is not None
    even = tuple(round(blocks * stage / stages) for stage in range(stages + 1))
    assert best.seconds <= pipeline.planned(even).seconds


def test_a_slower_cut_than_asked_for_is_none() -> None:
    pipeline = chain((1.0, 1.0), 8)
    best = pipeline.best()
    assert best is not None and pipeline.best(best.seconds) is None


def test_the_stages_of_large_models_are_cut_at_once() -> None:
    """Four unequal devices and 64 blocks, of which the front half takes longer."""
    speeds = (1.0, 0.7, 0.45, 0.2)
    pipeline = chain(speeds, 64, 32)
    columns = tuple(
        (device("abcd"[rank], [1.7 / speed] * 32 + [1.0 / speed] * 31 + [3.0 / speed]),)
        for rank, speed in enumerate(speeds)
    )
    looked_at = 0
    pipeline = replace(pipeline, columns=columns, boundaries=(Boundary(2e5, 1e5),) * 64, cluster=linked("abcd", 100, 1))
    plan = StageChain.planned

    def counted(self: StageChain, bounds: tuple[int, ...]) -> object:
        nonlocal looked_at
        looked_at += 1
        return plan(self, bounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageChain, "planned", counted)
        assert pipeline.best() is not None
    assert looked_at < 100  # of 39,711 cuts
