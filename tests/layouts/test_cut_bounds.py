"""A cut names each stage's blocks, and refuses bounds that leave a stage empty."""

from __future__ import annotations

import pytest

from profiles.errors import BadInput
from training.layouts.stages.stage import Cut


def test_a_stage_has_the_blocks_between_its_bounds() -> None:
    cut = Cut((0, 3, 7, 8), 1)
    assert list(cut.blocks) == [3, 4, 5, 6]
    assert (cut.stages, cut.is_first, cut.is_last) == (3, False, False)
    assert [cut.stage_of(block) for block in range(8)] == [0, 0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(("bounds", "stage"), [((0,), 0), ((1, 4), 0), ((0, 4, 4), 1), ((0, 4, 8), 2), ((0, 4), -1)])
def test_a_cut_without_such_a_stage_is_refused(bounds: tuple[int, ...], stage: int) -> None:
    with pytest.raises(BadInput):
        Cut(bounds, stage)
