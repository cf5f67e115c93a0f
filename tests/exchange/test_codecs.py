"""Codecs against written-down bytes, against a plain-Python reference, and against their stated error."""

from __future__ import annotations

import itertools
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import BadInput
from training.exchange.codecs import CHUNK_ELEMENTS, all_finite, chunk_bounds, codec_by_name, roundtrip

NAMES = ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.25"]
floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=0, max_size=100)

FIVE = [1.0, -2.5, 0.1, 65504.0, -1e-8]
BLOCK_AND_TAIL = [float(i) for i in range(-16, 16)] + [0.75, -0.25, 1e-30]
VECTORS = [
    ("fp32", FIVE, "0000803f000020c0cdcccc3d00e07f4777cc2bb2"),
    ("bf16", FIVE, "803f20c0cd3d80472cb2"),
    ("fp16", FIVE, "003c00c1662eff7b0080"),
    (
        "int8",
        BLOCK_AND_TAIL,
        "7d78c0c4c8ccd0d4d8dce0e4e8ecf0f4f8fc0004080c1014181c2024282c3034383c60e000",
    ),
    ("mxfp4", BLOCK_AND_TAIL, "817ceededdccccabaa090021224344545566c700"),
    ("topk:0.25", [0.5, -3.0, 0.0, 2.0, 1.0, 1.0, -1.0, 0.25], "020000000a40c00040"),
]


def encode(name: str, values: list[float]) -> bytes:
    return codec_by_name(name).encode(torch.tensor(values, dtype=torch.float32)).numpy().tobytes()


@pytest.mark.parametrize(("name", "values", "expected"), VECTORS, ids=[v[0] for v in VECTORS])
def test_bytes_are_the_written_ones(name: str, values: list[float], expected: str) -> None:
    assert encode(name, values).hex() == expected


@pytest.mark.parametrize(
    ("name", "data", "elements", "expected"),
    [
        ("fp32", "0000803f000020c0", 2, [1.0, -2.5]),
        ("bf16", "803f20c0", 2, [1.0, -2.5]),
        ("fp16", "003c00c1", 2, [1.0, -2.5]),
        ("int8", "7f0381", 2, [3.0, -127.0]),
        ("int8", "80fd", 1, [-6.0]),
        ("mxfp4", "8021430f", 6, [1.0, 2.0, 3.0, 4.0, -12.0, 0.0]),
        ("topk:0.5", "0100000002803f", 2, [0.0, 1.0]),
    ],
)
def test_written_bytes_decode(name: str, data: str, elements: int, expected: list[float]) -> None:
    raw = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8)
    assert codec_by_name(name).decode(raw, elements).tolist() == expected


def nearest_even(value: Fraction, grid: list[Fraction]) -> Fraction:
    """The grid value nearest to ``value``; of two the one at an even index."""
    best = min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))
    return grid[best]


def reference(values: list[float], emax: int, grid: list[Fraction], low: int) -> list[float]:
    result: list[float] = []
    for start in range(0, len(values), 32):
        block = [Fraction(v) for v in values[start : start + 32]]
        bits = struct.unpack("<I", struct.pack("<f", float(max(abs(v) for v in block))))[0]
        scale = Fraction(2) ** (max((bits >> 23) - emax, low) - 127)
        for v in block:
            magnitude = nearest_even(abs(v) / scale, grid) * scale
            result.append(float(magnitude if v > 0 else -magnitude))
    return result


FP4 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
INT8 = [Fraction(n) for n in range(128)]


@settings(max_examples=30, deadline=None)
@given(floats)
def test_mxfp4_is_the_formats_definition(values: list[float]) -> None:
    data = roundtrip(codec_by_name("mxfp4"), torch.tensor(values, dtype=torch.float32))
    assert data.tolist() == reference(torch.tensor(values, dtype=torch.float32).tolist(), 2, FP4, 2)


@settings(max_examples=30, deadline=None)
@given(floats)
def test_int8_is_the_formats_definition(values: list[float]) -> None:
    data = roundtrip(codec_by_name("int8"), torch.tensor(values, dtype=torch.float32))
    assert data.tolist() == reference(torch.tensor(values, dtype=torch.float32).tolist(), 6, INT8, 1)


def test_fp4_ties_go_to_the_even_code() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -5.0, 7.99]
    decoded = roundtrip(codec_by_name("mxfp4"), torch.tensor(ties))
    assert decoded.tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 0.0, -1.0, -4.0, 6.0]


@pytest.mark.parametrize(("name", "bound"), [("int8", 1 / 127.5), ("mxfp4", 0.25)])
@settings(max_examples=30, deadline=None)
@given(floats.filter(len), st.integers(min_value=-100, max_value=100))
def test_error_is_within_the_stated_share_of_the_largest(
    name: str, bound: float, values: list[float], shift: int
) -> None:
    exact = torch.tensor(values, dtype=torch.float32)
    exact = exact / exact.abs().max().clamp(min=1e-30) * 2.0**shift
    decoded = roundtrip(codec_by_name(name), exact)
    for block, sent in zip(torch.split(exact, 32), torch.split(decoded, 32)):
        assert float((block.double() - sent.double()).abs().max()) <= bound * float(block.abs().max()) + 2.0**-122


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(values=floats)
def test_size_is_as_announced_and_decoding_is_idempotent(name: str, values: list[float]) -> None:
    codec = codec_by_name(name)
    data = codec.encode(torch.tensor(values, dtype=torch.float32))
    assert data.dtype == torch.uint8 and data.numel() == codec.max_encoded_bytes(len(values))
    decoded = codec.decode(data, len(values))
    assert torch.equal(codec.decode(codec.encode(decoded), len(values)), decoded)


@settings(max_examples=30, deadline=None)
@given(values=floats)
def test_topk_keeps_the_largest_and_only_them(values: list[float]) -> None:
    exact = torch.tensor(values, dtype=torch.float32).clamp(-1e30, 1e30)
    decoded = roundtrip(codec_by_name("topk:0.25"), exact)
    kept = decoded != 0
    assert int(kept.sum()) <= -(-len(values) // 4)
    assert torch.equal(decoded[kept], exact.bfloat16().float()[kept])
    if kept.any() and not kept.all():
        assert float(exact[kept].abs().min()) * 1.01 >= float(exact[~kept].bfloat16().abs().min())


@settings(max_examples=30, deadline=None)
@given(values=floats)
def test_reply_of_topk_keeps_every_position(values: list[float]) -> None:
    reply = codec_by_name("topk:0.25").reply
    exact = torch.tensor(values, dtype=torch.float32).clamp(-1e30, 1e30)
    data = reply.encode(exact)
    assert data.numel() <= reply.max_encoded_bytes(len(values))
    assert torch.equal(reply.decode(data, len(values)), exact.bfloat16().float())


def test_sparse_positions_beyond_one_segment() -> None:
    values = torch.zeros(200_000)
    values[[0, 65_535, 65_536, 131_072, 199_999]] = 1.0
    reply = codec_by_name("topk:0.1").reply
    data = reply.encode(values)
    assert data.numel() == 4 + 4 * 4 + 2 * 5 + 2 * 5
    assert torch.equal(reply.decode(data, 200_000), values)


@pytest.mark.parametrize("name", [*NAMES, "sparse"])
@settings(max_examples=30, deadline=None)
@given(data=st.binary(max_size=80), elements=st.integers(min_value=0, max_value=70))
def test_any_bytes_decode_or_raise_value_error(name: str, data: bytes, elements: int) -> None:
    codec = codec_by_name("topk:1").reply if name == "sparse" else codec_by_name(name)
    raw = torch.tensor(list(data), dtype=torch.uint8)
    try:
        assert codec.decode(raw, elements).numel() == elements
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("name", "data", "elements"),
    [
        ("fp32", "00000000", 2),
        ("int8", "0001", 1),
        ("int8", "f901", 1),
        ("int8", "7f80", 1),
        ("mxfp4", "ff01", 1),
        ("mxfp4", "0101", 1),
        ("topk:0.5", "0200000003803f803f", 2),
        ("topk:0.5", "0100000003803f", 2),
        ("topk:0.5", "0100000004803f", 2),
        ("topk:0.5", "0100000001807f", 2),
        ("topk:0.5", "010000", 2),
    ],
)
def test_impossible_content_is_refused(name: str, data: str, elements: int) -> None:
    with pytest.raises(ValueError, match=name.partition(":")[0]):
        codec_by_name(name).decode(torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8), elements)


@pytest.mark.parametrize("name", ["int8", "mxfp4", "topk:0.5"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_scaled_formats_refuse_what_they_cannot_carry(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="NaN or infinity"):
        encode(name, [1.0, bad, 2.0])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_plain_formats_pass_nan_and_infinity(name: str) -> None:
    decoded = roundtrip(codec_by_name(name), torch.tensor([float("nan"), float("inf"), -float("inf")]))
    assert decoded[0].isnan() and decoded[1:].tolist() == [float("inf"), -float("inf")]


def test_unaligned_data_decodes() -> None:
    data = codec_by_name("fp32").encode(torch.tensor([1.5, 2.5]))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert codec_by_name("fp32").decode(shifted, 2).tolist() == [1.5, 2.5]


def test_roundtrip_works_chunk_by_chunk() -> None:
    values = torch.zeros(CHUNK_ELEMENTS + 4)
    values[:8] = 1.0
    values[-4:] = torch.tensor([0.1, 0.2, 0.3, 0.4]).bfloat16().float()
    decoded = roundtrip(codec_by_name("topk:0.25"), values)
    assert decoded[-4:].tolist() == [0.0, 0.0, 0.0, values[-1].item()]


@settings(max_examples=30, deadline=None)
@given(st.integers(min_value=0, max_value=5 * CHUNK_ELEMENTS))
def test_chunks_tile_the_vector(elements: int) -> None:
    bounds = list(chunk_bounds(elements))
    assert bounds[0][0] == 0 and bounds[-1][1] == elements
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert all(stop - start <= CHUNK_ELEMENTS for start, stop in bounds)


def test_names() -> None:
    assert codec_by_name("topk:0.030").name == "topk:0.03"
    with pytest.raises(BadInput, match="did you mean bf16"):
        codec_by_name("bf61")
    for bad in ("topk", "topk:0", "topk:1.5", "topk:nan", "topk:x"):
        with pytest.raises(BadInput, match="write for example"):
            codec_by_name(bad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("index", [0, 40, 4099])
def test_a_single_number_that_is_not_finite_shows(bad: float, index: int) -> None:
    values = torch.randn(4100)
    assert all_finite(values)
    values[index] = bad
    values[7] = -bad  # with which the sum of infinities is no infinity
    assert not all_finite(values)


def test_numbers_whose_sum_overflows_are_finite() -> None:
    assert all_finite(torch.full((1000,), 3e38)) and all_finite(torch.empty(0))
