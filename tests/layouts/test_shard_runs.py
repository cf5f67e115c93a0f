"""Runs of real workers that each hold a shard of every weight, or a slice of every matrix, beside whole ones."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.layouts.staged_records import (
    Record,
    agree,
    assert_same_showcase,
    assert_same_weights,
    plan_of,
    resumed,
    stop_soon,
    tied_llama,
    trained,
)
from tests.waiting import until
from training.records.events import EvaluationEvent, Event, StepEvent
from training.run.run_controller import RunController

pytestmark = pytest.mark.slow


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """A Llama of three blocks with a tied embedding, and what it learns from: two batches of an odd size a step."""
    return tied_llama(tmp_path, blocks=3, lines=20) | {
        "batch_size": 3, "gradient_accumulation": 2, "gradient_checkpointing": True, "eval_interval": 0
    }  # fmt: skip


def test_a_run_goes_through_all_layouts(options: dict[str, Any], tmp_path: Path) -> None:
    options |= {"max_steps": 12, "snapshot_interval": 0, "eval_before": False}
    records = [trained(tmp_path, plan_of(3, **options), stop_soon, in_threads=True)]
    run_dir = records[0].outcome.run_dir
    records.append(resumed(run_dir, 2, stop_soon, "tensor"))
    records.append(resumed(run_dir, 1, stop_soon, in_threads=True))
    records.append(resumed(run_dir, 2, stop_soon, "shard"))
    records.append(resumed(run_dir, 2, layout="tensor"))
    whole = trained(tmp_path / "whole", plan_of(1, **options), in_threads=True)
    assert [record.outcome.status for record in records] == ["cancelled"] * 4 + ["completed"]
    for record in records:
        agree(record, whole)
    assert sorted(step for record in records for step in record.steps) == [*range(1, 13)]
    assert_same_weights(records[-1], whole)


def test_adapters_become_the_folder_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    changed = options | {"tuning": "lora", "lora_rank": 3, "lora_dropout": 0, "max_steps": 3}
    run = trained(tmp_path / "shard", plan_of(2, **changed, layout="shard"))
    whole = trained(tmp_path / "whole", plan_of(1, **changed), in_threads=True)
    assert run.outcome.status == "completed", run.outcome.message
    agree(run, whole)
    evaluations, expected = ([event.loss for event in record.of(EvaluationEvent)] for record in (run, whole))
    assert evaluations == pytest.approx(expected, rel=1e-6)
    assert_same_weights(run, whole)
    assert_same_showcase(run, whole)
    folders = [{file.name for file in (record.outcome.run_dir / "model").iterdir()} for record in (run, whole)]
    assert folders[0] == folders[1]


def test_a_killed_device_is_named(tmp_path: Path) -> None:
    def kill(run: RunController, event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 2:
            snapshots = run.folder.path / "checkpoints" / "member-0-stage-2"  # old ones are removed meanwhile
            until(lambda: [*snapshots.glob("step-*")])
            os.kill(run.members.workers[1].process.pid, signal.SIGKILL)

    job = {"task": "custom", "model_path": "tests.layouts.deep_model:deep_job", "layout": "shard", "max_steps": 1000}
    job |= {"eval_before": False, "eval_interval": 0}
    run: Record = trained(tmp_path, plan_of(2, **job), kill)
    assert run.outcome.status == "failed"
    assert "worker-0-shard-2" in run.outcome.message
