from __future__ import annotations

from typing import Any

import pytest
from run_folders import BEGAN, started, steps, view_of

from app.run_view.headline import headline, lag, problems, slowest
from app.run_view.run_state import RunState, TimeLeft, reduce_events
from distributed.planning.run_time import RunTime
from training.records.events import ErrorEvent, Event, MemberEvent, RunEvent, SnapshotEvent

LOST = MemberEvent(member=1, time=BEGAN + 21, status="lost", name="air", message="silent for 5 s")


def going(*more: Event, until: int = 20) -> RunState:
    return reduce_events([*started(), *steps(1, until), *more])


def words(state: RunState, now: float = BEGAN + 20, **more: Any) -> str:
    said = headline(view_of(state, now, **more))
    return " · ".join((said.word, *said.details))


def test_a_run_that_goes_well() -> None:
    assert words(going(), time=RunTime(95.0, "studio", 130.0, 12.0)) == (
        "Healthy · 3/3 machines · done in 1:20 · promised in 1:15 · studio alone in 1:50"
    )


def test_all_ends_are_said_in_the_same_way() -> None:
    assert words(going(), time=RunTime(10.0, "studio", 300.0, 12.0)).endswith(
        "done in 1:20 · promised 0:10 ago · studio alone in 4:40"
    )


def test_a_promise_stays_when_a_run_resumes_and_its_clock_stood_still_meanwhile() -> None:
    stopped = RunEvent(time=BEGAN + 20, status="cancelled")
    state = reduce_events([*started(at=BEGAN + 500), *steps(21, 24, at=BEGAN + 480)], going(stopped))
    assert "promised in 1:16" in words(state, BEGAN + 504, time=RunTime(100.0))


def test_with_fixed_steps_the_machine_alone_sees_fewer_samples() -> None:
    time = RunTime(0.0, "studio", 100.0, 12.0, fixed_steps=True)
    assert words(going(), time=time).endswith("done in 1:20 · studio alone in 1:20 (fewer samples)")


def test_slower_than_one_machine_alone_is_never_healthy() -> None:
    told = words(going(), time=RunTime(0.0, "studio", 0.0, 30.0))
    assert told.startswith("Slower than studio alone (0.80x) · 3/3 machines · stop it and train on studio alone")


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        (60, "Healthy · 3/3 machines · done in 1:20 · studio alone in 1:50"),
        (59, "Healthy · 3/3 machines · done in 1:20"),
        (30, "Healthy · 3/3 machines"),
        (5, "Healthy · 3/3 machines"),
    ],
)
def test_whole_parts_go_where_there_is_no_room(cells: int, shown: str) -> None:
    said = headline(view_of(going(), BEGAN + 20, time=RunTime(0.0, "studio", 130.0, 12.0))).within(cells)
    assert " · ".join((said.word, *said.details)) == shown


def test_without_a_prediction_no_speed_up_is_claimed() -> None:
    assert "alone" not in words(going())


def test_a_lost_machine_is_named_with_its_cause() -> None:
    assert words(going(LOST)).startswith("Degraded · 2/3 machines · air lost (silent for 5 s)")


def test_a_machine_that_is_back_is_over() -> None:
    back = MemberEvent(member=1, time=BEGAN + 30, status="joined", name="air")
    state = going(LOST, back, *steps(31, 40))
    assert words(state, BEGAN + 40).startswith("Healthy · 3/3")
    assert problems(state) == []


def test_the_root_cause_comes_first() -> None:
    after = ErrorEvent(member=2, time=BEGAN + 25, message="round failed")
    assert [one.text for one in problems(going(after, LOST))] == ["air lost: silent for 5 s", "round failed"]


def test_silence_is_noticed() -> None:
    assert words(going(), BEGAN + 60).startswith("Stalled · 3/3 machines · no step for 0:40")


def test_nobody_works_on_it() -> None:
    said = words(going(), live=False)
    assert said == "Interrupted · the process that ran it is gone · step 20/100 · no snapshot is kept, 20 steps lost"


def test_a_stopped_run_says_what_is_kept_and_what_is_lost() -> None:
    written = [SnapshotEvent(member=m, step=18, path="", bytes=1, seconds=1, live=(0, 1, 2)) for m in range(3)]
    end = RunEvent(time=BEGAN + 21, status="cancelled", message="the snapshot of step 18 is kept, 2 steps lost")
    assert words(going(*written, end)) == "Stopped · step 20/100 · the snapshot of step 18 is kept, 2 steps lost"


@pytest.mark.parametrize(("status", "word"), [("completed", "Completed"), ("failed", "Failed"), ("paused", "Paused")])
def test_what_the_run_says_of_itself(status: str, word: str) -> None:
    state = going(RunEvent.model_validate({"time": BEGAN + 21, "status": status, "message": "why"}))
    assert words(state).startswith(word)


def test_the_end_is_told_with_its_doubt() -> None:
    assert going().time_left(BEGAN + 20) == pytest.approx(TimeLeft(80.0, 0.0), abs=0.1)


def test_who_computes_longest_holds_the_others_up() -> None:
    state = reduce_events([*started(), *steps(1, 20, ranks=(0, 1)), *steps(1, 18, ranks=(2,), compute=1.5, wait=0.0)])
    brake = slowest(state)
    assert brake is not None
    assert (brake.rank, lag(state, brake)) == (2, 2)
