"""When a run of a model on several machines goes on by itself, and when it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributed import supervision
from distributed.hosts.schema import Hosts, Machine
from distributed.preparation.prepare import PrepareOptions
from distributed.run import lasting_run
from distributed.run.lasting_run import GOES_ON, LastingRun
from profiles.errors import BadInput, ExitCode
from tests.runs.run_stage import Stage
from training.records.events import ErrorEvent, RunEvent, SnapshotEvent, WarningEvent
from training.run.outcome import NewestAttempt

LOST_PEER = "a-stage-1: the connection with rank 1 (b-stage-2) is lost: it closed the connection"
Make = Callable[..., Stage]


@pytest.fixture
def make_stage(tmp_path: Path) -> Iterator[Make]:
    """Return a function that makes a run on machines a, b and c that trains, with what prepares its next attempt."""
    stages: list[Stage] = []

    def make(
        go_on: Callable[[Sequence[str]], str] = pytest.fail, is_back: Callable[[Sequence[str]], bool] | None = None
    ) -> Stage:
        kind = partial(LastingRun, go_on=go_on, is_back=is_back)
        stage = Stage(tmp_path, kind=kind, machines="abc", layout="pipeline")
        stages.append(stage)
        stage.take(0, RunEvent(status="running"))
        return stage

    yield make
    for stage in stages:
        stage.run.kill()
        stage.folder.close()


def fails(stage: Stage, rank: int, message: str = LOST_PEER) -> None:
    stage.take(rank, ErrorEvent(message=message, exit_code=ExitCode.RUN_FAILED))
    stage.ends(rank, ExitCode.RUN_FAILED)


@pytest.mark.parametrize(("code", "others_first"), [(-signal.SIGKILL, False), (-signal.SIGKILL, True), (255, True)])
def test_a_run_goes_on_without_the_machine_that_ended_silently(code: int, others_first: bool, make_stage: Make) -> None:
    stage = make_stage(lambda machines: f"goes on without {', '.join(machines)}")
    if not others_first:
        stage.ends(1, code)
    for rank in (0, 2):
        fails(stage, rank)
    if others_first:
        stage.ends(1, code)
    outcome = stage.run.outcome()
    assert (outcome.status, outcome.message) == (GOES_ON, "goes on without b")
    assert isinstance(stage.events[-1], WarningEvent)
    assert not any(isinstance(event, RunEvent) and event.status == "failed" for event in stage.events)
    assert stage.folder.metadata.status == "running"


def test_a_run_that_cannot_go_on_says_why(make_stage: Make) -> None:
    def refuse(machines: Sequence[str]) -> str:
        raise BadInput("no snapshot is whole on these machines", "add the others")

    stage = make_stage(refuse)
    stage.ends(1, -signal.SIGKILL)
    fails(stage, 0)
    fails(stage, 2)
    outcome = stage.run.outcome()
    assert outcome.status == "failed" and "b-stage-2 ended before its work was done" in outcome.message
    [warning] = [event.message for event in stage.events if isinstance(event, WarningEvent)]
    assert warning == "the run does not go on without b: no snapshot is whole on these machines (add the others)"


def cannot_without_b(machines: Sequence[str]) -> str:
    if machines:
        raise BadInput("no snapshot is whole on these machines", "add the others")
    return "the run goes on with a, b, c"


def test_a_run_that_cannot_go_on_is_paused_until_the_machine_is_back(
    make_stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_run, "_LOOKS_EVERY", 0.001)
    statuses: list[str] = []

    def is_back(machines: Sequence[str]) -> bool:
        statuses.append(stage.folder.metadata.status)
        assert machines == ["b"]
        return len(statuses) == 3

    stage = make_stage(cannot_without_b, is_back)
    stage.ends(1, -signal.SIGKILL)
    fails(stage, 0)
    fails(stage, 2)
    outcome = stage.run.outcome()
    assert (outcome.status, outcome.message) == (GOES_ON, "the run goes on with a, b, c")
    assert statuses == ["paused"] * 3
    assert any(isinstance(event, RunEvent) and event.status == "paused" for event in stage.events)
    warned = [event.message for event in stage.events if isinstance(event, WarningEvent)]
    assert warned[0].startswith("the run waits for b, without which it cannot go on: no snapshot is whole")


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_run_that_is_stopped_while_it_waits_has_not_failed(
    goes_on: bool, make_stage: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_run, "_LOOKS_EVERY", 0.001)

    def is_back(machines: Sequence[str]) -> bool:
        stage.run.request_stop("stopped by the user")
        return goes_on

    stage = make_stage(cannot_without_b, is_back)
    stage.take(0, SnapshotEvent(step=4, path="", bytes=1, seconds=0.1, live=(0,)))
    stage.ends(1, -signal.SIGKILL)
    fails(stage, 0)
    fails(stage, 2)
    outcome, message = stage.run.outcome(), "the snapshot of step 4 is kept, 0 steps lost"
    assert (outcome.status, outcome.exit_code, outcome.message) == ("cancelled", ExitCode.STOPPED, message)
    assert isinstance(stage.events[-1], RunEvent) and stage.events[-1].message == message
    assert stage.folder.metadata.metrics["kept_step"] == 4
    seen_later = NewestAttempt()
    for event in stage.folder.events():
        seen_later.note(event)
    seen = seen_later.outcome(stage.folder.path)
    assert (seen.status, seen.message, seen.hint) == ("cancelled", message, "")


def test_a_failure_that_is_reported_is_no_loss(make_stage: Make) -> None:
    stage = make_stage()
    fails(stage, 1, "b-stage-2: ran out of memory in its stage")
    fails(stage, 0)
    fails(stage, 2)
    assert stage.run.outcome().message == "b-stage-2: ran out of memory in its stage"


def test_a_run_that_is_to_stop_does_not_go_on(make_stage: Make) -> None:
    stage = make_stage()
    stage.ends(1, -signal.SIGKILL)
    stage.run.request_stop("enough")
    fails(stage, 0)
    fails(stage, 2)
    assert stage.run.outcome().status == "failed"


def test_what_is_said_each_time_while_a_run_waits_is_a_warning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(hosts: Hosts, task: str, options: PrepareOptions) -> None:
        options.tell("continuing without b: it does not answer")
        raise BadInput("no snapshot is whole on these machines", "add the others")

    monkeypatch.setattr(supervision, "prepare", prepare)
    warnings: list[object] = []
    supervisor: Any = SimpleNamespace(
        _folder=None,
        _plan=SimpleNamespace(machines=("a",), profile=SimpleNamespace(model=SimpleNamespace(task="text"))),
        _links={"a": SimpleNamespace(machine=Machine(name="a"))},
        _ssh_config="",
        _dial=None,
        _note=warnings.append,
        _warned=set(),
    )
    for _ in range(3):
        with pytest.raises(BadInput):
            supervision.Supervisor._go_on_without(supervisor, ())
    assert len(warnings) == 1
