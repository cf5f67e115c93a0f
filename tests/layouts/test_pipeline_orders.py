from __future__ import annotations

from itertools import accumulate

import pytest

from tests.layouts.pipeline_clock import BACKWARD, FORWARD, finish_times
from training.layouts.orders import (
    Work,
    extra_micro_batches,
    forward_order,
    micro_batches_under_way,
    pipeline_order,
)

SIZES = [(stages, micro_batches) for stages in range(1, 7) for micro_batches in range(33)]
EXTRAS = (0, 1, 3, 32)


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_micro_batch_goes_forward_once_and_backward_once_on_each_stage(extra: int) -> None:
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            order = pipeline_order(stage, stages, micro_batches, extra)
            forwards = [work.micro_batch for work in order if work.kind == "forward"]
            backwards = [work.micro_batch for work in order if work.kind == "backward"]
            assert forwards == backwards == [*range(micro_batches)]


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_more_activations_are_under_way_than_computed(extra: int) -> None:
    for stages, micro_batches in SIZES:
        for stage in range(stages):
            order = pipeline_order(stage, stages, micro_batches, extra)
            under_way = accumulate(1 if work.kind == "forward" else -1 for work in order)
            assert max(under_way, default=0) == micro_batches_under_way(stage, stages, micro_batches, extra)


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_stage_waits_for_ever(extra: int) -> None:
    for stages, micro_batches in SIZES[:: 3 if extra else 1]:
        assert len(finish_times(stages, micro_batches, extra, transfer=0.1)) == 2 * stages * micro_batches


def test_without_extra_micro_batches_it_is_1f1b() -> None:
    warm_up = [Work("forward", 0), Work("forward", 1)]
    steady = [Work("forward", 2), Work("backward", 0), Work("forward", 3), Work("backward", 1)]
    assert pipeline_order(0, 3, 4) == [*warm_up, *steady, Work("backward", 2), Work("backward", 3)]


def test_its_limit_is_gpipe() -> None:
    assert pipeline_order(0, 3, 8, extra=8)[:8] == forward_order(8)


@pytest.mark.parametrize("transfer", [0.0, 0.3, 0.6, 1.2, 2.4])
def test_with_the_extra_micro_batches_of_a_link_only_the_bubble_and_one_delay_are_left(transfer: float) -> None:
    stages, micro_batches, stage_seconds = 4, 24, FORWARD + BACKWARD
    extra = extra_micro_batches(transfer, stage_seconds)
    seconds = max(finish_times(stages, micro_batches, extra, transfer).values())
    boundaries = stages - 1
    assert seconds == pytest.approx((micro_batches + boundaries) * stage_seconds + 2 * boundaries * transfer)
