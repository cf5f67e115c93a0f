from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import BadInput, RunFailed
from profiles.files.resolve import profile_from_options
from training.records.events import Event, MemberEvent, RequestEvent, RunEvent
from training.run.local_plan import plan_local_run
from training.run.orders import OrderEnd
from training.run.requests.request_book import Request, RequestBook, leave_request
from training.run.requests.request_server import LocalMachines, RequestServer
from training.run.run_controller import RunController


class Told:
    """A run that notes what it is told to do."""

    class members:
        taking_part = (0, 1)
        lost_members: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.then: list[OrderEnd] = []

    def command(self, action: str, then: OrderEnd) -> None:
        self.done.append(action)
        self.then.append(then)

    def request_stop(self, message: str) -> None:
        self.done.append("stop")

    def kill(self) -> None:
        self.done.append("kill")

    def drop(self, ranks: tuple[int, ...]) -> None:
        self.done.append(("drop", *ranks))

    def check_changeable(self) -> None:
        raise BadInput("the machines of a launched script cannot change", "start again")


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Told()
        self.said: list[Event] = []
        plan = plan_local_run(profile_from_options("p", {"task": "causal_lm", "model_path": "owner/name"}), 2)
        self.machines = LocalMachines(plan)
        self.desk = RequestServer(cast(RunController, self.run), folder, self.said.append, self.machines)

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
    assert desk.outcomes == [("accepted", "")]
    desk.run.then[0](9, "")
    assert desk.outcomes[1:] == [("done", "of step 9")]
    assert desk.run.done == ["snapshot"]


def test_a_snapshot_that_cannot_be_written_is_not_called_done(desk: Desk) -> None:
    desk.ask("snapshot")
    desk.run.then[0](9, "pc: the disk is full (free some space)")
    assert desk.outcomes[1:] == [("refused", "pc: the disk is full (free some space)")]


def test_who_asks_twice_for_a_pause_gets_one(desk: Desk) -> None:
    desk.ask("pause")
    desk.ask("pause")
    desk.run.then[0](4, "")
    desk.ask("pause")
    desk.ask("resume")
    desk.ask("resume")
    assert desk.run.done == ["pause", "resume"]
    assert desk.outcomes == [
        ("accepted", ""),
        ("refused", "the run is about to pause"),
        ("done", "the run is paused after step 4"),
        ("refused", "the run is already paused"),
        ("accepted", ""),
        ("refused", "the run is about to resume"),
    ]


def test_a_stop_is_answered_with_what_is_kept(desk: Desk) -> None:
    desk.ask("stop")
    desk.ask("pause")
    desk.desk(RunEvent(status="cancelled", message="the snapshot of step 9 is kept, 0 steps lost"))
    assert desk.outcomes == [
        ("accepted", ""),
        ("refused", "the run is stopping"),
        ("done", "the run is stopped: the snapshot of step 9 is kept, 0 steps lost"),
    ]


def test_a_request_that_comes_as_the_run_ends_finds_its_log_closed(tmp_path: Path) -> None:
    """Its thread says nothing more then: an error there would be written over what the command tells of the end."""

    def closed(event: Event) -> None:
        raise RunFailed("this run is open for reading only")

    plan = plan_local_run(profile_from_options("p", {"task": "causal_lm", "model_path": "owner/name"}), 2)
    desk = RequestServer(cast(RunController, Told()), tmp_path, closed, LocalMachines(plan))
    desk(RunEvent(status="completed"))
    leave_request(tmp_path, "snapshot")
    desk.poll()


ASKED = st.sampled_from(["stop", "kill", "pause", "resume", "snapshot", "drop", "add"])


@given(st.lists(st.tuples(st.one_of(ASKED, st.just("")), st.integers(0, 2)), max_size=25))
def test_whatever_is_asked_in_whatever_order_comes_to_one_end(steps: list[tuple[Any, int]]) -> None:
    book, told, orders = RequestBook(), [], list[Request]()
    for number, (action, rank) in enumerate(steps):
        if action:
            request = Request(id=str(number), action=action, machine="worker-1")
            try:
                told.append(book.accept(request))
            except BadInput as error:
                told.append(request.event("refused", str(error)))
                continue
            if action in ("drop", "add"):
                book.wait_for(request, {rank})
            elif action in ("pause", "resume", "snapshot"):
                orders.append(request)
        elif rank and orders:  # orders are carried out in turn
            told += book.end(orders.pop(0), "done")
        elif rank:
            told += book.complete_for("drop", rank, "left") + book.refuse("add", rank, "it is lost")
    turns = [a.action for a in told if a.outcome == "accepted" and a.action in ("pause", "resume")]
    assert turns == (["pause", "resume"] * len(turns))[: len(turns)]  # no pause but an open one holds the run
    restored = RequestBook()
    unanswered = restored.restore(told)  # in the place of one that was killed
    assert [request.id for request in unanswered] == list(book._open)
    assert all(restored.accept(request).outcome == "accepted" for request in unanswered)
    ends = told + book.close("cancelled", "stopped")
    for answer in told:
        outcomes = [other.outcome for other in ends if other.request == answer.request]
        assert outcomes in (["refused"], ["accepted", "refused"], ["accepted", "done"])


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
    assert reasons[2].startswith("the machines of a launched script cannot change")


def test_a_run_of_this_computer_says_how_one_with_other_machines_begins(desk: Desk) -> None:
    with pytest.raises(BadInput) as refused:
        desk.machines.prepare(Request(action="add", machine="ada@studio"))
    assert refused.value.message == "'ada@studio' cannot join: this run has only workers of this computer"
    assert refused.value.hint.endswith("train p --hosts localhost,user@host")


def test_after_a_fault_of_ours_a_stop_is_still_heard(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(ranks: tuple[int, ...]) -> None:
        raise RuntimeError("no such thing")

    desk.run.drop = broken  # type: ignore[method-assign]  # for the test alone
    leave_request(desk.folder, "drop", "worker-1")
    desk.ask("stop")
    assert desk.outcomes == [("accepted", ""), ("refused", "unexpected RuntimeError: no such thing"), ("accepted", "")]
    assert desk.run.done == ["stop"] and "Traceback" in capsys.readouterr().err


def test_nothing_stays_without_an_answer_at_the_end(desk: Desk) -> None:
    desk.ask("pause")
    desk.ask("stop")
    leave_request(desk.folder, "snapshot")
    desk.desk(RunEvent(status="cancelled"))
    ends = [(e.action, e.outcome) for e in desk.said if isinstance(e, RequestEvent) and e.outcome != "accepted"]
    assert sorted(ends) == [("pause", "refused"), ("snapshot", "refused"), ("stop", "done")]
