"""ggml's quantised blocks of 32 weights: ``block_q8_0`` and ``block_q5_0`` of ``ggml-common.h``.

Both are the reference quantisers of ggml (``quantize_row_q8_0_ref``, ``quantize_row_q5_0_ref`` in ``ggml-quants.c``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 32

Array = npt.NDArray[Any]


def q8_0(weight: Array) -> bytes:
    """Return ``weight`` [rows, columns, a multiple of 32] as blocks: float16 scale, then 32 whole numbers of 8 bits.

    The scale is the largest magnitude of the block divided by 127.
    """
    blocks = weight.astype(np.float32).reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    numbers = _away_from_zero(blocks * _inverse(scale)).astype(np.int8)
    return _joined(scale, numbers.view(np.uint8))


def q5_0(weight: Array) -> bytes:
    """Return ``weight`` as blocks: float16 scale, the fifth bits of 32 numbers, then their lower four bits in pairs.

    The scale is the weight of largest magnitude, with its sign, divided by -16; ``n`` stands for ``scale * (n - 16)``.
    """
    blocks = weight.astype(np.float32).reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-16)
    numbers = np.minimum(31, (blocks * _inverse(scale) + np.float32(16.5)).astype(np.int8)).astype(np.uint8)
    fifth = np.packbits(numbers >> 4, axis=1, bitorder="little")
    low, high = numbers[:, : BLOCK // 2] & 0x0F, numbers[:, BLOCK // 2 :] & 0x0F
    return _joined(scale, np.concatenate([fifth, low | (high << 4)], axis=1))


def _inverse(scale: Array) -> Array:
    inverse: Array = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    return inverse


def _away_from_zero(values: Array) -> Array:
    """Round as C's ``roundf``: halves away from zero."""
    rounded: Array = np.trunc(values + np.copysign(np.float32(0.5), values))
    return rounded


def _joined(scale: Array, rest: Array) -> bytes:
    return np.concatenate([scale.astype("<f2").view(np.uint8), rest], axis=1).tobytes()
