"""Orders of many numbers: every number once, any part by itself, the same bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from training.strategies.parts.permutation import permuted


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 64, 97, 1000, 16_384, 16_385, 100_003])
def test_every_number_comes_once(size: int) -> None:
    assert np.array_equal(np.sort(permuted(0, size, size, 5, 3)), np.arange(size))


def test_a_part_is_what_the_whole_has_there() -> None:
    whole = permuted(0, 50_000, 50_000, 1)
    assert np.array_equal(permuted(17_000, 49_000, 50_000, 1), whole[17_000:49_000])


def test_the_order_is_the_same_on_every_system() -> None:
    assert permuted(0, 10, 10, 0).tolist() == [3, 4, 2, 9, 8, 0, 1, 5, 6, 7]
    assert permuted(10**9, 10**9 + 3, 7 * 10**11, 42, 9).tolist() == [424292365962, 233798324063, 140867903362]


@pytest.mark.slow
def test_seeds_and_orders_differ_and_pairs_come_as_often_as_others() -> None:
    assert len({tuple(permuted(0, 20, 20, seed, order)) for seed in range(10) for order in range(10)}) == 100
    together = np.zeros((50, 50))
    for order in range(4000):
        chosen = np.zeros(50)
        chosen[permuted(0, 5, 50, 3, order)] = 1
        together += np.outer(chosen, chosen)
    pairs = together[np.triu_indices(50, 1)]
    expected = 4000 * 5 * 4 / (50 * 49)
    assert ((pairs - expected) ** 2 / expected).sum() == pytest.approx(1225, rel=0.15)  # chi-squared


@pytest.mark.parametrize(("start", "stop", "size"), [(-1, 2, 3), (2, 1, 3), (0, 4, 3), (0, 1, 1 << 63)])
def test_places_that_are_none_are_refused(start: int, stop: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"places {start} to {stop} of {size}"):
        permuted(start, stop, size, 0)
