"""Whether a run did what its plan promised, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from app.run_view.figures import waiting_text
from app.run_view.plan_vs_actual import (
    PlanPrediction,
    PlanVsActual,
    at_predicted_pace,
    compare_with_plan,
    pace_of,
    plan_prediction,
)
from app.run_view.run_series import of_run
from app.run_view.run_state import RunState, reduce_events
from distributed.planning.documents.document import Candidate, Choice, Job, MemberForecast, Planning
from distributed.planning.feedback import PredictionComparison, compare
from distributed.planning.run_time import FIXED_STEPS, RunTime
from tests.app.app_events import step
from training.records.events import Event, MemberEvent, PeerPath, RunEvent, WaysEvent

NAMES = ("pc", "air")


def way(*members: str, rate: float, seconds: float = 1.0, steps: int = 20) -> Candidate:
    choice = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=members)
    each = tuple(MemberForecast(name=name, micro_batch=8, seconds=0.75, memory=0, memory_free=0, bytes_per_hour=0)
                 for name in members)  # fmt: skip
    return Candidate(choice=choice, step=seconds, steps=steps, samples_per_second=rate, members=each)


def planning(chosen: int | None = 0) -> Planning:
    """Two machines with 20 steps of 16 samples and a second, or the pc alone with 10 samples a second."""
    ranking = (way(*NAMES, rate=16.0), way("pc", rate=10.0, seconds=0.8, steps=40))
    job = Job(trainable=10, total=10, samples=320)
    return Planning(job=job, ranking=ranking, chosen=chosen)


def prediction(chosen: int = 0) -> PlanPrediction:
    found = plan_prediction(planning(chosen))
    assert found is not None
    return found


def ran(*more: Event, last: int = 20, first: dict[str, Any] | None = None, ranks: int = 2, **fields: Any) -> RunState:
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=last)]
    events += [MemberEvent(member=rank, time=0, status="joined", name=NAMES[rank]) for rank in range(ranks)]
    now = 0.0
    for number in range(1, last + 1):
        own = (first or fields) if number == 1 else fields
        now += own.get("compute", 0.75) + own.get("wait", 0.25)
        events += [step(number, member=rank, time=now, **own) for rank in range(ranks)]
    return reduce_events([*events, *more])


def completed(state: RunState, *, after: float = 0.0) -> RunState:
    return reduce_events([RunEvent(time=(state.updated or 0.0) + after, status="completed")], state)


def kept(state: RunState, comparison: PredictionComparison | None = None, after: float = 0.0) -> PlanVsActual:
    found = compare_with_plan(completed(state, after=after), prediction(), comparison)
    assert found is not None
    return found


def test_the_smaller_last_step_of_every_pass_is_planned() -> None:
    """Ten samples in two steps of eight: all were seen, though every second step has only two."""
    few = planning().model_copy(update={"job": Job(trainable=10, total=10, samples=200, epochs=10.0)})
    events = [step(n, time=n * 1.0, samples=8 if n % 2 else 2, member=rank) for n in range(1, 21) for rank in (0, 1)]
    found = compare_with_plan(
        completed(reduce_events([RunEvent(time=0, status="running"), *events])), plan_prediction(few)
    )
    assert found is not None and found.samples == pytest.approx(1.0) and "fewer samples" not in str(found)


def test_what_was_promised_and_what_came() -> None:
    found = kept(ran())
    assert str(found) == "trained 0:20 (0:20 promised; pc alone 0:32)" and found.is_met


def test_what_evaluations_take_is_in_both() -> None:
    """Of steps that take as long as promised, and 10 s after them of which 3 were predicted."""
    candidate = way(*NAMES, rate=16.0).model_copy(update={"evaluating": 3.0})
    plan = planning().model_copy(update={"ranking": (candidate, planning().ranking[1])})
    found = compare_with_plan(completed(ran(), after=10.0), plan_prediction(plan))
    assert str(found) == (
        "trained 0:30 (0:23 promised; pc alone 0:32): evaluations and saving took 0:10, 0:03 were predicted"
    )


def test_a_run_is_compared_when_it_is_completed() -> None:
    assert compare_with_plan(ran(), prediction()) is None


def test_one_machine_alone_is_held_against_its_own_promise() -> None:
    found = compare_with_plan(completed(ran(ranks=1)), prediction(1))
    assert str(found).startswith("trained 0:20 (0:32 promised)")


def test_slower_than_one_machine_alone_says_what_to_do() -> None:
    assert str(kept(ran(compute=1.5))).endswith("; train on pc alone next time")


def test_fixed_steps_are_said_beside_the_machine_alone() -> None:
    plan = planning()
    single = plan.ranking[1].model_copy(update={"steps": 20})
    job = plan.job.model_copy(update={"steps": 20})
    found = compare_with_plan(
        completed(ran()), plan_prediction(plan.model_copy(update={"ranking": (plan.ranking[0], single), "job": job}))
    )
    assert str(found) == f"trained 0:20 (0:20 promised; pc alone 0:16); {FIXED_STEPS}"


@pytest.mark.parametrize("plan", [None, planning(None)])
def test_nothing_promised_nothing_said(plan: Planning | None) -> None:
    assert plan_prediction(plan) is None and compare_with_plan(completed(ran()), plan_prediction(plan)) is None


def test_a_run_without_steps_is_not_held_against_its_promise() -> None:
    assert compare_with_plan(completed(RunState()), prediction()) is None


def test_a_lost_machine_is_why() -> None:
    lost = MemberEvent(member=1, time=10.5, status="lost", message="silent for 5 s")
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=20)]
    events += [MemberEvent(member=rank, time=0, status="joined", name=NAMES[rank]) for rank in (0, 1)]
    events += [step(n, member=rank) for n in range(1, 11) for rank in (0, 1)]
    events += [lost, step(11, time=16.75, wait=6.0), *(step(n, time=n + 5.75) for n in range(12, 21))]
    found = kept(reduce_events(events))
    assert found.reasons == ("air was away for 10 of 20 steps, and those in which it was lost took 5.75 s longer",)
    assert str(found).startswith(
        "trained 0:26 (0:20 promised; pc alone 0:32) on 25 % fewer samples than planned: air was away"
    )


def test_a_promise_that_is_kept_with_fewer_samples_says_so() -> None:
    lost = MemberEvent(member=1, time=10.5, status="lost", message="silent for 5 s")
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=20)]
    events += [MemberEvent(member=rank, time=0, status="joined", name=NAMES[rank]) for rank in (0, 1)]
    events += [step(n, member=rank) for n in range(1, 11) for rank in (0, 1)]
    found = kept(reduce_events([*events, lost, *(step(n) for n in range(11, 21))]))
    assert str(found) == (
        "trained 0:20 (0:20 promised; pc alone 0:32) on 25 % fewer samples than planned: "
        "air was away for 10 of 20 steps"
    )


def test_a_slow_machine_and_slow_exchanges_are_why() -> None:
    relayed = WaysEvent(member=0, time=1, ways=(PeerPath(peer=1, how="relayed"),))
    state = ran(relayed, compute=1.5, wait=1.25)
    events = [step(n, member=rank, compute=1.5 - rank, wait=1.25 + rank) for n in range(1, 21) for rank in (0, 1)]
    names = [MemberEvent(member=rank, time=0, status="joined", name=NAMES[rank]) for rank in (0, 1)]
    result = kept(state, compare(prediction().candidate, [*names, *events]))
    exchanges, slow = result.reasons
    assert "next time" not in str(result)  # alone the pc would have been slow, too
    assert slow == "pc computed 1.5 s a step, 750 ms were predicted"
    said = waiting_text(completed(state))  # as the tabs of the dashboard say it
    assert exchanges == f"{said}, 0 % was predicted (pc - air through the relay)"


def test_a_machine_that_gave_way_to_its_owner_is_why() -> None:
    joined = MemberEvent(member=1, time=0, status="joined", name="air")
    resting = [step(n, member=1, time=n * 2.0, compute=1.75, wait=0.25, gave_way=1.0) for n in range(1, 21)]
    assert "air gave way to its owner for 0:20" in kept(ran(joined, *resting, compute=1.75, ranks=1)).reasons


def test_a_slow_start_is_why() -> None:
    assert kept(ran(first={"compute": 9.0, "wait": 1.0})).reasons == ("the first step took 10 s, a later one 1 s",)


def test_who_waits_at_every_fourth_step_makes_no_step_longer() -> None:
    """Between two synchronisations machines take their steps each at its speed, and all as long in the whole."""
    fast = [step(n, compute=0.25, wait=3.0 if n % 4 == 0 else 0.0) for n in range(1, 21)]
    slow = [step(n, member=1, compute=1.0, wait=0.0) for n in range(1, 21)]
    pace = pace_of(reduce_events([*fast, *slow]))
    assert pace is not None and pace.seconds[-1] == 20.0 and pace.rate == 16.0


def test_at_their_own_pace_machines_divide_the_steps() -> None:
    pace = pace_of(reduce_events([step(n, member=n % 2) for n in range(1, 41)]))
    assert pace is not None and pace.rate == pytest.approx(16.0, rel=0.05)


def test_what_no_figure_tells_is_not_guessed() -> None:
    assert ": no recorded figure tells why" in str(kept(ran(compute=1.5)))


def test_the_ghost_of_a_loss_is_where_the_run_would_have_been() -> None:
    state = ran(compute=1.75)  # each step takes twice as long as promised
    pace = pace_of(state)
    assert pace is not None and (pace.rate, pace.steps, pace.step_at(10.0)) == (8.0, 20.0, 5.0)
    points = of_run(state.curves, "loss").points()
    ghost = at_predicted_pace(points, pace, prediction())
    assert [point.step for point in ghost] == [point.step / 2 for point in points]
    quick = at_predicted_pace(points, pace, PlanPrediction(way(*NAMES, rate=1.0, seconds=4.0), RunTime(80.0)))
    assert [point.step for point in quick] == [2.0 * n for n in range(1, 11)]  # what the promise had no time for


def test_the_promised_share_follows_the_time_of_all_attempts() -> None:
    state = ran(last=10)
    assert prediction().share(state, 5.0) == 0.25
    stopped = [RunEvent(time=10.0, status="cancelled"), RunEvent(time=99.0, status="starting")]
    later = reduce_events([*stopped, RunEvent(time=100.0, status="running", total_steps=20)], state)
    assert prediction().share(later, 102.0) == 0.6
