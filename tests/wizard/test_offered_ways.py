"""What a person is offered to train with, and what becomes of it when the interval moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.wizard.services.forecasting import ranked
from app.wizard.state.records import CandidateRow
from app.wizard.state.ways import about, advised, label_of, offered
from distributed.planning.planner import plan
from distributed.planning.reasons import why_in_words
from distributed.planning.run_time import FIXED_STEPS
from tests.distributed.planner_figures import cluster, job
from tests.wizard.fake_services import moved, way

FAST = way("diloco mxfp4", "desk", "anna", interval=50, step=0.1, steps=600, useful_speed_up=1.8)
OTHER = way("fedavg fp16", "desk", "anna", index=1, step=0.1, steps=600, useful_speed_up=1.7)
EXACT = way("allreduce fp16", "desk", "anna", index=2, step=0.2, steps=600, useful_speed_up=1.2)
ALONE = way("alone", "desk", index=3, step=0.3, steps=1200)
WAYS = (FAST, OTHER, EXACT, ALONE)


def speeding(one: CandidateRow, interval: int, useful: float, **more: object) -> CandidateRow:
    """The way at another interval, where it is so fast."""
    there = moved(one, interval)
    return replace(there, candidate=there.candidate.model_copy(update={"useful_speed_up": useful, **more}))


def test_three_are_offered() -> None:
    assert [label for label, _ in offered(WAYS, FAST)] == ["Fast", "Exact", "One machine"]


def test_what_was_chosen_by_name_is_offered_too() -> None:
    assert offered(WAYS, OTHER)[-1] == ("fedavg fp16", OTHER)
    assert label_of(OTHER, WAYS) == "fedavg fp16"


def test_the_fastest_may_be_exact() -> None:
    exact = replace(EXACT, index=0, recommended=True)
    assert [label for label, _ in offered((exact, ALONE), exact)] == ["Fast and exact", "One machine"]


@pytest.mark.parametrize(("useful", "acceptable", "index"), [(1.85, True, 0), (1.7, True, None), (1.9, False, None)])
def test_another_interval_is_recommended_where_it_is_better(useful: float, acceptable: bool, index: int | None) -> None:
    other = replace(speeding(FAST, 100, useful), acceptable=acceptable)
    found = advised((other, *WAYS[1:]), "fastest")
    assert (found.index if found else None) == index


def test_a_moved_interval_makes_another_way_the_recommended_one() -> None:
    other = speeding(OTHER, 100, 2.1)
    assert advised((FAST, other, EXACT, ALONE), "fastest") is other
    assert advised((FAST, speeding(OTHER, 100, 1.84), EXACT, ALONE), "fastest") is FAST  # nobody can tell them apart


def test_one_time_is_told_by_plan_and_strategy() -> None:
    planning = plan(cluster([8.0, 8.0]), job(1_000_000))
    chosen = next(row for row in ranked(planning, None).ways if row.recommended)
    assert chosen.time is not None and chosen.time.seconds == chosen.seconds < chosen.time.alone_seconds
    assert next(about(chosen)) == f"{why_in_words(planning)}."
    assert "same loss" not in " ".join([*about(chosen), *ranked(planning, None).reasons])


def test_fixed_steps_are_told_as_what_they_are() -> None:
    planning = plan(cluster([8.0, 8.0]), job(1_000_000, steps=100))
    chosen = next(row for row in ranked(planning, None).ways if row.recommended)
    assert chosen.time is not None and chosen.time.seconds >= chosen.time.alone_seconds
    assert f"{FIXED_STEPS}." in about(chosen)
