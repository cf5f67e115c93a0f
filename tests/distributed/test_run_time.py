"""The sentences about a run's time read once, whatever the machines are called."""

from __future__ import annotations

import pytest

from distributed.planning.run_time import FIXED_STEPS, RunTime, together_text


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
