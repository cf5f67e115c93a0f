"""Frames: what is packed comes back, and anything else ends in one kind of error."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.exchange import wire
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name
from training.exchange.hub_pb2 import KIND_FAILED, KIND_MEAN, BulkHeader, ControlUp, Hello
from training.exchange.wire import AnchorChunk, BytesChunk, HubLimits, MeanChunk, WireError, tensor_view

LIMITS = HubLimits.for_model(1_000_000)


def mean_frame(name: str = "grad/1", codec: str = "fp32", elements: int = 5, chunk: int = 0) -> MeanChunk:
    values = torch.arange(float(min(elements, CHUNK_ELEMENTS)))
    payload = codec_by_name(codec).encode(values).numpy().data
    return MeanChunk(name, codec_by_name(codec), elements, chunk, 2.5, payload, (0, 2), (0, 1, 2))


VALID = [
    wire.pack(wire.Open(1, 77)),
    wire.pack(mean_frame()),
    wire.pack(mean_frame(codec="topk:0.5", elements=40)),
    wire.pack(BytesChunk("g", 3, 0, memoryview(b"abc"), 1, (0, 1), (0, 1))),
    wire.pack(AnchorChunk("", 3, 0, memoryview(b"abc"))),
    wire.pack(wire.Failed("x", "no")),
]


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "mxfp4", "topk:0.5"])
def test_a_mean_comes_back(codec: str) -> None:
    sent = mean_frame(codec=codec, elements=70)
    got = wire.parse(wire.pack(sent))
    assert isinstance(got, MeanChunk)
    assert (got.name, got.codec.name, got.elements, got.weight) == ("grad/1", codec, 70, 2.5)
    assert (got.contributors, got.members) == ((0, 2), (0, 1, 2))
    assert torch.equal(got.values(), sent.values())


def test_other_frames_come_back() -> None:
    frames = [wire.parse(message) for message in VALID]
    assert frames[0] == wire.Open(1, 77)
    assert frames[3] == BytesChunk("g", 3, 0, memoryview(b"abc"), 1, (0, 1), (0, 1))
    assert frames[4] == AnchorChunk("", 3, 0, memoryview(b"abc"))
    assert frames[5] == wire.Failed("x", "no")


def test_payload_is_aligned_and_not_copied() -> None:
    message = wire.pack(mean_frame(elements=64))
    frame = wire.parse(message)
    assert isinstance(frame, MeanChunk) and frame.payload.obj is message
    assert tensor_view(frame.payload).data_ptr() % 16 == 0


@pytest.mark.parametrize("size", [0, 1, wire.CHUNK_BYTES, wire.CHUNK_BYTES + 1])
def test_long_payloads_are_cut_and_joined(size: int) -> None:
    data = bytes(i % 251 for i in range(size))
    frames = [wire.parse(m) for m in wire.pack_payload(AnchorChunk("", 0, 0, wire.EMPTY), data)]
    assert all(isinstance(f, AnchorChunk) and f.size == size and f.chunks == len(frames) for f in frames)
    assert b"".join(f.payload for f in frames if isinstance(f, AnchorChunk)) == data


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_or_refused(message: bytes) -> None:
    try:
        wire.parse_upload(message, LIMITS)
    except WireError:
        pass


@settings(max_examples=300)
@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4), st.integers())
def test_damaged_frames_are_parsed_or_refused(message: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    damaged = bytearray(message)
    for position, value in changes:
        damaged[position % len(damaged)] = value
    try:
        frame = wire.parse_upload(bytes(damaged[: cut % (len(damaged) + 1)]), LIMITS)
    except WireError:
        return
    if isinstance(frame, MeanChunk):
        assert frame.elements <= LIMITS.elements and frame.chunk < frame.chunks
        try:
            frame.values()
        except ValueError:
            pass


headers = st.builds(
    BulkHeader,
    kind=st.integers(0, 7),
    name=st.sampled_from(["x", "", "a/b", "ä", "x" * 129]),
    codec=st.sampled_from(["fp32", "topk:0.5", "topk:1e-9", "sparse", "nope", "f" * 40]),
    size=st.one_of(st.integers(0, 600_000), st.integers(0, 2**64 - 1)),
    chunk=st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1)),
    weight=st.floats(),
    contributors=st.lists(st.integers(0, 2**32 - 1), max_size=3),
    rank=st.integers(0, 2**32 - 1),
)


@settings(max_examples=300)
@given(headers, st.integers(0, 64))
def test_well_formed_nonsense_is_parsed_or_refused(header: BulkHeader, payload: int) -> None:
    try:
        frame = wire.parse_upload(wire.framed(header, bytes(payload)), LIMITS)
    except WireError:
        return
    assert not isinstance(frame, wire.Failed)
    if isinstance(frame, MeanChunk):
        assert math.isfinite(frame.weight) and frame.weight >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 1_000_001, "chunk": 0}, "bytes where"),
        ({"size": 2**60, "chunk": 2**30}, "bytes where"),
        ({"chunk": 1}, "beyond the vector"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": -1.0}, "weight"),
        ({"name": "../x y"}, "name"),
        ({"codec": "pickle"}, "unknown codec"),
        ({"contributors": [2, 1]}, "ascending"),
        ({"members": [1, 5000]}, "ascending"),
        ({"kind": KIND_FAILED}, "payload where none"),
    ],
)
def test_each_rule(change: dict[str, object], message: str) -> None:
    rest = 1_100_000 - 4 * CHUNK_ELEMENTS
    size = rest if change.get("size") == 1_100_000 else 5
    fields: dict[str, Any] = {"kind": KIND_MEAN, "name": "x", "codec": "fp32", "size": 5, **change}
    with pytest.raises(WireError, match=message):
        wire.parse_upload(wire.framed(BulkHeader(**fields), bytes(4 * size)), LIMITS)


def test_members_may_not_send_what_is_the_hubs() -> None:
    with pytest.raises(WireError, match="only the hub"):
        wire.parse_upload(wire.pack(wire.Failed("x", "no")), LIMITS)
    reply = codec_by_name("topk:0.5").reply
    payload = reply.encode(torch.ones(4)).numpy().data
    with pytest.raises(WireError, match="only the hub"):
        wire.parse_upload(wire.pack(MeanChunk("x", reply, 4, 0, 1.0, payload)), LIMITS)


def test_control_messages() -> None:
    hello = ControlUp(hello=Hello(version=wire.PROTOCOL_VERSION, run_id="r", rank=2, world_size=3, name="Ada's Mac"))
    assert wire.parse_control(hello.SerializeToString()).hello.name == "Ada's Mac"
    for bad in (b"", b"\xff\xff", ControlUp(hello=Hello(name="a\nb")).SerializeToString(), bytes(9000)):
        with pytest.raises(WireError):
            wire.parse_control(bad)


@given(st.binary(max_size=200))
def test_any_control_bytes_are_parsed_or_refused(message: bytes) -> None:
    for parse in (wire.parse_control, wire.parse_status):
        try:
            parse(message)
        except WireError:
            pass
