"""Runs of real workers whose model lies on two of them, beside those of one that holds it whole."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.layouts.staged_records import (
    STEPS,
    Record,
    agree,
    assert_same_showcase,
    assert_same_weights,
    plan_of,
    resumed,
    tied_llama,
    trained,
)
from tests.waiting import until
from training.records.events import EvaluationEvent, Event, MemberEvent, StepEvent
from training.records.plan import DevicePlan
from training.run.run_controller import RunController

pytestmark = pytest.mark.slow

CUSTOM: dict[str, Any] = {"task": "custom", "model_path": "tests.layouts.deep_model:deep_job"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The custom job in one process."""
    return trained(tmp_path_factory.mktemp("whole"), plan_of(1, **CUSTOM))


def test_two_stages_train_as_one_process(tmp_path: Path, whole: Record) -> None:
    plan = plan_of(2, **CUSTOM)
    devices = tuple(DevicePlan(**{**dict(device), "blocks": blocks}) for device, blocks in
                    zip(plan.members[0].devices, ((0, 4), (4, 5))))  # fmt: skip
    cut = plan.model_copy(update={"members": (plan.members[0].model_copy(update={"devices": devices}),)})
    assert cut.hash() == plan.hash()
    run = trained(tmp_path, cut)
    assert run.outcome.status == "completed", run.outcome.message
    agree(run, whole)
    evaluations, expected = ([event.loss for event in record.of(EvaluationEvent)] for record in (run, whole))
    assert evaluations == pytest.approx(expected, rel=1e-6)
    assert_same_weights(run, whole)
    assert_same_showcase(run, whole)
    steps = run.of(StepEvent)
    assert all(len(step.stages) == 2 and min(step.stages) > 0 and max(step.stages) <= step.seconds for step in steps)
    assert not any(step.stages for step in whole.of(StepEvent))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that says how many micro-batches are trained: the first of the fourth step waits for it."""
    path = tmp_path / "gate"
    monkeypatch.setenv("DEEP_GATE", str(path))
    path.write_text("13")
    return path


def test_a_stopped_pipeline_goes_on_where_all_stages_stopped(tmp_path: Path, gate: Path) -> None:
    """Also in what it drops at random."""
    options = {**CUSTOM, "model_path": "tests.layouts.deep_model:dropping_job", "eval_before": False}

    def stop(run: RunController, event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 3:
            run.request_stop("enough")
            threading.Thread(target=open_gate, args=(run,)).start()

    def open_gate(run: RunController) -> None:
        until(lambda: run._orders.stop_step < STEPS)  # agreed on before step 4, or in the middle of it
        gate.write_text("1000")

    first = trained(tmp_path, plan_of(2, **options), stop)
    last_step = max(first.steps)
    assert first.outcome.status == "cancelled" and last_step in (3, 4)
    checkpoints = first.outcome.run_dir / "checkpoints"
    assert all((checkpoints / part / f"step-{last_step:08}").is_dir() for part in ("member-0", "member-0-stage-2"))
    rest = resumed(first.outcome.run_dir)
    assert rest.outcome.status == "completed", rest.outcome.message
    assert sorted(rest.steps) == list(range(last_step + 1, STEPS + 1))
    never_stopped = trained(tmp_path / "never", plan_of(2, **options))
    agree(rest, never_stopped)
    assert_same_weights(rest, never_stopped)


def test_a_killed_stage_is_named_and_the_run_resumed(tmp_path: Path, whole: Record, gate: Path) -> None:
    def kill(run: RunController, event: Event) -> None:
        if isinstance(event, StepEvent) and event.step == 3:
            until((run.folder.path / "checkpoints" / "member-0-stage-2" / "step-00000002").is_dir)
            os.kill(run.members.workers[1].process.pid, signal.SIGKILL)

    first = trained(tmp_path, plan_of(2, **CUSTOM), kill)
    gate.write_text("1000")
    assert first.outcome.status == "failed"
    assert "worker-0-stage-2" in first.outcome.message
    assert "lost" not in {event.status for event in first.of(MemberEvent)}
    rest = resumed(first.outcome.run_dir)
    assert rest.outcome.status == "completed", rest.outcome.message
    assert sorted(rest.steps) == [3, 4, 5]  # the snapshot of step 2 is the newest that both stages have
    agree(rest, whole)
    assert_same_weights(rest, whole)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("poisoned_job", "the loss of worker-0 is nan in step 4"),
        ("exhausting_job", "worker-0-stage-2: ran out of memory in its stage: out of memory"),
    ],
)
def test_a_step_that_fails_on_one_stage_ends_the_run(job: str, message: str, tmp_path: Path) -> None:
    options = {**CUSTOM, "model_path": f"tests.layouts.deep_model:{job}", "eval_before": False}
    run = trained(tmp_path, plan_of(2, **options))
    assert run.outcome.status == "failed"
    assert message in run.outcome.message
    assert not (run.outcome.run_dir / "model").exists()


def test_a_llama_in_two_stages_becomes_an_ordinary_model_folder(tmp_path: Path) -> None:
    options = tied_llama(tmp_path, blocks=3, lines=40)
    run, expected = (
        trained(tmp_path / str(workers), plan_of(workers, **options), in_threads=True) for workers in (2, 1)
    )
    assert run.outcome.status == "completed", run.outcome.message
    agree(run, expected)
    assert_same_weights(run, expected)
    assert_same_showcase(run, expected)
    folder, wanted = (record.outcome.run_dir / "model" for record in (run, expected))
    assert {file.name for file in folder.iterdir()} == {file.name for file in wanted.iterdir()}
    assert (folder / "config.json").read_text() == (wanted / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(folder)("fox")["input_ids"]
    words = torch.arange(10)[None]
    logits = [AutoModelForCausalLM.from_pretrained(path)(words).logits for path in (folder, wanted)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
