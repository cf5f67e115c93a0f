"""Whether a run did what its plan promised, and why not."""

from __future__ import annotations

from typing import Any

import pytest

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
from distributed.planning.run_time import FIXED_STEPS
from tests.app.app_events import step
from training.records.events import Event, MemberEvent, PeerPath, RunEvent, WaysEvent

NAMES = ("pc", "air")


def way(*members: str, rate: float, seconds: float = 1.0) -> Candidate:
    choice = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=members)
    each = tuple(MemberForecast(name=name, micro_batch=8, seconds=0.75, memory=0, memory_free=0, bytes_per_hour=0)
                 for name in members)  # fmt: skip
    return Candidate(choice=choice, step=seconds, samples_per_second=rate, members=each)


def planning(chosen: int | None = 0) -> Planning:
    """Two machines with 16 samples in a step of a second, or the pc alone with 10 a second."""
    ranking = (way(*NAMES, rate=16.0), way("pc", rate=10.0, seconds=0.8))
    job = Job(trainable=10, total=10, samples=100)
    return Planning(job=job, preference="fastest", ranking=ranking, chosen=chosen)


def prediction(chosen: int = 0) -> PlanPrediction:
    found = plan_prediction(planning(chosen))
    assert found is not None
    return found


def ran(*more: Event, last: int = 20, first: dict[str, Any] | None = None, ranks: int = 2, **fields: Any) -> RunState:
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=last)]
    events += [MemberEvent(member=rank, time=0, status="joined", name=NAMES[rank]) for rank in range(ranks)]
    for number in range(1, last + 1):
        own = (first or fields) if number == 1 else fields
        events += [step(number, member=rank, **own) for rank in range(ranks)]
    return reduce_events([*events, *more])


def kept(state: RunState, comparison: PredictionComparison | None = None) -> PlanVsActual:
    found = compare_with_plan(state, prediction(), comparison)
    assert found is not None
    return found


def test_what_was_promised_and_what_came() -> None:
    found = kept(ran())
    assert found.short == "took 0:20 (0:20 promised; pc alone 0:32)" and found.is_met
    assert str(found) == "training took 0:20 (0:20 promised); pc alone would have taken 0:32"


def test_one_machine_alone_is_held_against_its_own_promise() -> None:
    found = compare_with_plan(ran(ranks=1), prediction(1))
    assert found is not None and found.short == "took 0:20 (0:16 promised)"


def test_slower_than_one_machine_alone_says_what_to_do() -> None:
    assert str(kept(ran(compute=1.5))).endswith("pc alone would have taken 0:32: train on pc alone next time")


def test_fixed_steps_are_said_beside_the_machine_alone() -> None:
    plan = planning()
    single = plan.ranking[1].model_copy(update={"steps": 20})
    job = plan.job.model_copy(update={"steps": 20})
    found = compare_with_plan(
        ran(), plan_prediction(plan.model_copy(update={"ranking": (plan.ranking[0], single), "job": job}))
    )
    assert str(found).endswith(f"pc alone would have taken 0:16 ({FIXED_STEPS})")


@pytest.mark.parametrize("plan", [None, planning(None)])
def test_nothing_promised_nothing_said(plan: Planning | None) -> None:
    assert plan_prediction(plan) is None and compare_with_plan(ran(), plan_prediction(plan)) is None


def test_a_run_without_steps_is_not_held_against_its_promise() -> None:
    assert compare_with_plan(RunState(), prediction()) is None


def test_a_lost_machine_is_why() -> None:
    lost = MemberEvent(member=1, time=10.5, status="lost", message="silent for 5 s")
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=20)]
    events += [MemberEvent(member=rank, time=0, status="joined", name=NAMES[rank]) for rank in (0, 1)]
    events += [step(n, member=rank) for n in range(1, 11) for rank in (0, 1)]
    events += [lost, step(11, wait=6.0), *(step(n) for n in range(12, 21))]
    found = kept(reduce_events(events))
    assert found.reasons == ("air was away for 10 of 20 steps, and the others waited 5.8 s for it",)
    assert found.short.startswith("took 0:26 (0:15 promised")  # half of the steps had half the samples


def test_a_slow_machine_and_slow_exchanges_are_why() -> None:
    relayed = WaysEvent(member=0, time=1, ways=(PeerPath(peer=1, how="relayed"),))
    state = ran(relayed, compute=1.5, wait=1.25)
    events = [step(n, member=rank, compute=1.5 - rank, wait=1.25 + rank) for n in range(1, 21) for rank in (0, 1)]
    names = [MemberEvent(member=rank, time=0, status="joined", name=NAMES[rank]) for rank in (0, 1)]
    exchanges, slow = kept(state, compare(prediction().candidate, [*names, *events])).reasons
    assert slow == "pc computed 1.5 s a step, 750 ms were predicted"
    assert exchanges == "exchanges held all machines up for 1.25 s a step, 250 ms were predicted " \
                        "(pc - air through the relay)"  # fmt: skip


def test_a_slow_start_is_why() -> None:
    assert kept(ran(first={"compute": 9.0, "wait": 1.0})).reasons == ("the first step took 10.0 s, a later one 1 s",)


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
    quick = at_predicted_pace(points, pace, PlanPrediction(way(*NAMES, rate=1.0, seconds=4.0), None))
    assert [point.step for point in quick] == [2.0 * n for n in range(1, 11)]  # what the promise had no time for


def test_the_promised_end_goes_from_the_first_step_of_the_newest_start() -> None:
    state = ran(last=10)
    assert prediction().end(state) == 10.0 and prediction().share(state, 5.0) == 0.5
    resumed = [MemberEvent(member=rank, time=100, status="started", name=NAMES[rank]) for rank in (0, 1)]
    later = ran(RunEvent(time=100, status="running", total_steps=20), *resumed, step(11, time=102.0), last=10)
    assert prediction().end(later) == 111.0
