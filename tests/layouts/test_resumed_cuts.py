"""Runs that are resumed on other numbers of workers than wrote their snapshots, beside one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.layouts.staged_records import (
    Record,
    agree,
    assert_same_weights,
    plan_of,
    resumed,
    stop_soon,
    tied_llama,
    trained,
    weights_in,
)

pytestmark = pytest.mark.slow
STEPS = 8


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A Llama of four blocks with a tied embedding, and what it learns from, two batches a step."""
    return tied_llama(tmp_path, blocks=4, lines=60) | {
        "max_steps": STEPS, "gradient_accumulation": 2, "eval_interval": 0, "snapshot_interval": 0,
        "eval_before": False,
    }  # fmt: skip


def along(numbers: tuple[int, ...], output: Path, options: dict[str, Any]) -> list[Record]:
    """Return the records of a run that is stopped and resumed on these numbers of workers."""
    records = [trained(output, plan_of(numbers[0], **options), stop_soon, in_threads=True)]
    run_dir = records[0].outcome.run_dir
    for number in numbers[1:-1]:
        records.append(resumed(run_dir, number, stop_soon, in_threads=True))
    return [*records, resumed(run_dir, numbers[-1], in_threads=True)]


@pytest.mark.parametrize(
    ("numbers", "reference", "changed"),
    [
        ((3, 2, 1, 3), 1, {}),
        ((3, 1), 3, {"tuning": "lora", "lora_rank": 2, "lora_dropout": 0}),
    ],
)
def test_a_run_goes_on_with_any_number_of_workers(
    numbers: tuple[int, ...], reference: int, changed: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    records = along(numbers, tmp_path / "along", options | changed)
    whole = trained(tmp_path / "whole", plan_of(reference, **options, **changed), in_threads=True)
    for record in records:
        agree(record, whole)
    assert [record.outcome.status for record in records] == ["cancelled"] * (len(numbers) - 1) + ["completed"]
    assert sorted(step for record in records for step in record.steps) == [*range(1, STEPS + 1)]
    assert_same_weights(records[-1], whole)
    assert weights_in(records[-1].outcome.run_dir).keys() == weights_in(whole.outcome.run_dir).keys()
