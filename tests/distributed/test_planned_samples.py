"""Plans count the samples of a run as training takes them: the last step of an epoch has what is left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import cluster, job, joined, predict

from app.plan_table import summary_lines
from app.run_view.plan_vs_actual import compare_with_plan, plan_prediction
from app.run_view.run_state import reduce_events
from distributed.planning.documents.cluster import ClusterMachine, Measurement
from distributed.planning.documents.document import Candidate, Choice, Job, Planning
from distributed.planning.feedback import compare
from distributed.planning.planner import plan
from distributed.planning.prediction import mean_compute
from distributed.planning.run_time import promised_time
from tests.app.app_events import step
from training.data.sample_order import Cursor, SampleSchedule
from training.numerics.schedule import run_steps
from training.records.events import Event, MemberEvent, RunEvent

GROUP = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a", "b", "c"))
ALONE = GROUP.model_copy(update={"members": ("a",)})
FEW = job(1_000_000, samples=40 * 35, epochs=40)
"""40 passes over 35 recordings: 24 and 11 in a pass of three machines, four times 8 and 3 in a pass of one."""
MACHINES = cluster([8.0, 8.0, 8.0], 10_000)


@settings(deadline=None, max_examples=40)
@given(
    samples=st.integers(1, 60),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    accumulation=st.integers(1, 3),
    epochs=st.floats(0.1, 6),
    drop_last=st.booleans(),
    fixed_steps=st.sampled_from([0, 1, 17]),
)
def test_planned_samples_and_shares_are_those_that_training_takes(
    samples: int, batches: list[int], accumulation: int, epochs: float, drop_last: bool, fixed_steps: int
) -> None:
    group_batch = accumulation * sum(batches)
    drop_last = drop_last and group_batch <= samples  # training refuses it
    schedule = SampleSchedule(samples, seed=0, accumulation=accumulation, drop_last=drop_last)
    sizes, cursor = dict(enumerate(batches)), Cursor()
    steps = fixed_steps or schedule.total_steps(sizes, epochs)
    taken: dict[int, list[int]] = {rank: [] for rank in sizes}
    for _ in range(steps):
        for rank in sizes:
            micro_batches, after = schedule.step(cursor, sizes, rank)
            taken[rank] += map(len, micro_batches)
        cursor = after
    run = run_steps(samples, group_batch, epochs, drop_last, fixed_steps)
    assert (run.steps, run.samples) == (steps, sum(map(sum, taken.values())))
    machines = {name: ClusterMachine(name=name, measurements=MEASURED) for name in "abcd"[: len(batches)]}
    planned = mean_compute(run, dict(zip(machines, batches, strict=True)), accumulation, machines)
    overhead, speed = machines["a"].overhead, machines["a"].speed
    seconds = [(len(parts) * overhead + sum(parts) / speed) / steps for parts in taken.values()]
    assert [*planned.values()] == pytest.approx(seconds)


MEASURED = (Measurement(batch=4, seconds=1.0), Measurement(batch=8, seconds=1.5))
"""Half a second for each micro-batch, and an eighth for each sample."""


@pytest.mark.parametrize(
    ("choice", "steps", "full", "compute"), [(GROUP, 80, 24, (24 + 12) / 24 / 2), (ALONE, 200, 8, 35 / 5 / 8)]
)
def test_a_run_over_few_recordings_takes_what_they_are(choice: Choice, steps: int, full: int, compute: float) -> None:
    """Of 11 samples the largest of three parts is 4."""
    candidate = predict(MACHINES, FEW, choice)
    assert (candidate.steps, candidate.samples, candidate.global_batch) == (steps, 1400, full)
    assert candidate.has_smaller_steps and candidate.compute == pytest.approx(compute)
    assert candidate.samples_per_second * candidate.seconds == pytest.approx(1400)


def test_dropped_remainders_are_not_counted() -> None:
    candidate = predict(MACHINES, FEW.model_copy(update={"drop_last": True}), GROUP)
    assert (candidate.steps, candidate.samples, candidate.compute) == (40, 40 * 24, pytest.approx(1.0))


def test_the_promise_and_the_same_loss_count_them_for_the_group_and_for_one_machine_alone() -> None:
    planning = plan(MACHINES, FEW.model_copy(update={"strategy": "allreduce"}))
    time, best = promised_time(planning), planning.best
    assert time is not None and best is not None and len(best.members) == 3
    assert time.seconds == pytest.approx(80 * best.step) and time.alone_seconds == pytest.approx(1400 / 8)
    assert planning.same_loss_seconds(best) == pytest.approx(1400 / 8 / best.useful_speed_up)


def test_a_plan_says_that_its_steps_are_of_up_to_so_many_samples() -> None:
    text = "\n".join(summary_lines(plan(MACHINES, FEW.model_copy(update={"strategy": "allreduce"}))))
    assert "80 steps of up to 24 samples, " in text and " each on average; " in text
    assert "a: up to 8 samples in 750 ms on average" in text
    assert "up to" not in "\n".join(summary_lines(plan(MACHINES, job(1_000_000))))


def planned(job: Job) -> tuple[Planning, Candidate]:
    candidate = predict(MACHINES, job, GROUP)
    return Planning(job=job, ranking=(candidate,), chosen=0), candidate


def as_planned(candidate: Candidate) -> list[Event]:
    """A run in which nothing happens: all recordings are passed over 40 times."""
    full = candidate.step * 80 / 60  # 24 samples take twice as long as 12
    events: list[Event] = [RunEvent(time=0, status="running", total_steps=80)]
    events += [MemberEvent(member=rank, time=0, status="ready", name=name) for rank, name in enumerate("abc")]
    now = 0.0
    for number in range(1, 81):
        parts, seconds = ((8, 8, 8), full) if number % 2 else ((4, 4, 3), full / 2)
        now += seconds
        events += [
            step(number, member=rank, time=now, samples=part, compute=part / 8, wait=seconds - part / 8)
            for rank, part in enumerate(parts)
        ]
    return [*events, RunEvent(time=now, status="completed")]


def test_a_run_in_which_nothing_happened_has_met_its_plan() -> None:
    planning, candidate = planned(FEW)
    result = compare_with_plan(reduce_events(as_planned(candidate)), plan_prediction(planning))
    assert result is not None and result.samples == pytest.approx(1.0)
    assert result.is_met and "fewer samples" not in str(result)


def test_no_correction_is_learnt_from_smaller_steps() -> None:
    _, candidate = planned(FEW)
    comparison = compare(candidate, as_planned(candidate))
    assert comparison is not None and comparison.ratio == pytest.approx(1.0, rel=0.02)
    assert [member.ratio for member in comparison.members] == pytest.approx([1.0] * 3, rel=0.02)


def test_one_machine_whose_epochs_end_in_a_small_step_learns_no_correction() -> None:
    """Four steps of 8 samples and one of 3: the middle one of the steps is none of their mean."""
    candidate = predict(MACHINES, FEW, ALONE)
    parts = [8 if number % 5 else 3 for number in range(1, 201)]
    events = [step(number, samples=part, compute=part / 8, wait=0) for number, part in enumerate(parts, 1)]
    comparison = compare(candidate, events)
    assert comparison is not None and comparison.ratio == pytest.approx(1.0, rel=0.02)


def test_overheads_are_those_of_the_micro_batches_that_are_taken() -> None:
    machines = joined([ClusterMachine(name=name, measurements=MEASURED) for name in "abc"], 10_000)
    candidate = predict(machines, FEW, GROUP)
    assert candidate.compute == pytest.approx((1.5 + 1.0) / 2)
    assert math.isclose(candidate.samples, candidate.samples_per_second * candidate.steps * candidate.step)
