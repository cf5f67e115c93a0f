"""Words opposite each other, in little memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.recordings.segments import matching as alignment
from speech.recordings.segments.matching import align
from speech.recordings.segments.transcribing import attention_matrix, warp


def opposite(heard: str, reference: str) -> list[int]:
    numbers = {word: number for number, word in enumerate({*heard.split(), *reference.split()})}
    return align(
        *(np.array([numbers[word] for word in text.split()], np.int64) for text in (heard, reference))
    ).tolist()


@pytest.mark.parametrize(
    ("heard", "reference", "positions"),
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
def test_words_lie_opposite_their_likes(heard: str, reference: str, positions: list[int]) -> None:
    assert opposite(heard, reference) == positions


@given(st.lists(st.integers(0, 3), max_size=25), st.lists(st.integers(0, 3), max_size=25))
def test_divided_and_whole_it_costs_the_same(heard: list[int], reference: list[int]) -> None:
    pair = np.array(heard, np.int64), np.array(reference, np.int64)
    undivided = align(*pair)
    divided = align(*pair, largest_block=4)
    assert cost(*pair, divided) == cost(*pair, undivided)
    positions = [position for position in divided if position >= 0]
    assert positions == sorted(set(positions))


def cost(heard: np.ndarray, reference: np.ndarray, positions: np.ndarray) -> int:
    costs = alignment._SequencePair(heard, reference, None, None)
    pairs = [(row, position) for row, position in enumerate(positions) if position >= 0]
    gaps = len(heard) + len(reference) - 2 * len(pairs)
    return gaps * alignment._GAP + sum(int(costs.costs(row, position, position + 1)[0]) for row, position in pairs)


@pytest.mark.slow
def test_an_hour_of_words_takes_little_memory() -> None:
    dice = np.random.default_rng(1)
    reference = dice.integers(0, 500, 4_000)
    heard = np.delete(reference, slice(1_000, 1_400))
    tracemalloc.start()
    positions = align(heard, reference)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert positions[:1_000].tolist() == list(range(1_000)) and positions[1_000:].tolist() == list(range(1_400, 4_000))


def test_words_far_apart_in_time_are_not_the_same() -> None:
    heard, reference = np.array([7]), np.array([7, 7])
    assert align(heard, reference, np.array([50.0]), np.array([1.0, 49.0])).tolist() == [1]


def test_warping_finds_where_each_token_begins() -> None:
    matrix = np.full((4, 20), -1.0, np.float32)
    for row, (start, end) in enumerate([(0, 3), (3, 9), (9, 10), (10, 20)]):
        matrix[row, start:end] = 1.0
    assert warp(matrix) == [0, 3, 9, 10]


def test_a_flat_attention_is_no_trouble() -> None:
    assert warp(attention_matrix(np.zeros((2, 3, 1), np.float32))) == [0, 0, 0]
