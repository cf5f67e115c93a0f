"""Which lost members of several devices come back by themselves, and what is said of those that do not."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from distributed.run.returning_run import ReturningRun
from profiles.errors import BadInput, ExitCode
from tests.runs.run_stage import Script, Stage
from training.records.events import ErrorEvent, MemberEvent, RunEvent, StepEvent, WarningEvent
from training.records.plan import MemberPlan

Make = Callable[..., Stage]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a run of two members of two devices each that trains."""
    stages: list[Stage] = []

    def make(is_back: Callable[[Sequence[str]], bool] = lambda machines: True) -> Stage:
        def take_back(member: MemberPlan) -> None:
            stage.workers[2:] = Script(), Script()
            stage.run.admit(member.rank)

        kind = partial(ReturningRun, take_back=take_back, is_back=is_back)
        options = {"strategy": "diloco", "layout": "pipeline", "stages": 2}
        stage = Stage(tmp_path, workers=4, kind=kind, **options)
        stages.append(stage)
        stage.take(0, RunEvent(status="running"))
        stage.take(2, step(3))
        return stage

    yield make
    for stage in stages:
        stage.run.kill()
        stage.folder.close()


def step(number: int) -> StepEvent:
    figures = {"epoch": 0.1, "loss": 1.0, "learning_rate": 0.1, "compute": 0.1, "wait": 0.0, "transfer": 0.0}
    return StepEvent(step=number, samples=1, weight=1.0, **figures)


def loses(stage: Stage, cause: str = "") -> None:
    """Lose the second device of member 1, and with it the first."""
    if cause:
        stage.take(3, ErrorEvent(message=f"worker-1-stage-2: {cause}"))
    stage.ends(3, -signal.SIGKILL)
    stage.take(2, ErrorEvent(message="worker-1-stage-1: the connection is lost", lost_others=True))
    stage.ends(2, ExitCode.RUN_FAILED)
    assert run_of(stage).members.lost_members == [1]


def run_of(stage: Stage) -> ReturningRun:
    assert isinstance(stage.run, ReturningRun)
    return stage.run


def warnings(stage: Stage) -> list[str]:
    return [event.message for event in stage.folder.events() if isinstance(event, WarningEvent)]


def test_a_member_comes_back_when_its_machines_can_be_reached(make_stage: Make) -> None:
    answers = iter([False, False, True])
    stage = make_stage(lambda machines: next(answers))
    loses(stage)
    for _ in range(3):
        run_of(stage).look()
    assert run_of(stage).members.joining == {2, 3} and not run_of(stage).members.lost_members
    [line] = warnings(stage)
    assert line.startswith("worker-1 comes back when ") and line.endswith(" can be reached")
    meetings = [[message["meeting"] for message in worker.sent] for worker in stage.workers]
    assert meetings == [[0], [0], [1], [1]]  # its devices meet anew
    stage.take(3, MemberEvent(status="joined"))
    stage.take(2, MemberEvent(status="joined"))
    assert [event.status for event in stage.events if isinstance(event, MemberEvent)] == ["lost", "joined"]
    assert run_of(stage).members.active_ranks == [0, 1, 2, 3]


def test_a_member_that_says_why_it_fails_stays_out(make_stage: Make) -> None:
    stage = make_stage()
    loses(stage, "ran out of memory in its stage")
    for _ in range(2):
        run_of(stage).look()
    assert run_of(stage).members.lost_members == [1]
    reason = "worker-1-stage-2: ran out of memory in its stage"
    [line] = warnings(stage)
    assert line.startswith(f"worker-1 stays out until it is added: {reason}; to add it: ")
    assert line.endswith(" add worker-1")


def test_a_member_that_is_lost_again_and_again_stays_out(make_stage: Make) -> None:
    stage = make_stage()
    for attempt in range(5):
        loses(stage)
        run_of(stage).look()
        if attempt == 1:  # then there are three more
            stage.take(2, step(9))
    assert run_of(stage).members.joining == {2, 3}
    loses(stage)
    run_of(stage).look()
    assert run_of(stage).members.lost_members == [1]
    assert "it was lost again before it had made a step, 3 times; to add it: " in warnings(stage)[-1]


def test_of_members_of_one_device_those_come_back_that_nothing_was_heard_of(tmp_path: Path) -> None:
    taken: list[MemberPlan] = []
    stage = Stage(tmp_path, kind=partial(ReturningRun, take_back=taken.append, is_back=lambda machines: True))
    with stage.folder:
        stage.take(0, RunEvent(status="running"))
        for rank in (1, 2):
            stage.take(-1, MemberEvent(member=rank, status="lost", name=f"worker-{rank}", message="silent for 5 s"))
        stage.ends(1, 255, "could not be reached for 40 s")
        stage.ends(2, -signal.SIGKILL)
        run_of(stage).look()
        assert [member.name for member in taken] == ["worker-1"]
        (away,) = warnings(stage)
        assert away.startswith("worker-2 does not come back by itself: its worker was killed")
        stage.run.kill()


def test_a_run_that_ends_takes_nobody_back(make_stage: Make) -> None:
    stage = make_stage()
    loses(stage)
    stage.run.request_stop("enough")
    with pytest.raises(BadInput, match="the run is about to end"):
        stage.run.admit(1)
    run_of(stage).look()
    assert not warnings(stage)
