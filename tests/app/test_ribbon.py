"""What each machine did, by steps."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.run_view.ribbon import Ribbon, most_notable, moving_average, rate_of_run, ribbons, shares, steps_away, wait_of
from app.run_view.run_series import Series, add
from app.run_view.run_state import RunState, reduce_events
from tests.app.app_events import MEMBER_EVENTS, RUN_EVENTS, rank, step, sync
from training.records.events import Event, MemberEvent, RunEvent, SnapshotEvent


def lost_and_back() -> RunState:
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=40)]
    events += [MemberEvent(member=one, time=0, status="joined", name=name) for one, name in enumerate(("pc", "air"))]
    events += [step(n, member=one) for n in range(1, 11) for one in (0, 1)]
    events += [MemberEvent(member=1, time=10.5, status="lost", message="silent for 5 s")]
    events += [step(n, compute=0.5, wait=0.5) for n in range(11, 31)]
    events += [MemberEvent(member=1, time=30.5, status="joined", name="air", message="at step 30")]
    events += [step(n, member=one) for n in range(31, 41) for one in (0, 1)]
    saved = [SnapshotEvent(member=one, time=20, step=20, path="", bytes=1, seconds=0.5) for one in (0, 1)]
    return reduce_events([*events, *saved])


def test_a_machine_that_was_away_says_from_when_to_when_and_why() -> None:
    pc, air = ribbons(lost_and_back())
    assert pc.away == () and pc.snapshots == (20.0,)
    (away,) = air.away
    assert (away.start, away.text) == (10.0, "lost: silent for 5 s")
    assert away.until == pytest.approx(30.0, abs=1) and air.arrivals == (away.until,)
    assert steps_away(air, 40) == pytest.approx(20, abs=1) and steps_away(pc, 40) == 0


def test_why_a_machine_was_away_does_not_depend_on_what_it_is_called() -> None:
    lost = reduce_events([step(1, member=1), MemberEvent(member=1, time=2, status="lost", message="silent")])
    named = reduce_events([MemberEvent(member=1, time=3, status="joined", name="air")], lost)
    (away,) = ribbons(named)[0].away
    assert (away.status, away.text) == ("lost", "lost: silent")


def test_who_did_not_come_back_is_away_to_the_end() -> None:
    state = reduce_events([MemberEvent(member=1, time=41, status="lost", message="gone")], lost_and_back())
    assert ribbons(state)[1].away[-1].until == math.inf


def test_who_is_lost_again_before_its_first_step_was_away_from_then_on() -> None:
    again: list[Event] = [MemberEvent(member=1, time=45, status=status, name="air") for status in ("started", "ready")]
    again += [step(45, time=45), step(50, time=50)]
    gone = [MemberEvent(member=1, time=41, status="lost"), *again, MemberEvent(member=1, time=47, status="lost")]
    air = ribbons(reduce_events([*gone, step(60, time=60)], lost_and_back()))[1]
    assert [round(one.start) for one in air.away] == [10, 40, 47]
    assert steps_away(air, 60) == pytest.approx(20 + 5 + 13, abs=2)
    once_more = [MemberEvent(member=1, time=59, status="started"), MemberEvent(member=1, time=61, status="lost")]
    before = reduce_events([*gone, step(60, time=60)], lost_and_back())
    assert ribbons(reduce_events(once_more, before))[1].away == air.away  # it was never ready
    once_more.insert(1, MemberEvent(member=1, time=59.5, status="ready"))
    assert ribbons(reduce_events(once_more, before))[1].away[-1].start > 55


def test_a_machine_that_comes_and_goes_before_it_takes_a_step_was_away_once() -> None:
    there = MemberEvent(member=1, time=41.5, status="joined", name="air")
    lost = [MemberEvent(member=1, time=time, status="lost", message=why) for time, why in ((41, "cable"), (42, "late"))]
    back = [there.model_copy(update={"time": 43.0}), *(step(n, time=n) for n in range(41, 60)), step(60, member=1)]
    air = ribbons(reduce_events([lost[0], there, lost[1], *back], lost_and_back()))[1]
    assert [away.text for away in air.away] == ["lost: silent for 5 s", "lost: cable"]
    assert steps_away(air, 60) == pytest.approx(40, abs=1) and len(air.arrivals) == 2


def test_cells_are_where_the_steps_of_a_curve_are() -> None:
    pc, air = ribbons(lost_and_back())
    assert shares(pc.waits, 1, 40, 39)[9:11] == [0.25, 0.5]  # steps 10 and 11
    found = shares(air.waits, 1, 40, 39)
    assert found[9] == 0.25 and found[10:29] == [None] * 19 and found[30] == 0.25
    assert shares(pc.waits, 21, 30, 5) == [0.5] * 5


def test_shares_are_weighed_by_time() -> None:
    state = reduce_events([step(1, compute=9.0, wait=0.0), step(2, compute=0.0, wait=1.0)])
    assert shares(ribbons(state)[0].waits, 1, 2, 1) == [0.1]
    assert wait_of(ribbons(state)[0].waits) == 0.1


def test_at_its_own_pace_a_member_has_no_gaps() -> None:
    state = reduce_events([step(n, member=n % 2) for n in range(1, 21)])
    assert None not in shares(ribbons(state)[1].waits, 1, 19, 19)


def test_waiting_at_every_tenth_step_is_an_even_share_of_all() -> None:
    rhythm = [step(n, compute=1.0, wait=10.0 if n % 10 == 0 else 0.0) for n in range(1, 61)]
    waits = ribbons(reduce_events([*rhythm, *(sync(n) for n in range(1, 7))]))[0].waits
    assert {round(point.mean, 1) for point in waits.points()[5:55]} == {0.5}
    assert waits.count == 60 and wait_of(waits) == pytest.approx(0.5, abs=0.1)
    assert moving_average(waits, 1) is waits and moving_average(Series(), 9) == Series()


def test_rates_are_of_whole_rounds_and_every_step_that_exchanges_is_one() -> None:
    rhythm = [step(n, compute=1.0, wait=10.0 if n % 10 == 0 else 0.0) for n in range(1, 61)]
    state = reduce_events([*rhythm, *(sync(n) for n in range(1, 7))])
    assert {round(point.mean, 2) for point in rate_of_run(state).points()[5:55]} == {4.0}
    always = [step(n, wait=10.0 if n % 10 == 0 else 0.0, bytes_sent=9) for n in range(1, 61)]
    waits = ribbons(reduce_events([*always, *(sync(n) for n in range(1, 7))]))[0].waits
    assert waits.points()[9].mean > 0.9 and waits.points()[10].mean == 0


def test_what_a_gap_divides_stays_apart() -> None:
    series = Series()
    for number, share in ((1, 0.0), (2, 0.0), (9, 1.0), (10, 1.0)):
        series = add(series, number, share)
    assert moving_average(series, 8) == series


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 1), st.floats(0, 100)), max_size=40),
    st.floats(0, 5000), st.floats(0, 5000), st.integers(1, 90),
)  # fmt: skip
def test_any_window_has_its_cells(steps: list[tuple[int, float, float]], left: float, right: float, cells: int) -> None:
    series = Series()
    for number, share, seconds in sorted(steps):
        series = add(series, number, share, seconds)
    found = shares(series, left, right, cells)
    assert len(found) == cells and all(share is None or -1e-9 <= share <= 1 + 1e-9 for share in found)


def test_where_there_is_little_room_those_stay_that_explain_something() -> None:
    waits = [0.2, 0.2, 0.9, 0.2, 0.2]
    every = [Ribbon(place, add(Series(), 1, share)) for place, share in enumerate(waits)]
    every[3] = ribbons(lost_and_back())[1]
    every[3] = Ribbon(3, every[3].waits, every[3].away)
    assert [one.rank for one in most_notable(every, 3)] == [0, 2, 3]
    assert most_notable(every, 0) == []


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(RUN_EVENTS, st.builds(lambda e, r: e.model_copy(update={"member": r}), MEMBER_EVENTS, rank))))
def test_any_events_have_ribbons(events: list[Event]) -> None:
    state = reduce_events(events)
    assert [one.rank for one in ribbons(state)] == list(state.members)
