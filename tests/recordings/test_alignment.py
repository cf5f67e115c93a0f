"""Words opposite each other, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.recordings.segments import matching as alignment
from training.recordings.segments.matching import align
from training.recordings.segments.transcribing import attention_matrix, warp


def opposite(heard: str, said: str) -> list[int]:
    numbers = {word: number for number, word in enumerate({*heard.split(), *said.split()})}
    return align(*(np.array([numbers[word] for word in text.split()], np.int64) for text in (heard, said))).tolist()


@pytest.mark.parametrize(
    ("heard", "said", "found"),
    [
        ("a b c", "a b c", [0, 1, 2]),
        ("a x c", "a b c", [0, 1, 2]),
        ("a c", "a b c", [0, 2]),
        ("a b x c", "a b c", [0, 1, -1, 2]),
        ("", "a b", []),
        ("a b", "", [-1, -1]),
        ("the end the start", "the end of the other the start", [0, 1, 5, 6]),
    ],
)
def test_words_lie_opposite_their_likes(heard: str, said: str, found: list[int]) -> None:
    assert opposite(heard, said) == found


@given(st.lists(st.integers(0, 3), max_size=25), st.lists(st.integers(0, 3), max_size=25))
def test_divided_and_whole_it_costs_the_same(heard: list[int], said: list[int]) -> None:
    pair = np.array(heard, np.int64), np.array(said, np.int64)
    whole = align(*pair)
    divided = align(*pair, small=4)
    assert cost(*pair, divided) == cost(*pair, whole)
    places = [place for place in divided if place >= 0]
    assert places == sorted(set(places))


def cost(heard: np.ndarray, said: np.ndarray, found: np.ndarray) -> int:
    costs = alignment._SequencePair(heard, said, None, None)
    pairs = [(row, place) for row, place in enumerate(found) if place >= 0]
    gaps = len(heard) + len(said) - 2 * len(pairs)
    return gaps * alignment._GAP + sum(int(costs.costs(row, place, place + 1)[0]) for row, place in pairs)


@pytest.mark.slow
def test_an_hour_of_words_takes_little_memory() -> None:
    dice = np.random.default_rng(1)
    said = dice.integers(0, 500, 4_000)
    heard = np.delete(said, slice(1_000, 1_400))
    tracemalloc.start()
    found = align(heard, said)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert found[:1_000].tolist() == list(range(1_000)) and found[1_000:].tolist() == list(range(1_400, 4_000))


def test_words_far_apart_in_time_are_not_the_same() -> None:
    heard, said = np.array([7]), np.array([7, 7])
    assert align(heard, said, np.array([50.0]), np.array([1.0, 49.0])).tolist() == [1]


def test_warping_finds_where_each_token_begins() -> None:
    matrix = np.full((4, 20), -1.0, np.float32)
    for row, (first, end) in enumerate([(0, 3), (3, 9), (9, 10), (10, 20)]):
        matrix[row, first:end] = 1.0
    assert warp(matrix) == [0, 3, 9, 10]


def test_a_flat_attention_is_no_trouble() -> None:
    assert warp(attention_matrix(np.zeros((2, 3, 1), np.float32))) == [0, 0, 0]
