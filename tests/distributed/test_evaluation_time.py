"""The time of evaluations in the predicted time of a run."""

from __future__ import annotations

import pytest
from planner_figures import job, joined, machine, predict

from distributed.planning.documents.cluster import Cluster
from distributed.planning.documents.document import Choice, Job, Workload, job_of
from distributed.planning.documents.evaluations import EvaluationPlan
from distributed.planning.planner import plan
from distributed.planning.run_time import promised_time
from profiles.files.resolve import profile_from_options
from profiles.optimisation import EvaluationSettings

SPLITS = {"validation": 32, "test": 64}


def machines(*seconds: float) -> Cluster:
    """Equal machines, and the seconds in which each evaluates a sample."""
    return joined([machine("abc"[index], evaluation=each) for index, each in enumerate(seconds)])


def evaluated(interval: int = 0, before: bool = False) -> Job:
    """A job of 1,000 steps for four machines, and 2,000 for two."""
    return job(evaluation=EvaluationPlan(samples=SPLITS, interval=interval, before=before))


def together(strategy: str = "allreduce", interval: int = 1) -> Choice:
    return Choice(strategy=strategy, codec="fp32", engine="mesh", members=("a", "b"), interval=interval)


@pytest.mark.parametrize(
    ("interval", "before", "steps", "samples"),
    [(0, False, 214, 96), (0, True, 214, 192), (50, True, 214, 192 + 4 * 32), (50, False, 200, 96 + 3 * 32)],
)
def test_all_splits_at_both_ends_and_validation_in_between(
    interval: int, before: bool, steps: int, samples: int
) -> None:
    assert EvaluationPlan(samples=SPLITS, interval=interval, before=before).samples_in(steps) == samples


def test_a_profile_says_when_it_evaluates() -> None:
    profile = profile_from_options("p", {"eval_interval": 70, "eval_before": False})
    workload = Workload(trainable=10, total=10, samples=30, evaluated=SPLITS)
    assert job_of(profile, workload).evaluation == EvaluationPlan(samples=SPLITS, interval=70)


def test_an_interval_may_be_a_share_of_the_run() -> None:
    settings = EvaluationSettings(eval_interval=0.25, eval_before=False)
    assert [settings.interval_in(steps) for steps in (1, 28, 400)] == [1, 7, 100]
    assert EvaluationPlan.of(settings, SPLITS).samples_in(28) == 96 + 3 * 32
    assert EvaluationSettings(eval_interval=70).interval_in(28) == 70


def test_members_divide_the_samples_and_wait_for_the_slowest() -> None:
    candidate = predict(machines(0.25, 0.5), evaluated(before=True), together())
    assert candidate.evaluating == pytest.approx(192 / 2 * 0.5)
    assert candidate.seconds == pytest.approx(candidate.steps * candidate.step + 48)


def test_one_machine_evaluates_all() -> None:
    alone = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a",))
    assert predict(machines(0.25, 0.5), evaluated(), alone).evaluating == pytest.approx(96 * 0.25)


def test_members_whose_weights_never_agree_evaluate_their_own_too() -> None:
    assert predict(machines(0.5, 0.5), evaluated(), together("noloco", 20)).evaluating == pytest.approx(24 + 48)


def test_what_was_not_measured_everywhere_is_counted_nowhere() -> None:
    assert predict(machines(0.25, 0.0), evaluated(), together()).evaluating == 0.0


def test_the_promise_holds_them_for_the_run_and_for_the_best_machine_alone() -> None:
    planning = plan(machines(0.5, 0.5), evaluated())
    time, best = promised_time(planning), planning.best
    assert time is not None and best is not None
    assert time.seconds == pytest.approx(best.steps * best.step + 24)
    assert time.alone_seconds == pytest.approx(4000 * 1.0 + 48)
