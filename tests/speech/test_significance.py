"""Whether two models differ, or the recordings cannot show it."""

from __future__ import annotations

import numpy as np
import pytest

from profiles.errors import BadInput
from speech.scoring.error_analysis import wer_difference
from training.tasks.outputs.predictions import Prediction


def evaluation(edits: list[int], speakers: int = 0, words: int = 4) -> list[Prediction]:
    who = [f"s{number % speakers}" if speakers else "" for number in range(len(edits))]
    return [
        Prediction(f"c{number}", "", "t", "t", "t", "t", wrong, words, wrong, words, speaker=name)
        for number, (wrong, name) in enumerate(zip(edits, who, strict=True))
    ]


def test_a_model_does_not_differ_from_itself() -> None:
    same = evaluation([0, 1, 2, 0] * 10)
    found = wer_difference(same, same)
    assert (found.difference, found.low, found.high, found.p, found.shown) == (0.0, 0.0, 0.0, 1.0, False)


def test_a_clear_difference_is_shown_and_a_small_one_is_not() -> None:
    clear = wer_difference(evaluation([3] * 40 + [2] * 40), evaluation([0, 1] * 40))
    assert clear.first == pytest.approx(2.5 / 4) and clear.second == pytest.approx(0.5 / 4)
    assert clear.shown and clear.high < -0.4 and clear.p < 0.001 and clear.improves == 1.0
    small = wer_difference(evaluation([1, 0, 1, 0, 1]), evaluation([0, 1, 0, 1, 0]))
    assert not small.shown and small.p > 0.1
    assert small.low < small.difference < small.high


@pytest.mark.slow
def test_the_interval_is_that_of_the_mean_of_paired_differences() -> None:
    """With equally long recordings the bootstrap's interval is about 1.96 standard errors to each side."""
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 4, 400), rng.integers(0, 3, 400)
    found = wer_difference(evaluation(first.tolist()), evaluation(second.tolist()))
    paired = (second - first) / 4
    error = 1.96 * paired.std() / 20
    assert found.low == pytest.approx(paired.mean() - error, abs=0.1 * error)
    assert found.high == pytest.approx(paired.mean() + error, abs=0.1 * error)


def test_speakers_are_drawn_where_there_are_enough() -> None:
    first, second = [1] * 60, [0] * 60
    few, many = (wer_difference(evaluation(first, n), evaluation(second, n)) for n in (9, 10))
    assert (few.units, few.drawn, many.units, many.drawn) == ("recordings", 60, "speakers", 10)


def test_the_same_seed_gives_the_same_interval() -> None:
    first, second = evaluation([1, 0, 2, 1, 0, 3]), evaluation([0, 0, 1, 2, 0, 1])
    assert wer_difference(first, second, seed=5) == wer_difference(first, second, seed=5)
    assert wer_difference(first, second, seed=5) != wer_difference(first, second, seed=6)


def test_only_what_both_have_heard_counts() -> None:
    first, second = evaluation([1, 1, 1]), evaluation([0, 0, 0, 0])
    found = wer_difference(first, second[1:])
    assert (found.recordings, found.left_out) == (2, 2)
    with pytest.raises(BadInput, match="transcribed by both"):
        wer_difference(first, [])
    with pytest.raises(BadInput, match="with words"):
        wer_difference(evaluation([1], words=0), evaluation([0], words=0))


@pytest.mark.parametrize(("recordings", "p", "shown"), [(2, 0.5, False), (4, 0.125, False), (6, 1 / 32, True)])
def test_few_recordings_claim_no_more_than_chance_lets_them(recordings: int, p: float, shown: bool) -> None:
    """All of them are better, and as many coins fall to one side with that probability; those without errors on either
    side tell nothing."""
    found = wer_difference(evaluation([3] * recordings + [0] * 9), evaluation([1] * recordings + [0] * 9))
    assert (found.p, found.shown) == (p, shown)
