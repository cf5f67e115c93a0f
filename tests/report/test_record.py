"""What a report takes from the events."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from app.html_report.record import Record, curve, record_of
from tests.app.app_events import MEMBER_EVENTS, RUN_EVENTS, evaluation, rank, step, sync
from training.events import ErrorEvent, Event, MemberEvent, RunEvent, WarningEvent

MEMBERS = st.tuples(MEMBER_EVENTS, rank).map(lambda pair: pair[0].model_copy(update={"member": pair[1]}))


@given(st.lists(MEMBERS | RUN_EVENTS, max_size=60), st.integers(1, 20))
def test_any_events_give_a_curve_in_order(events: list[Event], points: int) -> None:
    drawn = curve(record_of(events), points)
    steps = [point.step for point in drawn]
    assert steps == sorted(set(steps))
    assert len(drawn) <= points + 1  # step 0 lies before the first bucket
    for point in drawn:
        if point.loss is not None and point.low is not None and point.high is not None:
            assert (point.low <= point.loss + 1e-6 and point.loss <= point.high + 1e-6) or math.isinf(point.loss)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(-5, 5)), min_size=1, max_size=200))
def test_no_peak_is_lost_in_a_curve_of_few_points(steps: list[tuple[int, float]]) -> None:
    kept = dict(steps)
    record = record_of(step(number, loss=loss) for number, loss in sorted(kept.items()))
    drawn = curve(record, 10)
    assert max(point.high or -9 for point in drawn) == max(kept.values()) or max(kept.values()) == 0
    assert len(drawn) <= 10


def test_steps_after_a_resume_replace_those_that_they_repeat() -> None:
    first = [step(number, loss=1.0, samples=4, bytes_sent=10) for number in range(1, 7)]
    second = [step(number, loss=2.0, samples=4, bytes_sent=10) for number in range(4, 6)]
    start = RunEvent(status="starting", time=0)
    record = record_of([start, *first, start, *second])
    assert [(point.step, point.loss) for point in curve(record)] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert record.totals[0].steps == 8
    assert record.totals[0].bytes == (80, 0)
    assert record.attempts == 2


def test_loss_is_weighted_and_speeds_of_members_add_up() -> None:
    slow = step(1, member=0, loss=1.0, weight=30, samples=30, compute=2.0, wait=1.0)
    quick = step(1, member=1, loss=2.0, weight=10, samples=10, compute=0.25, wait=0.25)
    (point,) = curve(record_of([slow, quick]))
    assert (point.loss, point.low, point.high) == (1.25, 1.0, 2.0)
    assert point.samples_per_second == 10 + 20


def test_bytes_are_those_of_steps_or_of_synchronisations() -> None:
    record = record_of([step(10, bytes_sent=5), sync(1), sync(2)])
    assert record.totals[0].bytes == (200, 400)
    assert record.totals[0].syncs == 2


def test_evaluations_of_a_split_are_in_order() -> None:
    record = record_of([evaluation(0, 0.9), evaluation(20, 0.4), evaluation(10, 0.5)])
    assert [(one.step, one.metrics["wer"]) for one in record.evaluations["validation"]] == [(0, 0.9), (10, 0.5)]


def test_a_machine_that_is_lost_and_back_is_marked_once_each_and_the_usual_start_and_end_are_not() -> None:
    def member(status: str) -> MemberEvent:
        return MemberEvent.model_validate({"member": 0, "status": status, "time": 1})

    begin = RunEvent(status="running", total_steps=4, time=0)
    lost = [member("lost"), step(2), member("failed"), member("lost"), member("left")]
    events = [begin, member("joined"), step(2), *lost, member("joined"), member("ready")]
    record = record_of([*events, member("joined"), step(4), member("left")])
    assert [(mark.status, mark.step) for mark in record.marks] == [("lost", 2), ("joined", 2)]


def test_a_flood_of_warnings_is_bounded_and_the_errors_hint_is_kept() -> None:
    record = Record()
    record.add(ErrorEvent(member=1, message="broken", hint="mend it", time=1))
    for number in range(1000):
        record.add(WarningEvent(message=str(number), time=2))
    assert len(record.notices) == 300
    assert record.dropped_notices == 701
    assert record.notices[0][1].hint == "mend it"
