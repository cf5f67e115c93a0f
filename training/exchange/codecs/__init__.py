"""Number formats of the wire, by name.

========  =====================  ================================================
name      bytes an element       what is lost
========  =====================  ================================================
fp32      4                      nothing
bf16      2                      16 bits of mantissa
fp16      2                      13 bits of mantissa, values beyond 65,504
int8      1.03                   at most 1/127.5 of the largest of 32 neighbours
mxfp4     0.53                   at most 1/4 of the largest of 32 neighbours
topk:S    about 4 S              all but the share S of largest magnitude
topk2bit  1.75 S (topk2bit:S)    likewise, and all but four levels of value
========  =====================  ================================================

A codec is one file of this folder, with what it costs and loses; others find it through the registry.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.exchange.codecs.base import CHUNK_ELEMENTS, CastCodec, Codec, all_finite
from training.exchange.codecs.encoded import EncodedVector
from training.exchange.codecs.registry import codec_by_name, example_codecs, load
from training.exchange.codecs.sparsification import SparseCodec
from training.lazy import torch

__all__ = [
    "CHUNK_ELEMENTS",
    "CastCodec",
    "Codec",
    "EncodedVector",
    "SparseCodec",
    "all_finite",
    "chunk_bounds",
    "codec_by_name",
    "example_codecs",
    "is_short",
    "roundtrip",
]

load()

_PAIR, _CODED, _MORE = 256 << 10, 32 << 10, 48 << 10
"""Bytes up to which a pair of members sends all at once; the same for codecs with costly coding; and the additional
bytes that one round of more than two members may send."""


def is_short(codec: Codec, elements: int, members: int) -> bool:
    """Return whether a mean goes in one round, all to all: the additional bytes it sends must cost less than a round
    trip, and so must the arithmetic that every member repeats instead of sharing it."""
    size = codec.max_encoded_bytes(elements) if elements else 0
    extra_bytes = (members - 1) * (members - 2) * size / max(members, 1)
    return (
        elements <= CHUNK_ELEMENTS
        and size <= (_PAIR if isinstance(codec, CastCodec) else _CODED)
        and extra_bytes <= _MORE
    )


def chunk_bounds(elements: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of every chunk of a vector; one empty chunk for an empty vector."""
    for start in range(0, max(elements, 1), CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, elements)


def roundtrip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return what other members decode of flat fp32 ``values``, chunk by chunk as on the wire, on the same device."""
    result = torch.empty_like(values)
    for start, stop in chunk_bounds(values.numel()):
        result[start:stop] = codec.decode(codec.encode(values[start:stop]), stop - start)
    return result
