"""The codec of 14 bits for each element that is sent."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles.errors import BadInput
from training.exchange.codecs import codec_by_name
from training.exchange.codecs.two_bits import BLOCK

EIGHT = [0.5, -3.0, 0.0, 2.0, 1.0, 1.5, -1.0, 0.25]


def coded(share: float, values: list[float]) -> bytes:
    return codec_by_name(f"topk2bit:{share}").encode(torch.tensor(values)).numpy().tobytes()


def decoded(share: float, data: bytes, elements: int) -> list[float]:
    return codec_by_name(f"topk2bit:{share}").decode(torch.tensor(list(data), dtype=torch.uint8), elements).tolist()


def test_the_bytes_are_the_written_ones() -> None:
    """-3, 2 and 1.5 have the mean 1/6 and the deviation 2.754: -3 is 1 below the middle, the others are in it."""
    levels = struct.pack("<4f", 0.0, -3.0, 1.75, 0.0)
    places, numbers = "001003005", "01" + "10" + "10" + "00"
    data = coded(0.375, EIGHT)
    assert data == levels + bytes.fromhex(places + "0") + int(numbers, 2).to_bytes(1, "big")
    assert decoded(0.375, data, 8) == [0, -3.0, 0, 1.75, 0, 1.75, 0, 0]


def test_every_block_sends_its_own() -> None:
    values = torch.zeros(2 * BLOCK + 10)
    values[[5, BLOCK - 1, BLOCK, 2 * BLOCK + 9]] = torch.tensor([8.0, 8.0, 1.0, 2.0])
    codec = codec_by_name(f"topk2bit:{1 / BLOCK}")
    found = codec.decode(codec.encode(values), values.numel())
    assert found.nonzero().view(-1).tolist()[1:] == [BLOCK, 2 * BLOCK + 9]
    assert int((found != 0).sum()) == 3


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60), st.sampled_from([0.1, 0.5, 1.0])
)
def test_size_is_as_announced_and_nothing_grows(values: list[float], share: float) -> None:
    codec, exact = codec_by_name(f"topk2bit:{share}"), torch.tensor(values, dtype=torch.float32)
    data = codec.encode(exact)
    assert data.numel() == codec.max_encoded_bytes(len(values))
    found = codec.decode(data, len(values))
    assert not values or float(found.abs().max()) <= float(exact.abs().max())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda data: data[:-1], "bytes where"),
        (lambda data: struct.pack("<f", float("nan")) + data[4:], "impossible level"),
        (lambda data: data[:16] + bytes.fromhex("0010010050") + data[-1:], "positions"),
        (lambda data: data[:16] + bytes.fromhex("0010030080") + data[-1:], "positions"),
    ],
)
def test_what_cannot_be_is_refused(what: object, said: str) -> None:
    assert callable(what)
    with pytest.raises(ValueError, match=said):
        decoded(0.375, what(coded(0.375, EIGHT)), 8)


@pytest.mark.parametrize("share", ["0", "1.5", "many", ""])
def test_a_share_that_cannot_be_is_refused(share: str) -> None:
    with pytest.raises(BadInput, match="topk2bit"):
        codec_by_name(f"topk2bit:{share}")


def test_what_is_not_finite_is_not_carried() -> None:
    codec = codec_by_name("topk2bit:0.5")
    assert not codec.carries(torch.tensor([1.0, torch.inf]))
    with pytest.raises(ValueError, match="NaN or infinity"):
        codec.encode(torch.tensor([1.0, torch.nan]))
