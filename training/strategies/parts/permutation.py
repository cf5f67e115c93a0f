"""Pseudo-random permutations of which any range can be computed without the rest.

A Feistel network over mixed radices (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains"), with the
finalizer of SplitMix64 (Steele et al. 2014) as its round function: k positions cost O(k), independent of the length
of the permutation. It uses only additions, products and shifts of 64-bit integers, so every operating system, processor
and library version computes the same order, which no library's generator guarantees.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK = 1 << 14
"""Positions whose intermediate results stay in a processor's cache."""
MAX_SIZE = 1 << 62
"""Longest permutation."""


def permuted(start: int, stop: int, size: int, seed: int, order: int = 0) -> NDArray[np.int64]:
    """Return positions ``start`` to ``stop`` of a permutation of the numbers below ``size``.

    Args:
        seed: selects the permutation, together with ``order``.
        order: see ``seed``.

    Raises:
        ValueError: there are no such positions, or more than :data:`MAX_SIZE` numbers.
    """
    if not 0 <= start <= stop <= size <= MAX_SIZE:
        raise ValueError(f"places {start} to {stop} of {size}")
    keys = [_splitmix(_splitmix(_splitmix(seed & _MASK) + order) + round_index) for round_index in range(_ROUNDS)]
    numbers = np.empty(stop - start, dtype=np.int64)
    for chunk_start in range(start, stop, _CHUNK):
        chunk_stop = min(chunk_start + _CHUNK, stop)
        numbers[chunk_start - start : chunk_stop - start] = _permute_below(
            np.arange(chunk_start, chunk_stop, dtype=np.uint64), size, keys
        )
    return numbers


def _permute_below(numbers: NDArray[np.uint64], size: int, keys: list[int]) -> NDArray[np.uint64]:
    """Permute the numbers below the next product ``rows * columns``, again until all are below ``size``."""
    rows = math.isqrt(max(size - 1, 0)) + 1
    columns = -(-size // rows)
    numbers = _feistel(numbers, rows, columns, keys)
    while (beyond := np.flatnonzero(numbers >= size)).size:
        numbers[beyond] = _feistel(numbers[beyond], rows, columns, keys)
    return numbers


def _feistel(numbers: NDArray[np.uint64], rows: int, columns: int, keys: list[int]) -> NDArray[np.uint64]:
    left: NDArray[np.uint64]
    right: NDArray[np.uint64]
    left, right = np.divmod(numbers, np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2:
            right = _add_hash(right, left, columns, key)
        else:
            left = _add_hash(left, right, rows, key)
    combined: NDArray[np.uint64] = left * np.uint64(columns) + right
    return combined


def _add_hash(value: NDArray[np.uint64], round_input: NDArray[np.uint64], radix: int, key: int) -> NDArray[np.uint64]:
    """Add a hash of ``round_input`` to ``value``, modulo ``radix``, which is below 2^32."""
    mixed: NDArray[np.uint64] = round_input + np.uint64(key)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed >>= np.uint64(32)
    mixed *= np.uint64(radix)
    mixed >>= np.uint64(32)
    mixed += value
    return np.where(mixed >= radix, mixed - np.uint64(radix), mixed)


def _splitmix(value: int) -> int:
    """Return the SplitMix64 output for state ``value``."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ value >> 30) * _FIRST) & _MASK
    value = ((value ^ value >> 27) * _SECOND) & _MASK
    return value ^ value >> 31
