"""What readers of a run, the report among them, take from its events."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from app.run_view.run_series import Point, coarser, evaluation_series, of_run
from app.run_view.run_state import reduce_events
from app.run_view.tables.machine_changes import machine_changes
from tests.app.app_events import MEMBER_EVENTS, RUN_EVENTS, evaluation, rank, step, sync
from training.records.events import ErrorEvent, Event, MemberEvent, RunEvent, WarningEvent

MEMBERS = st.tuples(MEMBER_EVENTS, rank).map(lambda pair: pair[0].model_copy(update={"member": pair[1]}))


def curve(events: list[Event], name: str = "loss", width: int = 1) -> list[Point]:
    return coarser(of_run(reduce_events(events).curves, name), width).points()


@given(st.lists(MEMBERS | RUN_EVENTS, max_size=60), st.integers(0, 6))
def test_any_events_give_a_curve_in_order(events: list[Event], doubled: int) -> None:
    drawn = curve(events, width=1 << doubled)
    steps = [point.step for point in drawn]
    assert steps == sorted(set(steps))
    for point in drawn:
        assert (point.low <= point.mean + 1e-6 and point.mean <= point.high + 1e-6) or math.isinf(point.mean)
    machine_changes(reduce_events(events))


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(-5, 5)), min_size=1, max_size=200))
def test_no_peak_is_lost_in_a_curve_of_few_points(steps: list[tuple[int, float]]) -> None:
    kept = dict(steps)
    drawn = curve([step(number, loss=loss) for number, loss in sorted(kept.items())], width=64)
    assert max(point.high for point in drawn) == max(kept.values())
    assert len(drawn) <= 8


def test_steps_after_a_resume_replace_those_that_they_repeat_and_the_work_counts() -> None:
    first: list[Event] = [step(number, loss=1.0, samples=4, bytes_sent=10) for number in range(1, 7)]
    second = [step(number, loss=2.0, samples=4, bytes_sent=10) for number in range(4, 6)]
    events = [*first, MemberEvent(member=0, status="started"), *second]
    assert [(point.step, point.mean) for point in curve(events)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    member = reduce_events(events).members[0]
    assert (member.work.steps, member.work.bytes_sent) == (2, 20)
    assert (member.total.steps, member.total.bytes_sent, member.total.seconds) == (8, 80, 8.0)


def test_loss_is_weighted_and_speeds_of_members_add_up() -> None:
    slow = step(1, member=0, loss=1.0, weight=30, samples=30, compute=2.0, wait=1.0)
    quick = step(1, member=1, loss=2.0, weight=10, samples=10, compute=0.25, wait=0.25)
    (point,) = curve([slow, quick])
    assert (point.mean, point.low, point.high) == (1.25, 1.0, 2.0)
    (point,) = curve([slow, quick], "samples/s")
    assert point.mean == 10 + 20


def test_bytes_are_those_of_steps_or_of_synchronisations() -> None:
    work = reduce_events([step(10, bytes_sent=5), sync(1), sync(2)]).members[0].work
    assert (work.bytes_sent, work.bytes_received) == (200, 400)
    assert (work.syncs, work.sync_seconds) == (2, 1.0)


def test_evaluations_of_a_split_are_in_order() -> None:
    points = curve(
        [evaluation(0, 0.9), evaluation(20, 0.4), evaluation(10, 0.5)], evaluation_series("validation", "wer")
    )
    assert [(point.step, point.mean) for point in points] == [(0, 0.9), (10, 0.5)]


def test_a_machine_that_is_lost_and_back_is_marked_once_each_and_the_usual_start_and_end_are_not() -> None:
    def member(status: str, time: float) -> MemberEvent:
        return MemberEvent.model_validate({"member": 0, "status": status, "time": time})

    begin = RunEvent(status="running", total_steps=4, time=0)
    lost = [member("lost", 3), step(2), member("failed", 4), member("lost", 5), member("left", 6)]
    events = [begin, member("joined", 1), step(2), *lost, member("joined", 7), member("ready", 8)]
    state = reduce_events([*events, member("joined", 9), step(4, time=10), member("left", 11)])
    assert [(one.kind, round(at)) for at, one in machine_changes(state)] == [("lost", 2), ("back", 4)]


def test_a_newcomer_is_marked_where_it_came_and_a_failure_where_it_was() -> None:
    others: list[Event] = [step(n, member=0) for n in range(1, 9)]
    joins = MemberEvent(member=1, status="joined", time=4.0, name="b")
    failed = ErrorEvent(member=1, message="out of memory", time=6.5)
    state = reduce_events([*others, joins, step(5, member=1), step(6, member=1), failed])
    assert [(one.kind, one.member, round(at)) for at, one in machine_changes(state)] == [
        ("machine", 1, 4),
        ("error", 1, 6),
    ]


def test_a_flood_of_warnings_is_bounded_and_the_errors_hint_is_kept() -> None:
    warnings = [WarningEvent(message=f"number {number}", time=float(number)) for number in range(1000)]
    state = reduce_events([ErrorEvent(message="broken", hint="mend it", time=1), *warnings])
    kept = state.timeline["warning"]
    assert (len(kept.entries), kept.count) == (200, 1000)
    assert [one.hint for one in state.errors] == ["mend it"]


def test_a_stop_and_going_on_later_are_no_losses() -> None:
    def all_of(status: str, time: float, message: str = "") -> list[Event]:
        found = {"status": status, "message": message}
        return [MemberEvent.model_validate({**found, "member": rank, "time": time + rank / 10}) for rank in (0, 1)]

    def steps(first: int, last: int) -> list[Event]:
        return [step(n, member=rank) for n in range(first, last + 1) for rank in (0, 1)]

    stopped = [*all_of("left", 9, "stopped by the user"), RunEvent(status="cancelled", time=10)]
    events = [*all_of("joined", 0), *steps(1, 8), *stopped, *all_of("started", 11), *all_of("joined", 12)]
    events += [step(n, time=12 + n) for n in range(9, 13)]
    dropped = MemberEvent(member=1, status="left", message="dropped", time=20.5)
    assert machine_changes(reduce_events(events)) == []
    found = machine_changes(reduce_events([*events, dropped, *all_of("left", 24, "stopped by the user")]))
    assert [(one.member, one.status) for _, one in found] == [(1, "left")]


def test_a_machine_is_back_where_it_takes_its_first_step() -> None:
    def member(status: str, time: float) -> MemberEvent:
        return MemberEvent.model_validate({"member": 1, "status": status, "time": time})

    others: list[Event] = [step(n, member=0) for n in range(1, 13)]
    own: list[Event] = [step(n, member=1) for n in (1, 2, 3)]
    late = step(4, member=1, time=4.5)  # of when it was cut off
    events = [*others, member("joined", 0), *own, member("lost", 4), late]
    events += [member("started", 6), member("joined", 7), member("ready", 8), step(10, member=1)]
    assert [round(at) for at, _ in machine_changes(reduce_events(events))] == [3, 10]
