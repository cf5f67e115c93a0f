"""What members and coordinator say on its way into a run: nobody speaks for another, and nobody is drowned out."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiles.errors import ExitCode
from tests.runs.run_stage import Stage
from training.records.events import (
    ElectionEvent,
    ErrorEvent,
    Event,
    MemberEvent,
    PeerPath,
    RunEvent,
    SnapshotEvent,
    StepEvent,
    WarningEvent,
    WaysEvent,
)
from training.run import intake
from training.run.intake import STRIKES, Inbox


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    with stage.folder:
        stage.take(0, RunEvent(status="running"))
        yield stage
        stage.run.kill()


def step(number: int, **fields: Any) -> StepEvent:
    zero: dict[str, Any] = dict.fromkeys(("epoch", "loss", "learning_rate", "samples", "weight", "wait", "transfer"), 0)
    return StepEvent(step=number, **{**zero, "compute": 0.1, **fields})


def warnings(stage: Stage) -> list[str]:
    return [event.message for event in stage.events if isinstance(event, WarningEvent)]


def test_an_event_is_of_the_member_whose_connection_brought_it(stage: Stage) -> None:
    stage.take(1, step(1, member=2))
    stage.take(1, MemberEvent(status="ready", name="worker-0"))
    assert [event.member for event in stage.events[-2:]] == [1, 1]
    assert isinstance(stage.events[-1], MemberEvent) and stage.events[-1].name == "worker-1"


@pytest.mark.parametrize(
    "claim",
    [
        RunEvent(status="completed"),
        RunEvent(status="failed"),
        RunEvent(status="cancelled"),
        RunEvent(status="starting"),
        RunEvent(status="paused"),  # nobody has asked for it
        MemberEvent(member=0, status="left"),
        MemberEvent(member=1, status="lost"),
        step(10**9),
    ],
)
def test_what_is_not_a_members_to_say_is_a_warning_about_it(stage: Stage, claim: Event) -> None:
    before = len(stage.events)
    stage.take(1, claim)
    (told,) = stage.events[before:]
    assert isinstance(told, WarningEvent) and told.member == 1 and "worker-1 has written" in told.message
    assert stage.folder.metadata.status == "running" and not stage.run.members.left


def test_a_step_that_jumps_is_refused_and_a_step_that_follows_is_taken(stage: Stage) -> None:
    for number in (5, 6, 9, 7):
        stage.take(1, step(number))
    assert [event.step for event in stage.events if isinstance(event, StepEvent)] == [5, 6, 7]
    assert stage.run.members.workers[1].step == 7


def test_members_with_a_pace_of_their_own_leave_steps_out_and_never_go_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path, strategy="async_diloco")
    with stage.folder:
        for number in (5, 5, 9, 7, 2000):
            stage.take(1, step(number))
        stage.take(1, SnapshotEvent(step=12, path="x", bytes=1, seconds=1.0))
        stage.run.kill()
    assert [event.step for event in stage.events if isinstance(event, StepEvent)] == [5, 5, 9]
    assert any(isinstance(event, SnapshotEvent) for event in stage.events)


def test_a_warning_of_any_stage_is_seen_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, layout="pipeline")
    with stage.folder:
        for source, message in ((1, "a"), (0, "a"), (2, "a"), (2, "b"), (0, "c"), (0, "c"), (1, "c"), (1, "c")):
            stage.take(source, WarningEvent(message=message))
        stage.run.kill()
    assert warnings(stage) == ["a", "b", "c", "c"]


def test_who_joins_again_goes_on_where_the_others_are_and_never_back(stage: Stage) -> None:
    stage.take(0, step(200))
    for said in (step(5), MemberEvent(status="joined"), step(200), step(201), MemberEvent(status="joined"), step(7)):
        stage.take(1, said)
    told = [event.step for event in stage.events if isinstance(event, StepEvent) and event.member == 1]
    assert told == [5, 200, 201]


def test_the_coordinator_speaks_of_members_only(stage: Stage) -> None:
    before = len(stage.events)
    election = ElectionEvent(member=1, term=1, port=7)
    for claim in (step(1), RunEvent(status="failed"), MemberEvent(member=700, status="lost"), election):
        stage.take(intake.COORDINATOR, claim)
    assert all(isinstance(event, WarningEvent) for event in stage.events[before:])


def test_who_goes_on_like_this_is_lost_and_the_others_go_on(stage: Stage) -> None:
    line = b'{"kind":"warning","message":"\\ud800\x1b[2J"}'
    for _ in range(STRIKES):
        stage.run.take(1, line)
    assert stage.run.members.lost == [1] and stage.coordinator.sent == [{"ban": 1}]
    assert len(warnings(stage)) == 1 and len(stage.told(1)) == 1  # the first line, and the loss
    assert "\x1b" not in warnings(stage)[0] and len(warnings(stage)[0]) < 600
    stage.take(1, step(1))
    assert not any(isinstance(event, StepEvent) for event in stage.events)


def test_an_error_of_one_member_loses_that_member_and_not_the_run(stage: Stage) -> None:
    stage.take(intake.COORDINATOR, MemberEvent(member=1, status="left"))  # its good-bye, before it says why
    stage.take(1, ErrorEvent(message="its memory is full", exit_code=2))
    stage.ends(1, ExitCode.BAD_INPUT)
    assert stage.told(1) == [("left", ""), ("lost", "its memory is full")]
    assert stage.run.outcome().status == "completed"
    assert stage.folder.path.exists()


@pytest.mark.parametrize(("saved", "status"), [(True, "completed"), (False, "failed")])
def test_a_model_that_could_not_be_fetched_fails_the_run_unless_there_is_one(
    stage: Stage, saved: bool, status: str
) -> None:
    for rank in range(3):
        stage.take(rank, MemberEvent(status="done"))
    stage.take(0, ErrorEvent(message="its model could not be fetched"))
    if saved:
        stage.folder.model.mkdir()
    outcome = stage.run.outcome()
    assert (outcome.status, outcome.message) == (status, "" if saved else "its model could not be fetched")


def test_the_last_member_that_fails_is_the_run_that_fails(stage: Stage) -> None:
    for rank in range(3):
        stage.take(rank, ErrorEvent(message=f"error {rank}"))
    outcome = stage.run.outcome()
    assert (outcome.status, outcome.message) == ("failed", "error 2")


def test_beyond_its_budget_only_what_decides_something_is_kept(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BUDGET", 2000)
    for number in range(1, 101):
        stage.take(1, step(number))
    stage.take(1, MemberEvent(status="left"))
    written = list(stage.folder.events())
    assert 5 < sum(isinstance(event, StepEvent) for event in written) < 20
    assert stage.run.members.workers[1].step == 100 and stage.told(1) == [("left", "")]
    assert len(warnings(stage)) == 1 and "one a second" in warnings(stage)[0]


def test_a_clock_that_is_years_off_does_not_move_the_run(stage: Stage) -> None:
    stage.take(1, step(1, time=9e9))
    assert abs(stage.events[-1].time - time.time()) < 60


# ------------------------------------------------------------------------------------------------------------- inbox


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60))
def test_lines_of_a_source_keep_their_order_and_sources_take_turns(said: list[tuple[int, int]]) -> None:
    inbox = Inbox()
    for source, word in said:
        inbox.put(source, b"%d" % word)
    taken = [inbox.take() for _ in said]
    for source in range(4):
        assert [line for s, line in taken if s == source] == [b"%d" % word for s, word in said if s == source]
    pending = {source: sum(s == source for s, _ in said) for source in range(4)}
    for (one, _), (next_one, _) in itertools.pairwise(taken):
        pending[one] -= 1
        assert one != next_one or not any(left for source, left in pending.items() if source != one)


def test_a_flood_waits_and_does_not_delay_the_end_of_another() -> None:
    inbox = Inbox(capacity=1000)

    def shout() -> None:
        for _ in range(500):
            inbox.put(1, b"x" * 100)

    flood = threading.Thread(target=shout, daemon=True)
    flood.start()
    while inbox.held(1) < 1000:
        assert flood.is_alive()
    inbox.put(2, None)
    assert (2, None) in [inbox.take(), inbox.take()]
    assert inbox.held(1) <= 1000 and flood.is_alive()
    inbox.close()
    flood.join(60)
    assert not flood.is_alive()


def test_after_the_close_ends_are_still_told() -> None:
    inbox = Inbox()
    inbox.close()
    inbox.put(0, b"late")
    inbox.put(0, None)
    assert inbox.take() == (0, None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.binary(max_size=80) | st.text(max_size=40).map(lambda text: json.dumps({"kind": text}).encode()))
def test_no_line_of_a_member_raises(stage: Stage, line: bytes) -> None:
    for source in (0, intake.COORDINATOR):
        stage.run.take(source, line)


def test_an_election_is_of_the_member_that_tells_it(stage: Stage) -> None:
    stage.take(1, ElectionEvent(member=0, name="another", term=1, port=7))
    elected = stage.events[-1]
    assert isinstance(elected, ElectionEvent) and (elected.member, elected.name) == (1, "worker-1")


def test_ways_are_the_coordinators_to_tell_and_the_run_knows_the_names(stage: Stage) -> None:
    ways = (PeerPath(peer=0, how="relayed", name="another"), PeerPath(peer=7, how="dialled", name="nobody"))
    stage.take(intake.COORDINATOR, WaysEvent(member=1, ways=ways))
    told = stage.events[-1]
    assert isinstance(told, WaysEvent) and [(way.peer, way.name) for way in told.ways] == [(0, "worker-0")]
    stage.take(1, WaysEvent(ways=ways))
    assert "may not come from a member" in warnings(stage)[-1]
    stage.take(intake.COORDINATOR, WaysEvent(member=9, ways=ways))
    assert "an unknown member" in warnings(stage)[-1]
