"""Runs of machines with folders of their own that are resumed on others, beside one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.layouts.machine_folders import MachineFolders
from tests.layouts.staged_records import agree, plan_of, stop_soon, tied_llama, trained

pytestmark = pytest.mark.slow
STEPS = 5


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A Llama of four blocks with a tied embedding, and what it learns from."""
    return tied_llama(tmp_path, blocks=4, lines=60) | {
        "max_steps": STEPS, "eval_interval": 0, "snapshot_interval": 0, "eval_before": False,
    }  # fmt: skip


def test_parts_travel_to_a_machine_that_has_none(options: dict[str, Any], tmp_path: Path) -> None:
    machines = MachineFolders(tmp_path)
    records = [machines.train("ab", stop_soon, **options), machines.resume("cba")]
    assert [record.outcome.status for record in records] == ["cancelled", "completed"], records[-1].outcome.message
    whole = trained(tmp_path / "whole", plan_of(1, **options), in_threads=True)
    for record in records:
        agree(record, whole)
    assert sorted(step for record in records for step in record.steps) == [*range(1, STEPS + 1)]
