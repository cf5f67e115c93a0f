"""One member alone: what the loop does with its settings."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from toy_task import ToyTask, toy_plan

from profiles.errors import BadInput, ExitCode, RunFailed
from training.exchange.base import SoloExchange
from training.loop.trainer import Trainer
from training.records.events import (
    EVALUATES,
    SAVES_MODEL,
    ErrorEvent,
    EvaluationEvent,
    Event,
    ProgressEvent,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    WarningEvent,
)
from training.records.plan import RunPlan
from training.run.orders import Command, Control

VALIDATES = f"{EVALUATES}validation"


def train(
    plan: RunPlan, run_dir: Path, task: ToyTask | None = None, control: Control | None = None
) -> tuple[Trainer, list[Event]]:
    events: list[Event] = []
    task = task or ToyTask()
    task.prepare(lambda *_: None)
    trainer = Trainer(plan, 0, task, SoloExchange(), events.append, control or Control(), run_dir)
    trainer.ending = trainer.run()  # type: ignore[attr-defined]  # for the test alone
    return trainer, events


def steps(events: list[Event]) -> list[StepEvent]:
    return [event for event in events if isinstance(event, StepEvent)]


def losses(events: list[Event]) -> list[float]:
    return [event.loss for event in steps(events)]


@pytest.mark.slow
def test_the_loss_falls_and_the_model_is_saved(tmp_path: Path) -> None:
    task = ToyTask()
    _, events = train(toy_plan(training={"max_steps": 120}), tmp_path, task)
    found = losses(events)
    assert len(found) == 120
    assert sum(found[-8:]) < 0.7 * sum(found[:8])
    assert (tmp_path / "model" / "weights.pt").exists()


def test_a_run_records_what_its_tables_are(tmp_path: Path) -> None:
    class Tabled(ToyTask):
        def table(self, split: str) -> str:
            return "0123" if split == "train" else ""

    _, events = train(toy_plan(training={"max_steps": 1}), tmp_path, Tabled())
    (began,) = [event for event in events if isinstance(event, RunEvent)]
    assert began.details["tables"] == {"train": "0123"}


def test_epochs_cover_every_sample_exactly_once_each(tmp_path: Path) -> None:
    task = ToyTask(samples=10)
    train(toy_plan(training={"max_steps": 0, "epochs": 2}), tmp_path, task)
    assert sorted(task.seen[:10]) == sorted(task.seen[10:20]) == list(range(10))


@pytest.mark.parametrize(("schedule", "last"), [("constant", 0.01), ("linear", 0.001), ("cosine", 0.00024472)])
def test_the_learning_rate_follows_its_schedule(tmp_path: Path, schedule: str, last: float) -> None:
    _, events = train(toy_plan(training={"max_steps": 10, "lr_schedule": schedule}), tmp_path)
    rates = [event.learning_rate for event in steps(events)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[-1] == pytest.approx(last, rel=1e-3)


def test_warm_up_raises_the_rate_step_by_step(tmp_path: Path) -> None:
    _, events = train(toy_plan(training={"warmup_steps": 4, "lr_schedule": "constant"}), tmp_path)
    rates = [event.learning_rate for event in steps(events)][:5]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_warm_up_as_a_share_of_the_run_counts_its_real_steps(tmp_path: Path) -> None:
    changes = {"max_steps": 0, "epochs": 3, "warmup_steps": 0.5, "lr_schedule": "constant"}
    _, events = train(toy_plan(training=changes), tmp_path, ToyTask(samples=10))  # 3 steps an epoch
    rates = [event.learning_rate for event in steps(events)]
    assert len(rates) == 9 and rates[2:5] == pytest.approx([0.0075, 0.01, 0.01])


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("learning_rate", {"learning_rate": 0.02}),
    ("weight_decay", {"weight_decay": 0.5}),
    ("adam_beta2", {"adam_beta2": 0.9}),
    ("max_grad_norm", {"max_grad_norm": 1e-4}),
    ("seed", {"seed": 1}),
    ("batch_size", {"batch_size": 8}),
    ("mixed_precision bf16", {"mixed_precision": "bf16"}),
    ("mixed_precision fp16", {"mixed_precision": "fp16"}),
]


@pytest.mark.parametrize("change", [c for _, c in CHANGES], ids=[name for name, _ in CHANGES])
def test_every_training_setting_has_an_effect(tmp_path: Path, change: dict[str, Any]) -> None:
    _, base = train(toy_plan(), tmp_path / "a")
    _, changed = train(toy_plan(training=change), tmp_path / "b")
    assert losses(base) != losses(changed)


def test_accumulation_equals_the_larger_batch(tmp_path: Path) -> None:
    large, _ = train(toy_plan(training={"batch_size": 8}), tmp_path / "a")
    small, _ = train(toy_plan(training={"batch_size": 4, "gradient_accumulation": 2}), tmp_path / "b")
    for one, two in zip(large.parameters, small.parameters, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    _, free = train(toy_plan(training={"max_grad_norm": 0}), tmp_path / "a")
    _, clipped = train(toy_plan(training={"max_grad_norm": 0.01}), tmp_path / "b")
    assert steps(free)[0].grad_norm is None
    assert steps(clipped)[0].grad_norm is not None
    assert steps(clipped)[0].grad_norm > 0.01


def test_a_loss_that_is_not_finite_stops_and_names_step_and_samples(tmp_path: Path) -> None:
    plan = toy_plan(training={"max_steps": 0, "epochs": 1}, snapshot={"snapshot_interval": 1})
    with pytest.raises(RunFailed, match=r"nan in step \d+, micro-batch 1 \(training samples .*5") as caught:
        train(plan, tmp_path, ToyTask(poison=5))
    assert "snapshot" in str(caught.value)


def test_weights_that_are_not_finite_never_become_a_snapshot(tmp_path: Path) -> None:
    plan = toy_plan(training={"learning_rate": 10.0, "max_grad_norm": 0}, snapshot={"snapshot_interval": 1})

    class Breaking(ToyTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            if len(self.seen) > 20:
                with torch.no_grad():
                    next(model.parameters()).fill_(torch.inf)
                return sum(p.sum() * 0.0 for p in list(model.parameters())[1:])  # type: ignore[return-value]  # a tensor: of one at least
            return super().loss(model, batch)

    with pytest.raises(RunFailed, match=r"weights of worker-0 are not finite after step \d+; the snapshot of step \d+"):
        train(plan, tmp_path, Breaking())


@pytest.mark.parametrize("interval", [5, 0.4])
def test_evaluations_come_at_their_interval_and_at_the_end(tmp_path: Path, interval: float) -> None:
    _, events = train(toy_plan(evaluation={"eval_interval": interval, "eval_before": True}), tmp_path)
    assert [event.step for event in events if isinstance(event, EvaluationEvent)] == [0, 5, 10, 12]
    shown = [event.phase if isinstance(event, ProgressEvent) else event.kind for event in events]
    seen = [name for name, _ in itertools.groupby(name for name in shown if name in ("step", VALIDATES, SAVES_MODEL))]
    assert seen == [VALIDATES, "step", VALIDATES, SAVES_MODEL]  # between the steps they show that it goes on


def test_early_stopping_ends_the_run_with_the_best_weights(tmp_path: Path) -> None:
    plan = toy_plan(
        training={"max_steps": 200, "learning_rate": 1.0, "max_grad_norm": 0, "lr_schedule": "constant"},
        evaluation={"eval_interval": 2, "early_stopping_patience": 3},
    )
    trainer, events = train(plan, tmp_path)
    evaluations = [event for event in events if isinstance(event, EvaluationEvent)]
    assert trainer.position.step < 200
    assert evaluations[-1].loss == pytest.approx(min(e.loss for e in evaluations if e.loss is not None))
    assert any("early stop" in event.message for event in events if isinstance(event, WarningEvent))


def test_snapshots_come_at_their_interval_and_old_ones_go(tmp_path: Path) -> None:
    trainer, events = train(toy_plan(snapshot={"snapshot_interval": 3, "snapshot_keep": 2}), tmp_path)
    assert [event.step for event in events if isinstance(event, SnapshotEvent)] == [3, 6, 9]
    assert trainer.snapshots.own.steps() == [9, 6]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["allreduce", "diloco"])
@pytest.mark.parametrize("stop_at", [5, 8])
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(tmp_path: Path, strategy: str, stop_at: int) -> None:
    options: dict[str, Any] = {"strategy": {"strategy": strategy, "sync_interval": 4, "codec": "mxfp4"}}
    _, whole = train(toy_plan(**options), tmp_path / "a", ToyTask(dropout=0.2))
    control = Control()
    control.post(Command(command="stop", at_step=stop_at))
    stopped, first = train(toy_plan(**options), tmp_path / "b", ToyTask(dropout=0.2), control)
    assert stopped.ending is ExitCode.STOPPED  # type: ignore[attr-defined]  # set by train()
    torch.manual_seed(99)
    _, rest = train(toy_plan(**options, resume=True), tmp_path / "b", ToyTask(dropout=0.2))
    assert len(losses(first)) == stop_at
    assert losses(first) + losses(rest) == pytest.approx(losses(whole), abs=1e-6)


def test_a_run_goes_on_that_began_when_nothing_refused_its_settings(tmp_path: Path) -> None:
    strategy = {"strategy": "noloco", "owned": {"noloco": {"sync_interval": 4}}}
    control, refused = Control(), strategy | {"error_feedback": True}
    control.post(Command(command="stop", at_step=5))
    stopped, first = train(toy_plan(strategy=strategy), tmp_path, control=control)
    plan = toy_plan(strategy=refused, resume=True)
    stopped.snapshots.own.save(stopped.snapshots.own.load(5, stopped.plan.hash()), plan.hash())
    _, rest = train(plan, tmp_path)
    assert (len(losses(first)), len(losses(rest))) == (5, 7)
    with pytest.raises(BadInput, match="error_feedback: has no effect"):
        train(toy_plan(strategy=refused), tmp_path / "new")


class _OfLengths(ToyTask):
    """Samples of like length come together."""

    def lengths(self) -> NDArray[np.int64]:
        return np.arange(len(self.train), dtype=np.int64) % 5 + 1


@pytest.mark.slow
def test_a_resumed_run_takes_the_grouped_samples_that_are_left(tmp_path: Path) -> None:
    whole, stopped, rest = _OfLengths(), _OfLengths(), _OfLengths()
    _, expected = train(toy_plan(), tmp_path / "a", whole)
    control = Control()
    control.post(Command(command="stop", at_step=7))
    _, first = train(toy_plan(), tmp_path / "b", stopped, control)
    _, second = train(toy_plan(resume=True), tmp_path / "b", rest)
    assert losses(first) + losses(second) == losses(expected)
    plain = ToyTask()
    train(toy_plan(), tmp_path / "c", plain)
    assert whole.seen != plain.seen and sorted(whole.seen) == sorted(plain.seen)


def test_a_damaged_snapshot_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    plan = toy_plan(snapshot={"snapshot_interval": 4})
    trainer, _ = train(plan, tmp_path)
    newest = tmp_path / "checkpoints" / "member-0" / "step-00000008" / "state.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    _, events = train(toy_plan(snapshot={"snapshot_interval": 4}, resume=True), tmp_path)
    assert steps(events)[0].step == 5
    assert any("skipped" in event.message for event in events if isinstance(event, WarningEvent))
    assert trainer.position.step == 12
    assert trainer.snapshots.own.verified_steps()[0] == [8, 4]  # and written anew when its step came again


@pytest.mark.parametrize(
    ("damaged", "message"),
    [(True, "all 2 snapshots .* are damaged: .*state.safetensors"), (False, "no machine has a snapshot")],
)
def test_a_resume_without_a_sound_snapshot_is_refused(tmp_path: Path, damaged: bool, message: str) -> None:
    train(toy_plan(snapshot={"snapshot_interval": 4 if damaged else 0}), tmp_path)
    for file in tmp_path.glob("checkpoints/*/*/state.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadInput, match=message) as caught:
        train(toy_plan(resume=True), tmp_path)
    assert "start a new run" in caught.value.hint and not ErrorEvent.of(caught.value).resumable
    assert len(list(tmp_path.glob("checkpoints/*/step-*"))) == (2 if damaged else 0)  # nothing was overwritten


def test_a_model_that_cannot_learn_is_refused_in_words(tmp_path: Path) -> None:
    class Frozen(ToyTask):
        def build_model(self) -> torch.nn.Module:
            return super().build_model().requires_grad_(False)

    class Detached(ToyTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(model, batch).detach()

    with pytest.raises(BadInput, match="no weights to train"):
        train(toy_plan(), tmp_path, Frozen())
    with pytest.raises(RunFailed, match="depends on no weight that is trained"):
        train(toy_plan(), tmp_path, Detached())


def test_compute_and_wait_add_up_to_the_step(tmp_path: Path) -> None:
    _, events = train(toy_plan(), tmp_path)
    assert all(event.compute > 0 and event.wait == 0 for event in steps(events))
