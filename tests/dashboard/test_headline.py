from __future__ import annotations

from typing import Any, Literal

import pytest
from run_folders import BEGAN, NAMES, started, steps, view_of

from app.run_view.headline import headline, lag, problems, slowest
from app.run_view.plan_vs_actual import lateness_text
from app.run_view.run_state import RunState, TimeLeft, reduce_events
from distributed.planning.run_time import RunTime
from profiles.quantities import clock_text
from training.records.events import (
    SAVES_MODEL,
    ErrorEvent,
    EvaluationEvent,
    Event,
    MachineEvent,
    MemberEvent,
    ProgressEvent,
    RequestEvent,
    RunEvent,
    SnapshotEvent,
    WarningEvent,
)

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
        "done in 1:20 · promised end was 0:10 ago · studio alone in 4:40"
    )


def test_a_run_that_will_be_late_says_by_how_much_and_why() -> None:
    def told(*more: Event, promised: float, total: int = 200) -> str:
        return words(settled(*more, total=total), BEGAN + 60, time=RunTime(promised))

    assert told(promised=195.0).startswith("Healthy · 3/3 machines · done in 2:20 · promised in 2:15")
    assert told(promised=100.0) == "Healthy · 3/3 machines · done in 2:20 · 1:40 later than promised"
    forecasts = dict.fromkeys(NAMES, 0.25)
    assert lateness_text(settled(total=200), 200.0, 0.0, 100.0, forecasts) == (
        "1:40 later than promised: studio computes 750 ms a step, 250 ms were predicted"
    )
    back = [LOST, MemberEvent(member=1, time=BEGAN + 60, status="joined", name="air"), *steps(60, 62)]
    state = reduce_events(back, going(LOST, *steps(21, 59, ranks=(0, 2))))
    away = lateness_text(state, 200.0, 0.0, 100.0, forecasts)
    assert away == "1:40 later than promised: air was away for 40 steps"


def test_a_promise_stays_when_a_run_resumes_and_its_clock_stood_still_meanwhile() -> None:
    stopped = RunEvent(time=BEGAN + 20, status="cancelled")
    state = reduce_events([*started(at=BEGAN + 500), *steps(21, 24, at=BEGAN + 480)], going(stopped))
    assert "promised in 1:16" in words(state, BEGAN + 504, time=RunTime(100.0))


def test_with_fixed_steps_the_machine_alone_sees_fewer_samples() -> None:
    time = RunTime(0.0, "studio", 100.0, 12.0, fixed_steps=True)
    assert words(going(), time=time).endswith("done in 1:20 · studio alone in 1:20 (fewer samples)")


def test_ends_keep_one_form_in_a_run_and_are_times_of_day_in_a_long_one() -> None:
    time, clock = RunTime(4000.0, "studio", 5000.0, 12.0), clock_text(BEGAN + 4000, BEGAN)
    ends = f"done {clock_text(BEGAN + 1000, BEGAN)} ±1 min · promised {clock} · studio alone "
    assert words(settled(), BEGAN + 60, time=time).startswith(f"Healthy · 3/3 machines · {ends}")
    assert "done in" not in words(settled(until=999), BEGAN + 999, time=time)
    assert "done in 0:01" in words(settled(until=999), BEGAN + 999, time=RunTime(900.0))


def settled(*more: Event, total: int = 1000, until: int = 60) -> RunState:
    return reduce_events([*started(total=total), *steps(1, until), *more])


SLOW = RunTime(0.0, "studio", 0.0, 30.0)
ADVICE = "stop it and train on studio alone"
END = "done in 15:40"


def test_slower_than_one_machine_alone_is_never_healthy() -> None:
    told = words(settled(), BEGAN + 60, time=SLOW)
    assert ADVICE not in words(settled(), BEGAN + 60, time=SLOW, replayed=True)
    assert told.startswith(f"Slower than studio alone (0.80x) · 3/3 machines · {END} · {ADVICE}")


def test_nothing_is_judged_shortly_after_a_machine_is_back_or_while_others_compute_or_before_the_end() -> None:
    back = [LOST, MemberEvent(member=1, time=BEGAN + 52, status="joined", name="air"), *steps(61, 61)]
    assert "Slower" not in words(settled(*back), BEGAN + 61, time=SLOW)
    busy = MachineEvent(member=1, time=BEGAN + 59, cpu_percent=100, others_percent=98, memory_used=1, memory_total=2)
    told = words(settled(busy), BEGAN + 60, time=SLOW)
    assert told.startswith(f"Attention · 3/3 machines · {END} · other programs use 98 % of the processors of air")
    assert words(settled(total=100), BEGAN + 60, time=SLOW).startswith("Healthy · 3/3 machines · done in 0:40")


def test_stopping_is_advised_only_where_another_start_pays() -> None:
    slow_start = RunEvent(time=BEGAN - 200, status="starting")
    state = reduce_events([slow_start, *started(total=1000)[1:], *steps(1, 60)])
    told = words(state, BEGAN + 60, time=SLOW)
    assert told.startswith(f"Slower than studio alone (0.80x) · 3/3 machines · {END}")


def request(action: str, outcome: Literal["accepted", "done"] = "accepted", at: float = BEGAN + 20) -> RequestEvent:
    return RequestEvent(time=at, request=action, action=action, outcome=outcome)


def test_a_stop_and_a_pause_under_way_are_said_without_a_verdict() -> None:
    left = MemberEvent(member=0, time=BEGAN + 61, status="left", name="studio", message="stopped by the user")
    stopping = "Stopping · the current step ends, then a snapshot is written · step 60/1000"
    assert words(settled(request("stop"), left), BEGAN + 62, time=SLOW) == stopping
    assert words(settled(left), BEGAN + 62, time=SLOW) == stopping  # asked for by a signal
    assert words(settled(request("pause")), BEGAN + 62).startswith("Pausing · the current step ends first")
    assert words(settled(request("pause", "done")), BEGAN + 62).startswith("Healthy")
    assert words(settled(request("stop", at=BEGAN - 50)), BEGAN + 62).startswith("Healthy")  # of an earlier attempt


def test_what_happens_between_the_last_step_and_the_end_is_said() -> None:
    def at_end(*more: Event) -> str:
        return words(going(*more, until=100), BEGAN + 101, time=RunTime(50.0, "studio", 60.0, 12.0))

    def progress(rank: int, phase: str, done: int, total: int | None) -> Event:
        return ProgressEvent(member=rank, time=BEGAN + 101, phase=phase, done=done, total=total)

    assert at_end() == "Finishing · 3/3 machines · the last synchronisation"
    evaluating = [progress(0, "evaluating test", 5, 8), progress(1, "evaluating test", 8, 8)]
    assert at_end(*evaluating) == "Finishing · 3/3 machines · last evaluation: test 13/16 · done in 0:01"
    before = EvaluationEvent(time=BEGAN, step=0, split="test", samples=16, metrics={}, loss=3.0, seconds=40.0)
    assert at_end(before, *evaluating).endswith("last evaluation: test 13/16 · done in 0:39")
    saving = progress(0, SAVES_MODEL, 0, None)
    assert at_end(*evaluating, saving) == "Finishing · 3/3 machines · writing the model"
    done = [MemberEvent(member=rank, time=BEGAN + 102, status="done", name=NAMES[rank]) for rank in (1, 2)]
    assert at_end(*evaluating, saving, *done) == "Finishing · 3/3 machines · writing the model"
    everybody = [*done, MemberEvent(member=0, time=BEGAN + 102, status="done", name="studio")]
    assert at_end(*everybody) == "Finishing · 3/3 machines · ending the processes"


@pytest.mark.parametrize(
    ("cells", "shown"),
    [
        (60, "Healthy · 3/3 machines · done in 1:20 · studio alone in 1:50"),
        (59, "Healthy · 3/3 machines · done in 1:20"),
        (5, "Healthy · 3/3 machines · done in 1:20"),
    ],
)
def test_whole_parts_go_where_there_is_no_room_but_never_the_end(cells: int, shown: str) -> None:
    said = headline(view_of(going(), BEGAN + 20, time=RunTime(0.0, "studio", 130.0, 12.0))).within(cells)
    assert " · ".join((said.word, *said.details)) == shown


def test_without_a_prediction_no_speed_up_is_claimed() -> None:
    assert "alone" not in words(going())


def test_a_lost_machine_is_named_with_its_cause() -> None:
    assert words(going(LOST)).startswith("Degraded · 2/3 machines · air lost (silent for 5 s)")
    assert words(going(LOST), BEGAN + 150).startswith("Degraded · 2/3 machines · air lost 2 min ago")


def test_a_machine_that_is_added_is_told_with_what_is_sent_to_it() -> None:
    asked = RequestEvent(request="1", action="add", machine="mini", outcome="accepted")
    sent = ProgressEvent(phase="bytes to mini", done=3_200_000, total=85_400_000)
    assert "3/3 machines, adding mini · " in words(going(asked))
    assert "3/3 machines, adding mini (sending to mini 3.2 MB/85.4 MB) · " in words(going(asked, sent))
    done = RequestEvent(request="1", action="add", machine="mini", outcome="done")
    assert "adding" not in words(going(asked, sent, done))


def test_the_evaluation_before_the_first_step_is_told_with_its_time() -> None:
    """Of all members together; the time is that of the one furthest behind."""

    def said(*more: Event) -> str:
        return words(reduce_events([*started(), *more]), BEGAN + 12).removeprefix("Starting · 3/3 machines · ")

    def report(rank: int, at: float, done: int, total: int = 48, split: str = "validation") -> Event:
        return ProgressEvent(member=rank, time=BEGAN + at, phase=f"evaluating {split}", done=done, total=total)

    before = "evaluating the model before training"
    begun = [report(0, 0, 0), report(1, 0, 0)]
    assert said(*begun) == f"{before}, 0 of 96 samples, 0:12 so far"
    under_way = [*begun, report(0, 4, 8), report(1, 4, 4)]
    assert said(*under_way) == f"{before}, 12 of 96 samples, about 0:44 left"
    ended = [*under_way, report(0, 8, 48), report(1, 9, 48)]
    assert said(*ended) == f"{before}, 96 of 96 samples"
    assert said(*ended, report(0, 9, 0, 5, "test")) == f"{before}, 0 of 5 test samples, 0:03 so far"
    result = EvaluationEvent(time=BEGAN + 9, step=0, split="validation", samples=96, metrics={}, loss=3.0, seconds=9.0)
    assert said(*ended, result) == "taking the first step"
    assert before not in words(going(*begun))


def test_a_machine_that_is_back_is_over() -> None:
    back = MemberEvent(member=1, time=BEGAN + 30, status="joined", name="air")
    state = going(LOST, back, *steps(31, 40))
    assert words(state, BEGAN + 40).startswith("Healthy · 3/3")
    assert problems(state) == []


def test_the_root_cause_comes_first() -> None:
    after = ErrorEvent(member=2, time=BEGAN + 25, message="round failed")
    assert [one.text for one in problems(going(after, LOST))] == ["air lost: silent for 5 s", "round failed"]


def test_the_cause_of_a_loss_is_how_its_worker_ended_as_soon_as_that_is_known() -> None:
    ended = WarningEvent(member=1, time=BEGAN + 22, message="air: killed", ended_by="killed by signal 9")
    state = going(LOST, ended)
    assert [one.text for one in problems(state)] == ["air lost: killed by signal 9"]
    assert "air lost (killed by signal 9)" in words(state)


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
    state = reduce_events([*started(), *steps(1, 20, ranks=(0, 1)), *steps(1, 18, ranks=(2,), compute=1.0, wait=0.0)])
    brake = slowest(state)
    assert brake is not None
    assert (brake.member.rank, lag(state, brake.member)) == (2, 2)
    waits_itself = [*steps(1, 20, ranks=(0, 1)), *steps(1, 18, ranks=(2,), compute=1.5, wait=1.5)]
    assert slowest(reduce_events([*started(), *waits_itself])) is None
    for wait in (0.1, 3.0):  # 17 % slower, and the others wait for half of their time: not for that machine
        slower = [*steps(1, 20, ranks=(0, 1), wait=wait), *steps(1, 20, ranks=(2,), compute=1.0, wait=0.05)]
        assert slowest(reduce_events([*started(), *slower])) is None
