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
========  =====================  ================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import torch

from profiles.errors import BadInput
from training.exchange.codec_base import CHUNK_ELEMENTS, CastCodec, Codec
from training.exchange.microscaling import Int8Codec, MxFp4Codec
from training.exchange.sparsification import SparseCodec, TopKCodec

__all__ = [
    "CHUNK_ELEMENTS",
    "CODEC_NAMES",
    "CastCodec",
    "Codec",
    "Int8Codec",
    "MxFp4Codec",
    "SparseCodec",
    "TopKCodec",
    "chunk_bounds",
    "codec_by_name",
    "roundtrip",
]

_PLAIN: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        CastCodec("fp32", torch.float32),
        CastCodec("bf16", torch.bfloat16),
        CastCodec("fp16", torch.float16),
        Int8Codec(),
        MxFp4Codec(),
    )
}
CODEC_NAMES = (*_PLAIN, "topk:SHARE")


def codec_by_name(name: str) -> Codec:
    """Return the codec called ``name``, for example ``"bf16"`` or ``"topk:0.03"``.

    Raises:
        BadInput: there is none; the hint names the nearest.
    """
    plain = _PLAIN.get(name)
    if plain is not None:
        return plain
    kind, _, share = name.partition(":")
    if kind == "topk":
        try:
            return TopKCodec(float(share))
        except ValueError:
            raise BadInput(f"codec '{name}': bad share", "write for example topk:0.03 to send 3 %") from None
    near = difflib.get_close_matches(name, [*_PLAIN, "topk"], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(CODEC_NAMES)}"
    raise BadInput(f"there is no codec '{name}'", hint)


def chunk_bounds(elements: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of every chunk of a vector; one empty chunk for an empty vector."""
    for start in range(0, max(elements, 1), CHUNK_ELEMENTS):
        yield start, min(start + CHUNK_ELEMENTS, elements)


def roundtrip(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Return what the others decode of flat fp32 ``values``, chunk by chunk as on the wire, on the same device."""
    result = torch.empty_like(values)
    for start, stop in chunk_bounds(values.numel()):
        result[start:stop] = codec.decode(codec.encode(values[start:stop]), stop - start)
    return result
