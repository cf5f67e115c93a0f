"""How the end of each member is told in a run's events: once, with the first cause, and as stopped after a stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from profiles.errors import ExitCode
from profiles.installation import way_to_add
from tests.runs.run_stage import Script, Stage
from training.exchange.group.election import Successor
from training.exchange.group.quorum import next_term
from training.records.events import ErrorEvent, MemberEvent, RunEvent, WarningEvent
from training.records.plan import RunPlan
from training.workers import worker


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    with stage.folder:
        stage.take(0, RunEvent(status="running"))
        yield stage
        stage.run.kill()


def lost(message: str) -> MemberEvent:
    return MemberEvent(member=1, status="lost", name="worker-1", message=message)


@pytest.mark.parametrize("coordinator_first", [True, False])
def test_a_loss_is_told_once_with_its_first_cause(stage: Stage, coordinator_first: bool) -> None:
    if coordinator_first:
        stage.take(-1, lost("silent for 5 s"))
    stage.ends(1, 255, "could not be reached for 40 s")
    warnings = [event.message for event in stage.events if isinstance(event, WarningEvent)]
    final = "worker-1 does not come back by itself: could not be reached for 40 s; when it can train again: "
    command = way_to_add(stage.run.folder.path, "worker-1")
    assert warnings == ([final + command] if coordinator_first else [])
    if not coordinator_first:
        stage.take(-1, lost("silent for 5 s"))
    assert stage.told(1) == [("lost", "silent for 5 s" if coordinator_first else "could not be reached for 40 s")]
    causes = [event.ended_by for event in stage.events if isinstance(event, WarningEvent)]
    assert causes == ["could not be reached for 40 s"] * len(warnings)
    assert stage.run.members.lost == [1]


@pytest.mark.parametrize(("code", "memory"), [(-signal.SIGKILL, True), (1, False)])
def test_what_the_system_kills_may_have_taken_too_much_memory(stage: Stage, code: int, memory: bool) -> None:
    stage.run.members.lost = [0, 2]
    stage.ends(1, code)
    [error] = [event for event in stage.events if isinstance(event, ErrorEvent)]
    assert ("a smaller batch_size" in error.hint) is memory
    assert error.hint.endswith(".log")


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (-signal.SIGKILL, "its worker was killed by signal 9: often out of memory, or somebody ended it"),
        (-signal.SIGSEGV, "its worker was killed by signal 11: a crash in a compiled package"),
        (1, "its worker ended with exit code 1"),
    ],
)
def test_a_loss_names_its_usual_cause(stage: Stage, code: int, cause: str) -> None:
    stage.ends(1, code)
    assert stage.told(1) == [("lost", cause)]


def test_after_a_stop_every_member_has_stopped(stage: Stage) -> None:
    stage.take(-1, MemberEvent(member=2, status="lost", message="silent for 5 s"))
    stage.run.request_stop("stopped by the user")
    stage.take(0, MemberEvent(member=0, status="left", message="stopped by the user"))
    stage.take(-1, MemberEvent(member=0, status="left"))
    stage.ends(0, ExitCode.STOPPED)
    stage.take(-1, lost("its stream broke"))  # it was too slow, and is killed
    stage.ends(1, -signal.SIGKILL)
    stage.ends(2, 255, "could not be reached for 8 s")
    assert stage.told(0) == [("left", "stopped by the user")]
    assert stage.told(1) == [("left", "stopped by the user (its worker was killed, as it had not ended in time)")]
    assert stage.told(2) == [("lost", "silent for 5 s")]  # it was away before
    assert not any(isinstance(event, WarningEvent) for event in stage.events)


def test_a_loss_names_its_machine_once(stage: Stage) -> None:
    stage.take(1, ErrorEvent(member=1, message="worker-1: its memory is too small", machine="worker-1"))
    assert stage.told(1) == [("lost", "its memory is too small")]
    assert not any(isinstance(event, WarningEvent) for event in stage.events)


@pytest.mark.parametrize("cause_first", [True, False])
def test_a_pipeline_fails_with_the_cause_also_where_a_neighbour_reports_the_loss_before(
    tmp_path: Path, cause_first: bool
) -> None:
    loss = (0, "muster: recv uint8: the connection with rank 1 (worker-0-stage-2) is lost: it closed the connection")
    cause = (1, "worker-0-stage-2: ran out of memory in its stage")
    stage = Stage(tmp_path, layout="pipeline")
    with stage.folder:
        stage.take(0, RunEvent(status="running"))
        for rank, message in (cause, loss) if cause_first else (loss, cause):
            stage.take(rank, ErrorEvent(exit_code=ExitCode.RUN_FAILED, message=message))
        assert stage.run.outcome().message == cause[1]
        stage.run.kill()


def test_a_run_that_is_done_does_not_wait_for_a_machine_that_is_away(stage: Stage) -> None:
    stage.take(-1, lost("silent for 5 s"))
    stage.ends(0, ExitCode.DONE)
    assert stage.workers[1].signals == []  # it may come back, as long as another trains
    stage.ends(2, ExitCode.DONE)
    assert stage.workers[1].signals == [signal.SIGKILL]
    stage.run.note_end(1)
    assert stage.run.outcome().status == "completed"


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (lambda stage: [stage.ends(rank, ExitCode.DONE) for rank in (0, 2)], "the run ended before it had joined"),
        (lambda stage: stage.run.drop([1]), "it was dropped"),
    ],
    ids=["the run ends", "it is dropped"],
)
def test_who_is_joining_and_killed_for_it_is_told_why(stage: Stage, end: Callable[[Stage], object], cause: str) -> None:
    stage.ends(1, 255, "could not be reached for 40 s")
    stage.workers[1] = Script()
    stage.run.members.add_workers(1, {1: stage.workers[1]})
    end(stage)
    stage.run.note_end(1)
    assert stage.told(1)[1:] == [("lost", cause)]


@pytest.mark.parametrize(("last", "status"), [(ExitCode.STOPPED, "cancelled"), (ExitCode.DONE, "completed")])
def test_a_run_that_its_machines_have_stopped_is_not_completed(stage: Stage, last: ExitCode, status: str) -> None:
    """As by ``stop`` on one of them, while the machine that started it was gone: its snapshots are needed."""
    for rank, code in enumerate((ExitCode.STOPPED, ExitCode.STOPPED, last)):
        stage.ends(rank, code)
    outcome = stage.run.outcome()
    assert outcome.status == stage.folder.metadata.status == status
    assert ("kept_step" in outcome.metrics) == (status == "cancelled")


def test_the_end_of_one_that_had_voted_for_another_coordinator_counts_for_none_here(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that carries it may be out of reach, and go on with that vote."""
    monkeypatch.setattr(RunPlan, "elects", property(lambda plan: True))
    stage.ends(0, -signal.SIGKILL)
    assert stage.coordinator.sent == [{"ended": 0}]
    term = next_term(0, 1)
    stage.take(2, worker._election(stage.run.plan, 2, Successor(term, 1, 7)))
    stage.ends(2, -signal.SIGKILL)
    assert stage.coordinator.sent == [{"ended": 0}] and stage.run.meeting_point.elected == (1, term, 7)
