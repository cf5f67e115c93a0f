"""A hub that is sent rubbish refuses it, drops the sender, says one line, and goes on with the others."""

from __future__ import annotations

import itertools
import queue
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import grpc
import psutil
import pytest
import torch
from hub_lab import RUN, Lab, lab
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.waiting import until
from training.exchange import transport, wire
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name
from training.exchange.hub_pb2 import KIND_MEAN, BulkHeader, ControlUp, Hello, Status
from training.exchange.wire import AnchorChunk, BytesChunk, MeanChunk

FP32 = codec_by_name("fp32")
rounds = itertools.count()


def refused(running: Lab, method: str, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Send ``messages``, keep the stream open, and return how the hub ended it."""
    more: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    for message in messages:
        more.put(message)
    channel = grpc.insecure_channel(running.address, transport.CHANNEL_OPTIONS)
    call = channel.stream_stream(method)(iter(more.get, None), timeout=60)
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        pass
    more.put(None)
    channel.close()
    return call.code(), call.details()


class Intruder:
    """A seated member that then says what it likes; rank 2 of 3."""

    def __init__(self, running: Lab) -> None:
        self.words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.channel = grpc.insecure_channel(running.address, transport.CHANNEL_OPTIONS)
        hello = ControlUp(hello=Hello(version=wire.PROTOCOL_VERSION, run_id=RUN, rank=2, world_size=3, name="intruder"))
        self.words.put(hello.SerializeToString())
        self.control: Iterator[bytes] = self.channel.stream_stream(transport.CONTROL)(iter(self.words.get, None))
        self.session = Status.FromString(next(self.control)).session
        self.opening = wire.pack(wire.Open(2, self.session))

    def close(self) -> None:
        self.words.put(None)
        self.channel.close()


def start_with_intruder(fresh: Lab) -> Intruder:
    """Seat ranks 0 and 1 in the background: the group starts when the intruder opens its bulk stream."""
    for rank in (0, 1):
        Thread(target=fresh.connect, args=(rank,), daemon=True).start()
    until(lambda: fresh.missing() == ["rank 2 (machine-2)"])
    return Intruder(fresh)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab(tmp_path_factory.mktemp("hub"), 3) as one:
        one.connect_all()
        one.members[2].close()
        until(lambda: "left" in one.statuses(2))
        yield one


def serves(running: Lab) -> bool:
    until(lambda: {0, 1} <= running.members.keys())
    name = f"after/{next(rounds)}"
    pending = [running.members[r].start_mean(name, torch.tensor([float(r)]), 1.0, FP32) for r in (0, 1)]
    return [p.wait(60).mean.item() for p in pending] == [0.5, 0.5]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=st.lists(st.binary(max_size=100), min_size=1, max_size=3))
@pytest.mark.parametrize("method", [transport.CONTROL, transport.BULK])
def test_any_bytes_of_a_stranger_are_refused(running: Lab, method: str, messages: list[bytes]) -> None:
    lines = len(running.warnings())
    code, _ = refused(running, method, messages)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    until(lambda: len(running.warnings()) == lines + 1)
    assert serves(running)


CHUNK = wire.pack(MeanChunk("evil", FP32, 8, 0, 1.0, memoryview(bytes(32))))
PIECE = wire.pack(BytesChunk("evil", 8, 0, memoryview(bytes(8))))
ANCHOR = wire.pack(AnchorChunk("", 8, 0, memoryview(bytes(8))))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    message=st.sampled_from([CHUNK, PIECE, ANCHOR]),
    changes=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 255)), max_size=3),
)
def test_damaged_frames_of_a_member_drop_only_that_member(
    tmp_path: Path, message: bytes, changes: list[tuple[int, int]]
) -> None:
    damaged = bytearray(message)
    for position, value in changes:
        damaged[position % len(damaged)] = value
    with lab(tmp_path, 3) as fresh:
        intruder = start_with_intruder(fresh)
        code, _ = refused(fresh, transport.BULK, [intruder.opening, bytes(damaged), b"\xff"])
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        until(lambda: fresh.statuses(2)[-1] == "lost")
        intruder.close()
        assert serves(fresh)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([CHUNK, CHUNK], "came twice"),
        ([wire.pack(MeanChunk("evil", FP32, 3_000_001, 11, 1.0, memoryview(bytes(4 * 116_417))))], "longer than"),
        ([wire.framed(BulkHeader(kind=KIND_MEAN, name="x", codec="fp32", size=2**62, chunk=0), bytes(64))], "belong"),
        ([PIECE, PIECE], "came twice"),
        ([wire.pack(BytesChunk("big", 2 << 20, 1, memoryview(bytes(1 << 20))))], "out of order"),
        ([wire.pack(wire.Open(0, 1))], "unexpected frame"),
        ([b"\xff\xff\xff\xff" + bytes(40)], "longer than the frame"),
    ],
)
def test_a_live_member_that_breaks_the_rules_is_dropped(tmp_path: Path, messages: list[bytes], reason: str) -> None:
    with lab(tmp_path, 3) as fresh:
        intruder = start_with_intruder(fresh)
        code, details = refused(fresh, transport.BULK, [intruder.opening, *messages])
        assert code == grpc.StatusCode.INVALID_ARGUMENT and reason in details
        until(lambda: fresh.statuses(2)[-1] == "lost")
        assert serves(fresh)
        intruder.close()


def test_impossible_content_costs_the_sender_its_place_and_nobody_else(tmp_path: Path) -> None:
    codec = codec_by_name("int8")
    with lab(tmp_path, 3) as fresh:
        intruder = start_with_intruder(fresh)
        bad = wire.pack(MeanChunk("x:1", codec, 1, 0, 1.0, memoryview(b"\x7f\x80")))
        more: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        more.put(intruder.opening)
        more.put(bad)
        channel = grpc.insecure_channel(fresh.address, transport.CHANNEL_OPTIONS)
        call = channel.stream_stream(transport.BULK)(iter(more.get, None))
        until(lambda: len(fresh.members) == 2)
        pending = [fresh.members[r].start_mean("x", torch.tensor([2.0 * r]), 1.0, codec) for r in (0, 1)]
        results = [p.wait(60) for p in pending]
        assert [r.mean.item() for r in results] == [1.0, 1.0]
        until(lambda: fresh.statuses(2)[-1] == "lost")
        assert call.code() == grpc.StatusCode.INVALID_ARGUMENT and "impossible element" in call.details()
        more.put(None)
        channel.close()
        intruder.close()


def test_values_that_are_not_finite_are_left_out_and_the_third_time_costs_the_place(tmp_path: Path) -> None:
    values = memoryview(struct.pack("<2f", float("nan"), 1.0))
    frames = [wire.pack(MeanChunk(f"x:{n}", FP32, 2, 0, 1.0, values)) for n in (1, 2, 3)]
    with lab(tmp_path, 3) as fresh:
        intruder = start_with_intruder(fresh)
        more: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for frame in (intruder.opening, *frames):
            more.put(frame)
        call = intruder.channel.stream_stream(transport.BULK)(iter(more.get, None), timeout=60)
        until(lambda: len(fresh.members) == 2)
        for _ in range(3):
            pending = [fresh.members[r].start_mean("x", torch.tensor([2.0 * r, 0.0]), 1.0, FP32) for r in (0, 1)]
            results = [p.wait(60) for p in pending]
            assert [(r.mean.tolist(), r.weight, r.refused) for r in results] == [([1.0, 0.0], 2.0, (2,))] * 2
        with pytest.raises(grpc.RpcError, match="not finite 3 times"):
            list(call)
        assert sum("intruder sent values that are not finite" in line for line in fresh.warnings()) == 3
        more.put(None)
        intruder.close()


def test_a_flood_of_contributions_is_cut_off(tmp_path: Path) -> None:
    """Without the others nothing closes: what one member may pile up is bounded."""
    chunk = bytes(4 * CHUNK_ELEMENTS)
    with lab(tmp_path, 3, elements=CHUNK_ELEMENTS) as fresh:
        intruder = start_with_intruder(fresh)
        before = psutil.Process().memory_info().rss
        flood = (
            wire.pack(MeanChunk(f"flood/{i}", FP32, CHUNK_ELEMENTS, 0, 1.0, memoryview(chunk))) for i in range(400)
        )
        call = intruder.channel.stream_stream(transport.BULK)(itertools.chain([intruder.opening], flood), timeout=60)
        with pytest.raises(grpc.RpcError, match="wait for the other members"):
            list(call)
        assert psutil.Process().memory_info().rss - before < 120 << 20
        assert serves(fresh)
        intruder.close()


def test_too_large_a_message_is_refused_by_the_transport(running: Lab) -> None:
    options = [*transport.CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1)]
    channel = grpc.insecure_channel(running.address, options)
    call = channel.stream_stream(transport.BULK)(iter([bytes(8 << 20)]), timeout=60)
    with pytest.raises(grpc.RpcError):
        list(call)
    assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    channel.close()
    assert serves(running)


@pytest.mark.parametrize("tls", [True, False])
def test_bytes_that_are_no_grpc_do_no_harm(tmp_path: Path, tls: bool) -> None:
    with lab(tmp_path, 2, tls=tls) as fresh:
        fresh.connect_all()
        host, _, port = fresh.address.rpartition(":")
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\x16\x03\x01\xff\xff" + bytes(500)):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(garbage)
        assert serves(fresh)
