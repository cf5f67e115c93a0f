"""Orders to a member that trains, and what is kept of a run that ends before its work is done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from toy_task import ToyTask, toy_plan

from profiles.errors import ExitCode
from training.exchange.base import SoloExchange
from training.loop.trainer import Trainer
from training.records.events import EvaluationEvent, Event, MemberEvent, RunEvent, SnapshotEvent, StepEvent
from training.run.orders import Command, Control
from training.run.outcome import newest_complete_step, progress_text
from training.run.stopping import LEAST_PATIENCE, ProgressMonitor
from training.tasks.base import Batch


class Member:
    """A trainer alone, with its events and what it is told."""

    def __init__(self, run_dir: Path, task: ToyTask | None = None, **plan: Any) -> None:
        self.events: list[Event] = []
        self.control = Control()
        task = task or ToyTask()
        task.prepare(lambda *_: None)
        self.on_event: Callable[[Event], None] = lambda event: None
        self.trainer = Trainer(toy_plan(**plan), 0, task, SoloExchange(), self._note, self.control, run_dir)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)

    def tell(self, *commands: Any, **words: Any) -> None:
        for command in commands:
            self.control.post(Command(command=command, **words))

    @property
    def story(self) -> list[str]:
        told = [e for e in self.events if isinstance(e, RunEvent | SnapshotEvent | StepEvent)]
        return [e.status if isinstance(e, RunEvent) else f"{e.kind} {e.step}" for e in told]


def test_a_paused_member_writes_a_snapshot_there_and_then(tmp_path: Path) -> None:
    member = Member(tmp_path)
    member.tell("pause", at_step=3)

    def answer(event: Event) -> None:
        if isinstance(event, RunEvent) and event.status == "paused":
            threading.Thread(target=lambda: member.tell("snapshot", "resume")).start()

    member.on_event = answer
    assert member.trainer.run() is ExitCode.DONE
    middle = member.story.index("paused")
    assert member.story[middle - 1 : middle + 4] == ["step 3", "paused", "snapshot 3", "running", "step 4"]
    assert member.story[-1] == "step 12"


@pytest.mark.parametrize("step", [1, 5, 12])
def test_a_stop_keeps_the_step_without_any_interval(tmp_path: Path, step: int) -> None:
    member = Member(tmp_path, snapshot={"snapshot_interval": 0})
    member.tell("stop", at_step=step)
    assert member.trainer.run() is ExitCode.STOPPED
    assert member.story[-2:] == [f"step {step}", f"snapshot {step}"]
    again = Member(tmp_path, resume=True)
    assert again.trainer.run() is ExitCode.DONE
    assert [e.step for e in again.events if isinstance(e, StepEvent)] == list(range(step + 1, 13))


def test_before_the_first_step_there_is_nothing_to_keep(tmp_path: Path) -> None:
    member = Member(tmp_path)
    member.tell("stop")
    assert member.trainer.run() is ExitCode.STOPPED
    assert member.story == ["running"] and not (tmp_path / "checkpoints").exists()


class Interrupting(ToyTask):
    """Says when something is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.on_evaluation: Callable[[], None] = lambda: None

    def evaluate(self, model: nn.Module, batch: Batch, generate: bool) -> dict[str, float]:
        self.on_evaluation()
        return super().evaluate(model, batch, generate)


@pytest.mark.parametrize(("stop_at", "evaluated"), [(4, [4, 8, 12]), (13, [12])], ids=["between", "at the end"])
def test_an_evaluation_is_cut_short_by_a_stop_and_comes_again(
    tmp_path: Path, stop_at: int, evaluated: list[int]
) -> None:
    plan: dict[str, Any] = {"evaluation": {"eval_interval": 4, "eval_batch_size": 1}}
    task, batches = Interrupting(), list[int]()
    member = Member(tmp_path, task, **plan)
    last = min(stop_at, 12)

    def interrupt() -> None:
        if member.trainer.position.step == last:
            member.tell("stop", at_step=stop_at)
            batches.append(1)

    task.on_evaluation = interrupt
    assert member.trainer.run() is ExitCode.STOPPED
    assert len(batches) == 1 and member.story[-1] == f"snapshot {last}"
    again = Member(tmp_path, Interrupting(), **plan, resume=True)
    assert again.trainer.run() is ExitCode.DONE
    assert [e.step for e in again.events if isinstance(e, EvaluationEvent)] == evaluated
    assert (tmp_path / "model" / "weights.pt").exists()


def step(rank: int, number: int, seconds: float) -> StepEvent:
    return StepEvent(member=rank, step=number, epoch=0, loss=1, learning_rate=1, samples=1, weight=1, compute=seconds,
                     wait=0, transfer=0)  # fmt: skip


def snapshot(rank: int, number: int, *live: int, seconds: float = 0.1) -> SnapshotEvent:
    return SnapshotEvent(member=rank, step=number, path="", bytes=1, seconds=seconds, live=live)


def test_one_short_step_does_not_make_the_run_impatient() -> None:
    progress = ProgressMonitor()
    for number, seconds in enumerate([20.0, 20.0, 0.00135, 20.0, 0.001]):
        progress(step(0, number + 1, seconds))
    progress(step(1, 5, 0.2))
    assert progress.pace == 20.0 and progress.patience >= 10 * 20.0


def test_patience_lasts_for_a_long_snapshot_and_for_a_first_step() -> None:
    progress = ProgressMonitor()
    assert progress.patience > LEAST_PATIENCE
    progress(step(0, 1, 0.001))
    assert progress.patience == LEAST_PATIENCE
    progress(snapshot(0, 1, seconds=100.0))
    assert progress.patience >= 500.0


NEWEST: list[tuple[dict[int, tuple[int, tuple[int, ...]]], int | None]] = [
    ({}, None),
    ({0: (9, (0,))}, 9),
    ({0: (9, (0, 1)), 1: (9, (0, 1))}, 9),
    ({0: (9, (0, 1)), 1: (6, (0, 1))}, 6),
    ({0: (9, (0,)), 1: (6, (0, 1))}, 9),  # member 1 was lost between
    ({0: (9, (0, 1))}, None),  # member 1 has none at all
]


def test_what_is_kept_does_not_depend_on_who_is_lost() -> None:
    """Also before the others have met and know of it; what is lost by all is told by what they had."""
    newest = {0: (9, (0, 1, 2)), 1: (9, (0, 1, 2))}
    assert newest_complete_step(newest, lost={2}) == 9
    assert newest_complete_step(newest, lost={0, 1, 2}) is None
    progress = ProgressMonitor()
    for event in (MemberEvent(member=2, status="lost"), *(SnapshotEvent(member=rank, step=9, path="a", bytes=1,
                  seconds=0.1, live=(0, 1, 2)) for rank in (0, 1))):  # fmt: skip
        progress(event)
    assert progress.metrics == {"kept_step": 9, "lost_steps": 0}
    progress(MemberEvent(member=2, status="joined"))
    assert progress.resumable_step is None


@pytest.mark.parametrize(("newest", "kept"), NEWEST)
def test_a_step_is_kept_when_all_who_trained_then_have_it(
    newest: dict[int, tuple[int, tuple[int, ...]]], kept: int | None
) -> None:
    assert newest_complete_step(newest) == kept


def test_what_is_kept_is_said_with_what_is_lost() -> None:
    assert progress_text(40, 40) == "the snapshot of step 40 is kept, 0 steps lost"
    assert progress_text(40, 41) == "the snapshot of step 40 is kept, 1 step lost"
    assert progress_text(None, 370) == "no snapshot is kept, 370 steps lost"
    assert progress_text(None, 0) == "no step was taken, so there is nothing to keep"
