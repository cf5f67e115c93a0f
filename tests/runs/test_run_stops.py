"""The end of a run before its work is done: asked for, agreed upon, waited for, and told."""

from __future__ import annotations

import io
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profiles.errors import ExitCode, RunFailed
from tests.runs.run_stage import Script, Stage
from tests.waiting import until
from training.records.events import AnswerEvent, ErrorEvent, Event, MemberEvent, RunEvent, SnapshotEvent, StepEvent
from training.run.meeting_point import MeetingPoint, StartCoordinator
from training.run.stopping import ProgressMonitor


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    with stage.folder:
        yield stage
        stage.run.kill()


def step(number: int, seconds: float = 0.001) -> StepEvent:
    return StepEvent(step=number, epoch=0, loss=1, learning_rate=1, samples=1, weight=1, compute=seconds, wait=0,
                     transfer=0)  # fmt: skip


def train(stage: Stage, *steps: int) -> None:
    """Let each member take so many steps."""
    stage.take(0, RunEvent(status="running"))
    for rank, count in enumerate(steps):
        for number in range(1, count + 1):
            stage.take(rank, step(number))


def words(stage: Stage, rank: int) -> list[tuple[str, int]]:
    return [(said["command"], said.get("at_step", 0)) for said in stage.workers[rank].sent if "command" in said]


def stop(stage: Stage) -> int:
    """Ask for a stop; return the number of the order when all have been asked where they are."""
    stage.run.request_stop("stopped by the user")
    until(lambda: words(stage, 2) == [("meet", 0)])
    return int(stage.workers[2].sent[-1]["order"])


def test_all_stop_after_the_first_step_that_all_can_reach_and_it_is_said_what_is_kept(stage: Stage) -> None:
    train(stage, 5, 6, 5)
    order = stop(stage)
    for rank, ahead in enumerate([6, 7, 6]):
        assert words(stage, 0) == [("meet", 0)]
        stage.take(rank, AnswerEvent(order=order, step=ahead))
    assert [words(stage, rank)[1:] for rank in range(3)] == [[("stop", 7)]] * 3
    for rank, last in enumerate([5, 6, 5]):
        for number in range(last + 1, 8):
            stage.take(rank, step(number))
        stage.take(rank, SnapshotEvent(step=7, path="a", bytes=1, seconds=0.1, live=(0, 1, 2)))
        stage.workers[rank].end(ExitCode.STOPPED)
    outcome = stage.run.wait()
    assert (outcome.exit_code, outcome.message) == (130, "the snapshot of step 7 is kept, 0 steps lost")
    assert (outcome.metrics["kept_step"], outcome.metrics["lost_steps"]) == (7, 0)
    assert stage.folder.metadata.error_message == outcome.message
    assert not any(worker.signals for worker in stage.workers)


def test_where_the_run_cannot_be_written_down_members_keep_what_they_have_done(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(stage, 5, 5, 5)
    monkeypatch.setattr(stage.folder, "append", fail_to_write)
    for worker in stage.workers:
        worker.say(step(6))
        worker.on_stop = ExitCode.STOPPED
    with pytest.raises(RunFailed, match="the disk is full"):
        stage.run.wait()
    for worker in stage.workers:
        assert not worker.signals
        order = worker.sent[-1]
        assert (order["command"], order["reason"], order["within"] > 0) == ("stop", "the disk is full", True)


def fail_to_write(event: Event) -> Event:
    raise RunFailed("the disk is full", "free space")


def test_a_lost_member_is_not_waited_for(stage: Stage) -> None:
    train(stage, 1, 1, 1)
    order = stop(stage)
    stage.take(0, AnswerEvent(order=order, step=2))
    stage.take(2, AnswerEvent(order=order, step=2))
    stage.take(-1, MemberEvent(member=1, status="lost", message="silent for 5 s"))
    assert words(stage, 0)[1:] == [("stop", 2)]
    stage.ends(0, ExitCode.STOPPED)
    assert not stage.workers[1].signals
    stage.ends(2, ExitCode.STOPPED)
    assert stage.workers[1].signals == [signal.SIGKILL]  # nobody is left whom it could hold up


def test_one_that_makes_no_progress_is_killed_and_the_loss_is_told(stage: Stage) -> None:
    stage.progress.least_patience = 0.05
    train(stage, 3, 3, 3)
    stop(stage)
    outcome = stage.run.wait()
    assert all(worker.signals for worker in stage.workers)
    assert outcome.message == "no snapshot is kept, 3 steps lost"


def test_who_was_stopped_itself_takes_that_for_nobodys_silence(stage: Stage) -> None:
    """As by Ctrl-Z, after Ctrl-C."""
    looks, away = list[int](), 0.0

    def clock() -> float:
        looks.append(1)
        return time.monotonic() + away

    train(stage, 3, 3, 3)
    stage.progress.clock = clock
    stop(stage)
    away = 10 * stage.progress.patience
    seen = len(looks)
    until(lambda: len(looks) > seen + 8)  # two or three looks at the members
    assert not any(worker.signals for worker in stage.workers)


def test_one_that_cannot_write_its_snapshot_says_why(stage: Stage) -> None:
    train(stage, 1, 1, 1)
    stop(stage)
    stage.take(0, ErrorEvent(message="no space left on the disk"))
    for worker in stage.workers:
        worker.end(ExitCode.STOPPED)
    outcome = stage.run.wait()
    assert outcome.status == "cancelled"
    assert outcome.message == "no snapshot is kept, 1 step lost; no space left on the disk"


def test_before_the_first_step_nothing_is_waited_for(stage: Stage) -> None:
    stage.run.request_stop("stopped by the user")
    outcome = stage.run.wait()
    assert (outcome.status, outcome.message) == ("cancelled", "no step was taken, so there is nothing to keep")


def test_a_run_that_comes_to_its_end_meanwhile_is_complete(stage: Stage) -> None:
    train(stage, 1, 1, 1)
    stop(stage)
    for worker in stage.workers:
        worker.end(ExitCode.DONE)
    assert stage.run.wait().status == "completed"


def test_a_coordinator_that_dies_at_the_end_of_a_run_is_not_started_again(stage: Stage) -> None:
    started: list[Script] = []
    said: list[Iterator[bytes]] = []

    def start(config: object, log: object) -> Script:
        started.append(Script())
        started[-1].tell_port(1)
        started[-1].stop()
        return started[-1]

    engine = MeetingPoint(stage.run.plan, stage.folder, lambda name: io.BytesIO(), said.append, start_coordinator=start)
    engine.start()
    assert b"is started again" in next(said[0])
    engine.stop()
    assert list(said[0]) == [] and len(started) == 1


def test_a_coordinator_is_started_again_where_it_was_as_soon_as_its_port_is_free(stage: Stage) -> None:
    ports: list[int] = []

    def start(config: Any, log: object) -> Script:
        one = Script()
        if len(ports) == 2:
            one.refuse("cannot listen on 127.0.0.1:7", "coordinator_port")
        else:
            one.tell_port(7)
        ports.append(config["port"])
        one.stop()
        return one

    lines = coordinator_lines(stage, start)
    assert [b"is started again" in next(lines) for _ in range(4)] == [True] * 4
    (last,) = lines
    assert b"ended 5 times as soon as it had started" in last
    assert ports == [0, 7, 7, 7, 7, 7]


def test_a_coordinator_that_ends_now_and_then_is_always_started_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(step=1000.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))

    def start(config: object, log: object) -> Script:
        one = Script()
        one.tell_port(1)
        one.stop()
        return one

    lines = coordinator_lines(stage, start)
    assert all(b"is started again" in next(lines) for _ in range(20))


@pytest.mark.parametrize("killed", [[1], [1, 2, 3]])
def test_a_coordinator_that_is_killed_while_it_starts_is_started_again(stage: Stage, killed: list[int]) -> None:
    tries = itertools.count()

    def start(config: object, log: object) -> Script:
        one = Script()
        if next(tries) not in killed:
            one.tell_port(7)
        one.stop()
        return one

    lines = list(coordinator_lines(stage, start))
    assert sum(b"ended unexpectedly and is started again" in line for line in lines) == 4
    assert b"ended 5 times as soon as it had started" in lines[-1] and next(tries) == 5


def test_a_coordinator_that_cannot_be_started_again_is_told(stage: Stage) -> None:
    tries = itertools.count()

    def start(config: object, log: object) -> Script:
        one = Script()
        if not next(tries):
            one.tell_port(1)
        else:
            one.refuse("the certificates are gone", "")
        one.stop()
        return one

    _, last = coordinator_lines(stage, start)
    assert b"cannot be started again: the certificates are gone" in last


class Log(io.BytesIO):
    name = "coordinator.log"


def coordinator_lines(stage: Stage, start: StartCoordinator) -> Iterator[bytes]:
    """Start an engine with such coordinators; return what it says of them."""
    said: list[Iterator[bytes]] = []
    MeetingPoint(stage.run.plan, stage.folder, lambda name: Log(), said.append, start_coordinator=start).start()
    return said[0]


def test_only_steps_towards_the_end_are_progress() -> None:
    now = 100.0
    progress = ProgressMonitor(clock=lambda: now)
    progress.last_step = 5
    now += 10
    progress(step(5))
    assert progress.silence == 0
    now += 10
    progress(step(6))
    progress(SnapshotEvent(step=5, path="a", bytes=1, seconds=1))
    assert progress.silence == 0
    now += 10
    progress(SnapshotEvent(step=5, path="a", bytes=1, seconds=1))
    progress(step(7))
    assert progress.silence == 10
