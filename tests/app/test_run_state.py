from __future__ import annotations

from collections.abc import Sequence

import pytest
from app_events import MEMBER_EVENTS, RUN_EVENTS, evaluation, rank, step, sync
from hypothesis import given
from hypothesis import strategies as st

from app.run_view.figures import stages_times_text
from app.run_view.ribbon import rate_of_run
from app.run_view.run_state import RunState, at_its_end, reduce_events
from app.run_view.timeline import KEPT_NOTICES
from training.records.events import (
    ErrorEvent,
    Event,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RunEvent,
    SnapshotEvent,
    WarningEvent,
)
from training.run.stopping import ProgressMonitor


def test_a_step_shows_in_its_member() -> None:
    member = reduce_events([step(3, member=1, loss=0.5)]).members[1]
    assert (member.status, member.step, member.loss) == ("training", 3, 0.5)


def test_speed_counts_what_its_series_counts_and_no_evaluation_between_steps() -> None:
    state = reduce_events([step(n, time=n * 2.0, member=m) for m in (0, 1) for n in range(5)])
    assert state.members[0].samples_per_second == pytest.approx(8.0)
    assert state.samples_per_second == pytest.approx(16.0) == rate_of_run(state).newest


def test_speed_forgets_what_lies_behind_the_window() -> None:
    slow: list[Event] = [step(n, time=n * 20.0, compute=20.0) for n in range(5)]
    fast: list[Event] = [step(n, time=200.0 + n) for n in range(5, 40)]
    assert reduce_events([*slow, *fast]).members[0].samples_per_second == pytest.approx(8.0)


def test_shares_split_the_wall_time() -> None:
    assert reduce_events([step(1), step(2)]).members[0].shares == (0.75, 0.25, 0.5)


def seconds_left(events: list[Event]) -> float:
    state = reduce_events(events)
    left = state.time_left(state.updated or 0.0)
    assert left is not None
    return left.seconds


def test_work_that_is_no_step_has_a_time_left_from_its_own_pace() -> None:
    """Each time anew: the same phase may have been slower, or faster, in an earlier evaluation."""

    def progress(at: float, done: int) -> ProgressEvent:
        return ProgressEvent(member=0, time=at, phase="features", done=done, total=10)

    state = reduce_events([progress(100.0, 0), progress(101.0, 1)])
    assert state.members[0].preparing(204.0) == "features 1/10"  # too early to tell
    state = reduce_events([progress(110.0, 5)], state)
    assert state.members[0].preparing(204.0) == "features 5/10, 0:10 left"
    again = [step(1, member=0), progress(200.0, 0), progress(204.0, 1)]
    assert reduce_events(again, state).members[0].preparing(204.0) == "features 1/10, 0:36 left"


def test_work_that_counts_nothing_says_how_long_it_takes_already() -> None:
    """No stage stands still without a clock; it ends with the worker's own report, and with a failure."""
    loading = ProgressEvent(member=0, time=100.0, phase="loading the program on b", done=0)
    state = reduce_events([loading])
    assert state.members[0].preparing(101.0) == "loading the program on b"
    assert state.members[0].preparing(172.0) == "loading the program on b, 1:12 so far"
    for end in (MemberEvent(member=0, time=172.0, status="started"), ErrorEvent(member=0, time=172.0, message="x")):
        assert reduce_events([end], state).members[0].preparing(173.0) == ""


@pytest.mark.parametrize(
    ("steps", "sent", "lost"),
    [(7, (), " of the run, and c's last 3 steps"), (4, (), ""), (7, (5, 6, 7), "")],
)
def test_steps_of_a_lost_machine_that_nobody_has_are_no_zero(steps: int, sent: Sequence[int], lost: str) -> None:
    """What it sent in a step, or merged after the fourth, the others have; what it did since is gone with it."""
    taken: list[Event] = [step(n, member=1, bytes_sent=9 * (n in sent)) for n in range(1, steps + 1)]
    taken.insert(4, sync(1, member=1, step=4))
    kept = SnapshotEvent(member=0, step=9, path="a", bytes=1, seconds=0.1, live=(0, 1))
    events = [*taken, step(9), kept, MemberEvent(member=1, status="lost", name="c")]
    progress = ProgressMonitor()
    for event in events:
        progress(event)
    assert (
        reduce_events(events).saved_progress
        == progress.summary
        == f"the snapshot of step 9 is kept, 0 steps lost{lost}"
    )


def test_time_left_follows_the_slowest_member() -> None:
    events: list[Event] = [
        RunEvent(time=0, status="running", total_steps=10),
        *(step(number) for number in range(2, 5)),
        *(step(number, member=1, compute=2.0, wait=0.0) for number in range(2, 5)),
    ]
    assert seconds_left(events) == pytest.approx(12.0)


def test_time_left_counts_the_evaluations_to_come() -> None:
    """Every 20 of 100 steps and at the end 4 s for one split, at the end 6 s for another one."""
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=100)]
    events += [evaluation(0, split="validation", seconds=4.0), evaluation(0, split="test", seconds=6.0)]
    events += [step(number) for number in range(1, 21)]
    assert seconds_left(events) == pytest.approx(80 + 4 + 6)
    events += [evaluation(20, split="validation", seconds=4.0)]
    assert seconds_left(events) == pytest.approx(80 + 3 * 4 + 4 + 6)
    events += [step(number) for number in range(21, 101)]
    events += [evaluation(100, split="validation", seconds=4.0)]
    assert seconds_left(events) == pytest.approx(6)


def test_two_steps_tell_no_end() -> None:
    assert reduce_events([RunEvent(time=0, status="running", total_steps=10), step(1), step(2)]).time_left(0.0) is None


def test_time_left_of_simulated_machines_counts_no_pause_between_attempts() -> None:
    events: list[Event] = [RunEvent(status="starting", time=1.0, total_steps=40)]
    events += [step(number, time=1.0 + number, clock=10.0 * number) for number in range(1, 11)]
    events += [RunEvent(status="failed", time=11.0), RunEvent(status="starting", time=1001.0)]
    events += [RunEvent(status="running", time=1001.0)]
    events += [step(number, time=991.0 + number, clock=10.0 * number) for number in range(11, 21)]
    assert seconds_left(events) == pytest.approx(20.0)


def test_time_left_of_members_with_a_pace_of_their_own_is_that_of_the_run() -> None:
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=10)]
    events += [step(n // 2, time=n * 1.0) for n in range(9)]  # two of its steps are one of the run
    events += [step(n * 2, member=1, compute=4.0, time=n * 4.0) for n in range(3)]
    assert seconds_left(events) == pytest.approx(12.0)


def test_the_runs_step_is_what_every_member_at_work_has_done() -> None:
    events: list[Event] = [step(9), step(7, member=1), step(2, member=2), MemberEvent(member=2, status="lost")]
    assert reduce_events(events).step == 7


def test_nobody_waits_for_a_machine_that_has_come() -> None:
    waiting = [WarningEvent(time=0, message=f"waiting for {name}: ...", awaited=name) for name in "ab"]
    joined = MemberEvent(member=0, time=1, status="joined", name="a")
    assert [one.text for one in reduce_events([*waiting, joined]).warnings] == [waiting[1].message]
    completed = reduce_events([*waiting, RunEvent(time=2, status="completed")])
    assert not completed.warnings and [one.kind for one in completed.entries] == ["run"]


def test_a_newcomer_does_not_take_the_runs_steps_away() -> None:
    joins = MemberEvent(member=1, status="joined", name="b", message="joins a running group")
    assert reduce_events([step(28), RunEvent(status="paused"), joins]).step == 28


def test_a_machine_that_catches_up_takes_no_step_of_the_run_back() -> None:
    """Lost at step 19, back at step 40 while the others are at 44: its steps count from its next exchange on."""
    gone = MemberEvent(member=1, time=20, status="lost")
    back = MemberEvent(member=1, time=40, status="joined", name="b", message="joins a running group")
    events: list[Event] = [step(n, member=m) for n in range(1, 20) for m in range(2)]
    events += [gone, *(step(n) for n in range(20, 40)), back, *(step(n) for n in range(40, 45))]
    events += [event for n in range(41, 60) for event in (step(n, member=1), step(min(n + 4, 59)))]
    events += [step(60, member=1), sync(60, member=1), step(60), sync(60), step(61), step(61, member=1), step(62)]
    steps = [reduce_events(events[: n + 1]).step for n in range(len(events))]
    assert steps == sorted(steps) and steps[-1] == 61
    assert reduce_events(events[: events.index(back) + 1]).samples_per_second == pytest.approx(
        8.0
    )  # not its earlier pace


def test_bytes_are_not_counted_twice() -> None:
    steps = [step(1, bytes_sent=70, bytes_received=150), step(2, bytes_sent=40, bytes_received=60)]
    member = reduce_events([*steps, sync(1)]).members[0]
    assert (member.work.bytes_sent, member.work.bytes_received) == (110, 210)


def test_first_last_and_best_evaluation() -> None:
    splits = reduce_events([evaluation(0, 1.0), evaluation(10, 0.1), evaluation(20, 0.2)]).evaluations
    results = splits["validation"]
    assert (results.first.step, results.best.step, results.last.step) == (0, 10, 20)


def test_different_weights_after_one_synchronisation_are_noticed() -> None:
    assert not reduce_events([sync(1, weight_hash="a"), sync(1, member=1, weight_hash="a")]).weights_differ
    assert not reduce_events([sync(1, weight_hash="a"), sync(2, member=1, weight_hash="b")]).weights_differ
    assert reduce_events([sync(1, weight_hash="a"), sync(1, member=1, weight_hash="b")]).weights_differ


def test_a_restarted_member_begins_with_an_empty_window() -> None:
    member = reduce_events([step(1), step(2), MemberEvent(member=0, status="started", name="a")]).members[0]
    assert (member.window, member.status) == ((), "started")


def test_only_the_newest_warnings_are_kept() -> None:
    state = reduce_events([WarningEvent(message=str(n), time=float(n)) for n in range(200)])
    assert len(state.warnings) == KEPT_NOTICES
    assert state.warnings[-1].text == "199"


def test_peak_memory_does_not_fall() -> None:
    loads = [MachineEvent(member=0, cpu_percent=1, memory_used=used, memory_total=9) for used in (3, 7, 2)]
    member = reduce_events(loads).members[0]
    assert member.machine is not None
    assert (member.machine.memory_used, member.memory_peak) == (2, 7)


def test_a_run_that_has_ended_has_nobody_at_work_whatever_was_said_last() -> None:
    ended = RunEvent(status="cancelled", message="stopped by the user", time=9.0)
    before: list[Event] = [step(1), step(1, member=1), MemberEvent(member=1, status="done", time=2.0)]
    late: list[Event] = [step(2, time=9.5), step(1, member=2, time=9.5)]
    for events in ([*before, *late, ended], [*before, ended, *late]):
        members = reduce_events(events).members
        assert {rank: member.status for rank, member in members.items()} == {0: "stopped", 1: "done", 2: "stopped"}
        assert (members[0].step, members[0].since, members[0].has_worked) == (2, 9.0, True)


def test_a_run_that_goes_on_after_its_end_has_members_at_work_again() -> None:
    again: list[Event] = [RunEvent(status="starting"), MemberEvent(member=0, status="started"), step(2)]
    state = reduce_events([step(1), RunEvent(status="failed"), *again])
    assert (state.ended, state.members[0].status) == (None, "training")


def test_an_end_that_no_event_tells_is_taken_from_elsewhere() -> None:
    state = at_its_end(reduce_events([RunEvent(status="running"), step(1)]), "interrupted")
    assert (state.status, state.members[0].status) == ("interrupted", "stopped")
    assert at_its_end(state, "completed").status == "interrupted"


def look_at_everything(state: RunState) -> None:
    for thing in (state, *state.members.values()):
        for name in dir(thing):
            getattr(thing, name)


@given(
    st.lists(st.one_of(MEMBER_EVENTS, RUN_EVENTS), max_size=30), st.lists(st.none() | rank, min_size=30, max_size=30)
)
def test_no_order_of_events_raises(events: list[Event], ranks: list[int | None]) -> None:
    look_at_everything(reduce_events(e.model_copy(update={"member": r}) for e, r in zip(events, ranks)))


@given(st.data())
def test_the_order_in_which_members_are_merged_does_not_matter(data: st.DataObject) -> None:
    streams = [
        [event.model_copy(update={"member": member}) for event in data.draw(st.lists(MEMBER_EVENTS, max_size=6))]
        for member in range(3)
    ]
    turns = [member for member, stream in enumerate(streams) for _ in stream]
    merged = []
    for order in (turns, data.draw(st.permutations(turns))):
        iterators = [iter(stream) for stream in streams]
        merged.append([next(iterators[member]) for member in order])
    assert repr(reduce_events(merged[0])) == repr(reduce_events(merged[1]))


def test_the_times_of_a_divided_models_stages_are_told_with_what_is_idle() -> None:
    plain, divided = (reduce_events([step(number, **fields) for number in (1, 2)]) for fields in
                      ({}, {"compute": 3.0, "wait": 1.0, "stages": (2.0, 1.0, 3.0)}))  # fmt: skip
    assert stages_times_text(plain) == ""
    assert stages_times_text(divided) == "stages compute 2 s, 1 s, 3 s of 4 s a step, 50 % idle"
