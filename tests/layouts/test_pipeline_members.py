from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts.pipeline_members import member_runs
from tests.layouts.pipeline_runs import agree, whole_run
from tests.layouts.toy_stages import ToyModel

BOUNDS = (0, 1, 4, 6)


@pytest.mark.slow
def test_stages_on_the_mesh_make_the_steps_of_one_process(tmp_path: Path) -> None:
    agree(member_runs(BOUNDS, tmp_path), whole_run(ToyModel(encoder_blocks=2)))


@pytest.mark.slow
def test_a_killed_stage_is_named_by_all_others(tmp_path: Path) -> None:
    first, killed, last = member_runs(BOUNDS, tmp_path, killed=1)
    assert killed is None
    assert all(error.startswith("ExchangeError") and "rank 1 (berta)" in error for error in (first, last))
