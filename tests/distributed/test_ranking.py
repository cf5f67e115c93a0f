"""What is chosen among candidates that are about as fast, and what is said of it, is one decision."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import cluster, job, jobs, rates, speeds

from distributed.planning.documents.document import Candidate, Choice, Job, Preference
from distributed.planning.planner import plan
from distributed.planning.ranking import (
    ORDERS,
    SIGNIFICANT_RATIO,
    SIMPLICITY,
    about_equal,
    advantage,
    near_tie,
    order,
    simplest_first,
)
from distributed.planning.reasons import WORDS, sentence

preferences = st.sampled_from(get_args(Preference))
choices = st.builds(
    Choice,
    strategy=st.sampled_from(["allreduce", "diloco", "demo"]),
    codec=st.sampled_from(["fp32", "bf16", "mxfp4"]),
    engine=st.sampled_from(["mesh", "nccl"]),
    members=st.sampled_from([("a",), ("b",), ("a", "b"), ("a", "b", "c")]),
)
candidates = st.builds(
    Candidate,
    choice=choices,
    useful_speed_up=st.floats(0.9, 1.3),
    loss_increase=st.sampled_from([0.0, 0.01]),
    bytes_per_hour=st.sampled_from([0.0, 1e6, 4e6]),
)
rankings = st.lists(candidates, min_size=2, max_size=8, unique_by=lambda candidate: candidate.choice.without_interval)


def ranked(unordered: list[Candidate], preference: Preference) -> list[Candidate]:
    ranking = sorted(unordered, key=lambda candidate: order(candidate, preference))
    return simplest_first(ranking) if preference == "fastest" else ranking


@settings(deadline=None)
@given(rankings, preferences)
def test_the_chosen_one_is_better_than_its_rival_by_what_is_said(
    unordered: list[Candidate], preference: Preference
) -> None:
    best, *others = ranked(unordered, preference)
    near = [candidate for candidate in others if about_equal(candidate, best)]
    rival = max(near, key=lambda candidate: candidate.useful_speed_up, default=best)
    criterion = advantage(best, rival, preference)
    assert criterion is None or criterion.cost(best) < criterion.cost(rival)


@settings(deadline=None)
@given(rankings, preferences)
def test_the_subject_of_the_reason_is_the_chosen_one(unordered: list[Candidate], preference: Preference) -> None:
    best, *others = ranked(unordered, preference)
    if best.choice.alone:
        return  # it has another reason
    for reason in near_tie(best, [best, *others], preference):
        assert reason.subject.startswith(f"{best.choice.name} over {best.choice.over}")
        assert sentence(reason).startswith(f"{reason.subject} is used rather than {reason.other}, ")
        assert reason.subject != reason.other
        assert reason.numbers["useful"] == best.useful_speed_up


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(speeds, rates, jobs)
def test_a_plan_names_its_choice_as_the_one_that_is_used(machines: list[float], mbit: float, job: Job) -> None:
    planning = plan(cluster(machines, mbit), job)
    for reason in planning.reasons:
        if reason.code.startswith("rather-"):
            assert planning.best is not None and reason.subject.startswith(planning.best.choice.name)


def test_of_equally_simple_ways_the_one_that_sends_less_is_used_and_said() -> None:
    """The codecs lose nothing that is known of, so neither is called the more exact one."""
    planning = plan(cluster([8.0, 8.0, 8.0]), job(1_000_000, samples=60_000, strategy="diloco"))
    assert planning.best is not None and planning.best.choice.codec == "mxfp4"
    (reason,) = (reason for reason in planning.reasons if reason.code.startswith("rather-"))
    assert sentence(reason).startswith(
        "diloco mxfp4 over the mesh is used rather than diloco bf16 over the mesh, which"
    )
    assert sentence(reason).endswith("predictions cannot tell differences below 5 %): it sends less")


def test_a_simpler_way_is_used_though_another_is_a_little_faster() -> None:
    exact = Candidate(choice=Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a", "b")))
    merged = exact.model_copy(update={"choice": exact.choice.model_copy(update={"strategy": "diloco"})})
    pair = [c.model_copy(update={"useful_speed_up": speed}) for c, speed in ((merged, 1.52), (exact, 1.5))]
    best, *rest = ranked(pair, "fastest")
    (reason,) = near_tie(best, [best, *rest], "fastest")
    assert sentence(reason).endswith(": it averages gradients exactly") and "(1.52 against 1.50;" in sentence(reason)


def test_a_rival_that_is_clearly_slower_is_not_mentioned() -> None:
    best = Candidate(choice=Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a", "b")))
    fast, slow = (best.model_copy(update={"useful_speed_up": speed}) for speed in (2.0, 2.0 / SIGNIFICANT_RATIO - 0.1))
    slow = slow.model_copy(update={"choice": slow.choice.model_copy(update={"codec": "bf16"})})
    assert not list(near_tie(fast, [fast, slow], "fastest"))


@pytest.mark.parametrize("preference", get_args(Preference))
def test_every_criterion_can_be_said(preference: Preference) -> None:
    """But for what a chosen group never has alone: to be one machine, or to fit."""
    names = {criterion.name for criterion in (*SIMPLICITY, *ORDERS[preference])} - {"alone", "fits"}
    assert names <= {code.removeprefix("rather-") for code in WORDS}
