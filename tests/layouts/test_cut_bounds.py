"""A cut names each stage's blocks, and refuses bounds that leave a stage empty; what crosses it."""

from __future__ import annotations

import pytest
import torch

from profiles.errors import BadInput
from training.hardware.device import Precision
from training.layouts.staged import wire_type
from training.layouts.stages.stage import Cut
from training.records.plan import DevicePlan


def test_a_stage_has_the_blocks_between_its_bounds() -> None:
    cut = Cut((0, 3, 7, 8), 1)
    assert list(cut.blocks) == [3, 4, 5, 6]
    assert (cut.stages, cut.is_first, cut.is_last) == (3, False, False)
    assert [cut.stage_of(block) for block in range(8)] == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(("bounds", "stage"), [((0,), 0), ((1, 4), 0), ((0, 4, 4), 1), ((0, 4, 8), 2), ((0, 4), -1)])
def test_a_cut_without_such_a_stage_is_refused(bounds: tuple[int, ...], stage: int) -> None:
    with pytest.raises(BadInput):
        Cut(bounds, stage)


def test_bf16_travels_between_machines_that_compute_in_it() -> None:
    cpu = torch.device("cpu")
    together, apart = [DevicePlan(machine="a")] * 2, [DevicePlan(machine="a"), DevicePlan(machine="b")]
    assert wire_type(apart, Precision(torch.bfloat16, cpu)) is torch.bfloat16
    assert wire_type(apart, Precision(None, cpu)) is wire_type(together, Precision(torch.bfloat16, cpu)) is None
