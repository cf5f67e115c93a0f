"""A run goes on under another controller when the first is killed: what its events say, and what is done again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from profiles.errors import ExitCode
from tests.app.app_events import step
from tests.runs.run_stage import Script, Stage
from training.records.events import (
    AnswerEvent,
    ErrorEvent,
    Event,
    MemberEvent,
    RunEvent,
    StepEvent,
    to_line,
)
from training.run.members.member_history import MemberHistory
from training.run.processes import NumberedLine
from training.run.run_controller import RunController


def member(rank: int, status: Any, line: int | None = None) -> MemberEvent:
    return MemberEvent(member=rank, status=status, line=line)


STARTED = [RunEvent(status="starting"), member(0, "started", 2), member(1, "started", 2), RunEvent(status="running")]


@pytest.mark.parametrize(
    ("events", "attached", "joining"),
    [
        ([], {0: 2, 1: 2}, set()),
        ([step(1, member=1, line=9), step(1, member=0, line=8)], {0: 8, 1: 9}, set()),
        ([member(1, "lost")], {0: 2, 1: 2}, set()),  # it may come back by itself
        ([member(1, "left", 9)], {0: 2}, set()),
        ([ErrorEvent(member=1, message="m", exit_code=1, line=9)], {0: 2}, set()),
        ([member(1, "left", 9), member(1, "started", 3)], {0: 2, 1: 3}, {1}),
        ([member(1, "left", 9), member(1, "started", 3), member(1, "joined", 5)], {0: 2, 1: 5}, set()),
        ([RunEvent(status="starting")], {}, set()),
    ],
)
def test_the_events_say_whose_workers_still_run(
    events: Sequence[Event], attached: dict[int, int], joining: set[int]
) -> None:
    history = MemberHistory.of([*STARTED, *events])
    assert (history.attached, history.joining) == (attached, joining)


def test_another_controller_goes_on_where_the_first_was_killed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    for rank in range(3):
        stage.take(rank, member(rank, "started"))
    stage.take(0, RunEvent(status="running"))
    stage.take(2, member(2, "left"))
    stage.run.take(1, NumberedLine.of(to_line(step(1)), 7))
    workers, adopted = [Script(), Script()], dict[int, int]()

    def adopt(rank: int, log: BinaryIO, *, line: int) -> Script:
        adopted[rank] = line
        return workers[rank]

    coordinator = Script()
    coordinator.tell_port(1)
    events: list[Event] = []
    run = RunController(stage.run.plan, stage.folder, events.append, start_coordinator=lambda config, log: coordinator)
    with stage.folder:
        run.take_over(adopt)
        assert adopted == {0: 0, 1: 7} and run.members.active_ranks == [0, 1]
        run.take(1, to_line(step(2)).encode())
        run.take(1, to_line(RunEvent(status="running")).encode())  # the run trains: that is no news
        assert [type(event) for event in events[1:]] == [StepEvent]
        run.command("snapshot")
        (order,) = {message["order"] for message in workers[0].sent if message.get("command") == "meet"}
        run.take(0, to_line(AnswerEvent(order=1, step=5)).encode())  # to the first controller
        assert order > 1 and all(message.get("command") != "snapshot" for message in workers[0].sent)
        for rank in range(2):
            workers[rank].end(ExitCode.DONE)
            run.note_end(rank)
        assert run.outcome().status == "completed"
        run.kill()
