from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from distributed.run.request_desk import LocalMachines, RequestDesk
from distributed.run.requests import leave_request
from profiles.errors import BadInput
from profiles.resolve import profile_from_options
from training.events import Event, MemberEvent, RequestEvent, RunEvent, SnapshotEvent
from training.local_plan import plan_local_run
from training.local_run import LocalRun


class Told:
    """A run that notes what it is told to do."""

    class members:
        taking_part = (0, 1)
        lost: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.done: list[Any] = []

    def command(self, name: str) -> None:
        self.done.append(name)

    def request_stop(self, message: str) -> None:
        self.done.append("stop")

    def drop(self, ranks: tuple[int, ...]) -> None:
        self.done.append(("drop", *ranks))

    def check_changeable(self) -> None:
        raise BadInput("the torch engine keeps the members that it began with", "start again")


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Told()
        self.said: list[Event] = []
        plan = plan_local_run(profile_from_options("p", {"task": "causal_lm", "model_path": "owner/name"}), 2)
        self.desk = RequestDesk(cast(LocalRun, self.run), folder, self.said.append, LocalMachines(plan))

    def ask(self, *words: Any) -> None:
        leave_request(self.folder, *words)
        self.desk.poll()

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        return [(event.outcome, event.message) for event in self.said if isinstance(event, RequestEvent)]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_snapshot_is_done_when_all_have_written_theirs(desk: Desk) -> None:
    desk.ask("snapshot")
    desk.desk(SnapshotEvent(member=0, step=9, path="", bytes=1, seconds=0))
    assert desk.outcomes == [("accepted", "")]
    desk.desk(SnapshotEvent(member=1, step=9, path="", bytes=1, seconds=0))
    assert desk.outcomes[1:] == [("done", "of step 9")]
    assert desk.run.done == ["snapshot"]


def test_one_that_is_lost_before_its_goodbye_is_gone_too(desk: Desk) -> None:
    desk.ask("drop", "worker-1")
    desk.desk(MemberEvent(member=1, status="lost", message="killed by signal 9"))
    assert desk.run.done == [("drop", 1)]
    assert desk.outcomes == [("accepted", ""), ("done", "killed by signal 9")]


def test_what_cannot_be_is_refused_with_its_reason(desk: Desk) -> None:
    desk.ask("resume")
    desk.ask("drop", "worker-7")
    desk.ask("add", "worker-1")
    assert [outcome for outcome, _ in desk.outcomes] == ["refused"] * 3
    reasons = [message for _, message in desk.outcomes]
    assert reasons[0] == "the run is not paused"
    assert reasons[1] == "no member 'worker-7' in this run (known: worker-0, worker-1)"
    assert reasons[2].startswith("the torch engine keeps")


def test_after_a_fault_of_ours_a_stop_is_still_heard(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(ranks: tuple[int, ...]) -> None:
        raise RuntimeError("no such thing")

    desk.run.drop = broken  # type: ignore[method-assign]  # for the test alone
    leave_request(desk.folder, "drop", "worker-1")
    desk.ask("stop")
    assert desk.outcomes == [("refused", "unexpected RuntimeError: no such thing"), ("accepted", "")]
    assert desk.run.done == ["stop"] and "Traceback" in capsys.readouterr().err


def test_nothing_stays_without_an_answer_at_the_end(desk: Desk) -> None:
    desk.ask("pause")
    desk.ask("stop")
    leave_request(desk.folder, "snapshot")
    desk.desk(RunEvent(status="cancelled"))
    ends = [(e.action, e.outcome) for e in desk.said if isinstance(e, RequestEvent) and e.outcome != "accepted"]
    assert ends == [("pause", "refused"), ("stop", "done"), ("snapshot", "refused")]
