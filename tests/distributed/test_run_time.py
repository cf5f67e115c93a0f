"""The sentences about a run's time read once, whatever the machines are called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from distributed.planning.run_time import FIXED_STEPS, RunTime, quality_text, together_text


@pytest.mark.parametrize(
    ("time", "sentences"),
    [
        (RunTime(113.0, "desk", 211.0), ["This run takes 1:53; desk alone would take 3:31."]),
        (RunTime(113.0, "a", 211.0), ["This run takes 1:53; machine a alone would take 3:31."]),
        (
            RunTime(251.0, "a", 250.0),
            [
                "This run takes 4:11, about as long as machine a alone (4:10).",
                "Train on machine a alone, or connect the machines faster.",
            ],
        ),
        (
            RunTime(300.0, "desk", 200.0),
            [
                "This run takes 5:00, longer than desk alone (3:20).",
                "Train on desk alone, or connect the machines faster.",
            ],
        ),
        (
            RunTime(300.0, "desk", 200.0, fixed_steps=True),
            ["This run takes 5:00, longer than desk alone (3:20).", f"{FIXED_STEPS}."],
        ),
    ],
)
def test_a_group_that_is_no_faster_says_so_and_what_to_do(time: RunTime, sentences: list[str]) -> None:
    assert list(time.sentences) == sentences


def test_one_letter_is_a_machine_in_a_sentence_and_not_in_a_list() -> None:
    assert together_text(["a"]) == "machine a alone"
    assert together_text(["a", "b"]) == "a and b"


@pytest.mark.parametrize(
    ("seconds", "same_loss", "sentence"),
    [
        (77, 60, "After 1:00 the model is as good as that of desk alone at its end."),
        (77, 89, ""),  # it ends sooner, and trained longer it would still be as good sooner than one machine
        (
            77,
            150,
            "To be as good as the model of desk alone, which is faster, this run must train 2:30 instead of 1:17.",
        ),
    ],
)
def test_a_second_time_is_said_only_where_it_decides(seconds: float, same_loss: float, sentence: str) -> None:
    alone = SimpleNamespace(alone=True, members=("desk",))
    single = SimpleNamespace(choice=alone, fits=True, samples_per_second=1.0, seconds=123.0, loss_increase=0.0)
    group = SimpleNamespace(choice=SimpleNamespace(alone=False), seconds=seconds, loss_increase=0.0)
    planning: Any = SimpleNamespace(ranking=[single], same_loss_seconds=lambda _: same_loss)
    assert quality_text(planning, cast(Any, group)) == sentence
