"""Fast codecs against plain ones: the same bytes for any bits, however values are cut and laid out."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from training.exchange import staging
from training.exchange.codecs import CHUNK_ELEMENTS, EncodedVector, all_finite, codec_by_name, roundtrip

BOUNDARIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
SPECIAL = [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x3E800000, 0x3E800001, 0x3E7FFFFF, 0x3F400000, 0x3F3FFFFF, 0x3FA00000, 0x3FA00001, 0x40200000, 0x40A00000),
    *(0x40600000, 0x405FFFFF, 0x40E00000, 0x40FFFFFF, 0x72000000, 0x71FFFFFF, 0x71800000, 0x00F00000, 0x02000000),
]
"""Zeros, subnormal and extreme numbers, ties between E2M1 numbers and their neighbours, 2^100 and what is about it."""
finite_bits = st.integers(0, 0xFFFFFFFF).filter(lambda bits: bits >> 23 & 0xFF != 0xFF)
near = st.builds(lambda exponent, rest: exponent << 23 | rest, st.integers(120, 130), st.integers(0, 0x7FFFFF))
vectors = st.lists(st.one_of(finite_bits, near, st.sampled_from(SPECIAL)), max_size=130)


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32).view(torch.float32)


def scaled(values: torch.Tensor, exponent: int, least: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % 32)).view(-1, 32)
    scales = ((blocks.abs().amax(1).view(torch.int32) >> 23) - exponent).clamp(min=least)
    return scales.to(torch.uint8), blocks * ((254 - scales) << 23).view(torch.float32).unsqueeze(1)


def int8(values: torch.Tensor) -> torch.Tensor:
    scales, blocks = scaled(values, 6, 1)
    return torch.cat([scales, blocks.round().clamp(-127, 127).to(torch.int8).view(torch.uint8).view(-1)[: len(values)]])


def mxfp4(values: torch.Tensor) -> torch.Tensor:
    scales, blocks = scaled(values, 2, 2)
    above, at = blocks.abs().unsqueeze(-1) > BOUNDARIES, blocks.abs().unsqueeze(-1) == BOUNDARIES
    codes = (above | at & (torch.arange(7) % 2 == 1)).sum(-1)  # a tie goes to the even code
    codes = (codes + 8 * ((blocks < 0) & (codes > 0))).view(-1, 2)
    return torch.cat([scales, (codes[:, 0] | codes[:, 1] << 4).to(torch.uint8)[: -(-len(values) // 2)]])


def topk(values: torch.Tensor) -> torch.Tensor:
    kept = torch.sort(values.abs(), descending=True, stable=True).indices[: -(-len(values) // 4)]
    sent = torch.zeros_like(values)
    sent[kept] = values[kept]
    return sent


REFERENCES: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [("int8", int8), ("mxfp4", mxfp4)]


@pytest.mark.parametrize(("name", "reference"), REFERENCES)
@given(bits=vectors)
@example(bits=SPECIAL)
@example(bits=[*SPECIAL, *[0] * 5, 0x7F000000, *SPECIAL])
def test_bytes_are_the_plain_codecs(
    name: str, reference: Callable[[torch.Tensor], torch.Tensor], bits: list[int]
) -> None:
    values = from_bits(bits)
    before = values.clone()
    assert torch.equal(codec_by_name(name).encode(values), reference(values))
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(("name", "reference"), REFERENCES)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_of_a_chunk_are_the_plain_codecs(
    name: str, reference: Callable[[torch.Tensor], torch.Tensor], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**31), 2**31, (CHUNK_ELEMENTS,), generator=generator, dtype=torch.int32)
    values = torch.where(values >> 23 & 0xFF == 0xFF, values ^ 1 << 30, values).view(torch.float32)
    normal = torch.randn(CHUNK_ELEMENTS - seed, generator=generator) * 10.0 ** (4 * seed - 6)
    for sample in (values, normal, torch.round(normal * 4) / 4):
        assert torch.equal(codec_by_name(name).encode(sample), reference(sample))


@given(bits=vectors, first=st.integers(0, 3), step=st.integers(2, 3))
def test_how_values_lie_in_memory_does_not_matter(bits: list[int], first: int, step: int) -> None:
    values = from_bits(bits)[first::step]
    for name in ("int8", "mxfp4", "topk:0.25"):
        codec = codec_by_name(name)
        assert torch.equal(codec.encode(values), codec.encode(values.clone()))
        assert torch.equal(codec.reply.encode(values), codec.reply.encode(values.clone()))


@given(bits=vectors)
@example(bits=[0x3F800000, 0xBF800000] * 9)
@example(bits=[0] * 7)
def test_topk_keeps_the_largest_and_of_equal_ones_the_first(bits: list[int]) -> None:
    values = from_bits(bits).clamp(-1e38, 1e38)
    codec = codec_by_name("topk:0.25")
    sent = codec.decode(codec.encode(values), len(values))
    assert torch.equal(sent.view(torch.int32), topk(values).bfloat16().float().view(torch.int32))


@given(bits=vectors, place=st.integers(0, 200), bad=st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000, 0xFF800001]))
def test_a_number_that_is_none_is_found_anywhere(bits: list[int], place: int, bad: int) -> None:
    assert all_finite(from_bits(bits))
    broken = from_bits([*bits[:place], bad, *bits[place:]])
    assert not all_finite(broken)
    for name in ("int8", "mxfp4", "topk:0.25"):
        with pytest.raises(ValueError, match="cannot carry"):
            codec_by_name(name).encode(broken)


def fetched(values: torch.Tensor, name: str) -> torch.Tensor | EncodedVector:
    """Return what a device hands to the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "is_asynchronous", lambda device: True)
        patch.setattr(staging, "wait_for_device", lambda device: None)
        return staging.fetch(values, codec_by_name(name))


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.25"])
@given(bits=vectors)
@example(bits=SPECIAL)
def test_what_comes_from_a_device_has_the_same_bytes(name: str, bits: list[int]) -> None:
    values, codec = from_bits(bits), codec_by_name(name)
    if not codec.carries(values):
        return
    there = fetched(values, name)
    if isinstance(there, torch.Tensor):
        assert codec.exact or not codec.works_on_devices
        assert torch.equal(there, values)
    else:
        assert torch.equal(there.read(0, len(bits)), codec.encode(values))
        assert torch.equal(staging.decoded_on_device(values, codec), roundtrip(codec, values))


@pytest.mark.parametrize("name", ["bf16", "fp16", "int8", "mxfp4"])
@given(bits=vectors, place=st.integers(0, 200), bad=st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000]))
def test_what_cannot_be_carried_is_not_lost_on_its_way_from_a_device(
    name: str, bits: list[int], place: int, bad: int
) -> None:
    values = from_bits([*bits[:place], bad, *bits[place:]])
    there = fetched(values, name)
    assert isinstance(there, torch.Tensor)
    assert torch.equal(there.view(torch.int32), values.view(torch.int32))


CUT = ["bf16", "fp16", "int8", "mxfp4"]


@pytest.mark.parametrize("name", CUT)
@given(bits=vectors, cuts=st.sets(st.integers(1, 4)))
def test_a_piece_of_an_encoded_vector_has_the_bytes_that_it_has_alone(
    name: str, bits: list[int], cuts: set[int]
) -> None:
    values, codec = from_bits(bits), codec_by_name(name)
    if not codec.carries(values):
        return
    whole, size = EncodedVector(codec, len(bits), torch.device("cpu")), len(bits)
    whole.write(0, size, codec.encode(values))
    joined = whole.empty_like()
    bounds = sorted({0, size, *(32 * cut for cut in cuts if 32 * cut < size)})
    for start, stop in itertools.pairwise(bounds):
        assert torch.equal(whole.read(start, stop), codec.encode(values[start:stop]))
        joined.write(start, stop, codec.encode(values[start:stop]))
    expected = codec.decode(codec.encode(values), size)
    assert torch.equal(joined.decode().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", CUT)
def test_what_is_no_piece_is_refused(name: str) -> None:
    codec, values = codec_by_name(name), torch.ones(64)
    vector = EncodedVector(codec, 70, torch.device("cpu"))
    with pytest.raises(ValueError, match=name):
        vector.write(0, 64, codec.encode(values)[1:])
    if codec.block > 1:
        with pytest.raises(ValueError, match="is no piece of whole blocks"):
            vector.write(0, 33, codec.encode(values[:33]))
        with pytest.raises(ValueError, match="impossible"):
            vector.write(0, 64, torch.zeros_like(codec.encode(values)))
