"""A member with a valid certificate that means ill loses its own place, whatever it does first, and nobody else's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from hub_lab import RUN, Lab, lab

from tests.waiting import PATIENCE, until
from training.exchange import hub, transport, wire
from training.exchange.base import ExchangeError
from training.exchange.codecs import codec_by_name
from training.exchange.group import Group
from training.exchange.hub_pb2 import KIND_GATHER, BulkHeader, ControlUp, Hello, Status
from training.exchange.member import HubMember
from training.exchange.seat import Outbox, Seat
from training.exchange.wire import BytesChunk, MeanChunk

FP32, INT8 = codec_by_name("fp32"), codec_by_name("int8")


class Insider:
    """A member that says what it likes on its two streams."""

    def __init__(self, running: Lab, rank: int) -> None:
        self.running, self.rank = running, rank
        own = running.certificates and running.certificates / f"member-{rank}"
        self.channel = transport.open_channel(running.address, own)
        hello = Hello(version=wire.PROTOCOL_VERSION, run_id=RUN, rank=rank, world_size=running.size, name="insider")
        self.words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.words.put(ControlUp(hello=hello).SerializeToString())
        self.control: Iterator[bytes] = self.channel.stream_stream(transport.CONTROL)(iter(self.words.get, None))
        session = Status.FromString(next(self.control)).session
        self.frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.frames.put(wire.pack(wire.Open(rank, session)))
        self.bulk = self.channel.stream_stream(transport.BULK)(iter(self.frames.get, None), timeout=60)

    def say(self, frames: Iterable[bytes]) -> None:
        for frame in frames:
            self.frames.put(frame)

    def end(self) -> str:
        """Return why the hub ended its stream."""
        try:
            for _ in self.bulk:
                pass
        except grpc.RpcError:
            pass
        return str(self.bulk.details())

    def close(self) -> None:
        self.words.put(None)
        self.frames.put(None)
        self.channel.close()


@contextmanager
def insider_among(folder: Path, size: int, rank: int, **config: object) -> Iterator[tuple[Insider, list[HubMember]]]:
    """A group of ``size``, one of them an insider, which has no heart; the others are our own members."""
    with lab(folder, size, **{"lease": PATIENCE, **config}) as running:
        with ThreadPoolExecutor(size) as pool:
            others = [pool.submit(running.connect, other) for other in range(size) if other != rank]
            insider = Insider(running, rank)
            honest = [other.result() for other in others]
        until(lambda: all(len(member.members) == size or member._status.started for member in honest))
        yield insider, honest
        insider.close()


def mean_of(honest: list[HubMember], name: str) -> list[float]:
    pending = [member.start_mean(name, torch.tensor([float(member.rank)]), 1.0, FP32) for member in honest]
    return [one.wait(60).mean.item() for one in pending]


def first_chunk(name: str, elements: int = 1) -> bytes:
    return wire.pack(MeanChunk(name, INT8, elements, 0, 1.0, memoryview(bytes(INT8.max_encoded_bytes(elements)))))


@pytest.mark.parametrize(("size", "rank"), [(3, 0), (3, 2), (2, 1)])
def test_who_is_first_with_another_operation_throws_nobody_out(tmp_path: Path, size: int, rank: int) -> None:
    with insider_among(tmp_path, size, rank) as (insider, honest):
        insider.say([first_chunk("grad:1")])
        until(lambda: "grad:1" in insider.running.hub._group._book._open)
        ranks = [member.rank for member in honest]
        assert mean_of(honest, "grad") == [sum(ranks) / len(ranks)] * len(honest)
        assert "than the others sent" in insider.end()
        until(lambda: insider.running.statuses(rank)[-1] == "lost")
        assert mean_of(honest, "next") == [sum(ranks) / len(ranks)] * len(honest)


@pytest.mark.slow
def test_opened_names_without_end_cost_nobody_else_a_place(tmp_path: Path) -> None:
    with insider_among(tmp_path, 3, 2) as (insider, honest):
        insider.say(wire.pack(BytesChunk(f"name/{i}", 1, 0, memoryview(b"x"))) for i in range(5000))
        assert "operations under way" in insider.end()
        assert mean_of(honest, "grad") == [0.5, 0.5]


def test_padding_counts(tmp_path: Path) -> None:
    """A payload of one byte in a message of 8 kB holds 8 kB."""
    unknown = b"\x82\x7d" + b"\xd8\x36" + bytes(7000)  # field 2000, 7000 bytes: kept with the message, read by nobody

    def padded(number: int) -> bytes:
        head = BulkHeader(kind=KIND_GATHER, name=f"pad/{number}", size=1).SerializeToString() + unknown
        start = -(-(4 + len(head)) // 16) * 16
        return (len(head).to_bytes(4, "little") + head).ljust(start, b"\0") + b"x"

    with insider_among(tmp_path, 3, 2, elements=1) as (insider, honest):
        insider.say(map(padded, range(4000)))
        assert "wait for the other members" in insider.end()
        assert mean_of(honest, "grad") == [0.5, 0.5]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([wire.pack(wire.Model(1 << 39))], "its model has"),
        ([wire.pack(wire.Model(1)), first_chunk("grad")], "before all members have reported"),
    ],
)
def test_who_claims_another_model_goes_alone(tmp_path: Path, frames: list[bytes], reason: str) -> None:
    with insider_among(tmp_path, 3, 0, elements=None) as (insider, honest):
        insider.say(frames)
        until(lambda: 0 in insider.running.hub._group._size._said or insider.running.statuses(0)[-1] == "lost")
        for member in honest:
            member.expect_model(100)
        until(lambda: {1, 2} <= insider.running.hub._group._size._said.keys())
        assert mean_of(honest, "grad") == [1.5, 1.5]
        assert reason in insider.end()
        assert insider.running.hub._group.limits.elements == 100


def test_an_operation_before_the_model_is_known_costs_the_sender_its_place(tmp_path: Path) -> None:
    with insider_among(tmp_path, 3, 2, elements=None) as (insider, honest):
        insider.say([first_chunk("grad")])
        assert "before its model is known" in insider.end()
        for member in honest:
            member.expect_model(100)
        until(lambda: {0, 1} <= insider.running.hub._group._size._said.keys())
        assert mean_of(honest, "grad") == [0.5, 0.5]


def test_a_certificate_has_one_stream_of_each_kind(tmp_path: Path) -> None:
    """Streams that say nothing take up no places; who opens more loses its own older ones only."""
    with lab(tmp_path, 2, tls=True) as running:
        assert running.certificates is not None
        honest = running.connect_all()
        held = [transport.open_channel(running.address, running.certificates / "member-1") for _ in range(40)]
        quiet: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        calls = [channel.stream_stream(transport.CONTROL)(iter(quiet.get, None)) for channel in held]
        until(lambda: running.statuses(1)[-1] == "lost")
        until(lambda: sum(call.is_active() for call in calls) <= 1)
        assert mean_of(honest[:1], "alone") == [0.0]
        for _ in calls:
            quiet.put(None)
        for channel in held:
            channel.close()


def test_an_anchor_comes_from_the_member_that_was_asked(tmp_path: Path) -> None:
    with insider_among(tmp_path, 3, 1) as (insider, honest):
        group = insider.running.hub._group
        honest[1].close()
        until(lambda: insider.running.statuses(2)[-1] == "left")
        newcomer = insider.running.connect(2)
        newcomer.ask_for_anchor()
        until(lambda: bool(group._waiting()))
        insider.say([wire.pack(wire.AnchorChunk("", 2 << 20, 0, memoryview(bytes(1 << 20))))])
        insider.say([wire.pack(BytesChunk("after", 1, 0, memoryview(b"x")))])
        until(lambda: "after" in group._book._open)
        assert group._anchor_from is None


def test_a_slow_builder_is_waited_for_and_one_that_never_speaks_is_lost(tmp_path: Path) -> None:
    with insider_among(tmp_path, 3, 2, elements=None, round_deadline=0.05, quorum=0.1) as (insider, honest):
        group = insider.running.hub._group
        for member in honest:
            member.expect_model(100)
        pending = [member.start_gather("start", b"x") for member in honest]
        until(lambda: {0, 1} <= group._size._said.keys() and group._book.has_opened("start:1", 1))
        assert insider.running.statuses(2) == ["joined"]
        group._start_age = group._config.give_up  # as if so many seconds had passed
        assert [sorted(one.wait(60)) for one in pending] == [[0, 1], [0, 1]]
        assert insider.running.statuses(2)[-1] == "lost"
        assert mean_of(honest, "grad") == [0.5, 0.5]


def test_a_banned_member_stays_away_until_it_is_admitted(tmp_path: Path) -> None:
    with insider_among(tmp_path, 3, 2) as (insider, honest):
        insider.running.hub.ban(2)
        assert "dropped from the run" in insider.end()
        assert mean_of(honest, "grad") == [0.5, 0.5]
        with pytest.raises(ExchangeError, match="dropped from the run"):
            insider.running.connect(2)
        insider.running.hub.admit(2)
        assert insider.running.connect(2).is_newcomer


def test_a_ban_names_its_reason_however_far_the_streams_were_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are told that the group is complete before the last stream knows whose it is."""
    banned = threading.Event()
    open_bulk = Group.open_bulk

    def slowly(group: Group, frame: wire.Open, bulk: Outbox) -> Seat:
        seat = open_bulk(group, frame, bulk)
        banned.wait(60)
        return seat

    monkeypatch.setattr(Group, "open_bulk", slowly)
    with insider_among(tmp_path, 2, 1) as (insider, _):
        insider.running.hub.ban(1)
        banned.set()
        assert "dropped from the run" in insider.end()
        assert [e.message for e in insider.running.events if e.kind == "member"][-1] == "it was dropped from the run"


def test_who_comes_and_goes_without_end_is_kept_out_for_a_while(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        running.connect_all()
        running.members[1].close()
        for _ in range(hub.MOST_HELLOS - 1):
            running.connect(1).close()
        with pytest.raises(ExchangeError, match="reconnects too often"):
            running.connect(1)
        assert len(running.events) < 3 * hub.MOST_HELLOS
