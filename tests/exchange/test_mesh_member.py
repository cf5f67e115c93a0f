"""Members on the mesh over real connections: arithmetic, lateness, losses, newcomers, accounting."""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from coordinated_lab import RUN, Lab, cut, lab, means
from stream_reference import contribution, stream_means

from tests.waiting import PATIENCE, until
from training.exchange.base import ExchangeError, ExchangeTimeout, JoiningState, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name, roundtrip
from training.exchange.coordinator_protocol import Report
from training.exchange.group import coordinator_client
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.coordinator_state import Member
from training.exchange.group.group_membership import GroupMembership
from training.exchange.group.join_config import JoinConfig
from training.exchange.links.dialling import SMALL_SEGMENT
from training.exchange.mean import mesh_operations, owners
from training.exchange.mean.broadcast import broadcast, broadcasts
from training.exchange.mean.mesh_member import MeshMember
from training.exchange.mean.mesh_operations import MeshMean
from training.exchange.residuals import Residual

pytestmark = pytest.mark.slow

FP32 = codec_by_name("fp32")


@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "fp16", "int8", "mxfp4", "topk:0.1"])
def test_mean_is_the_seams_arithmetic_on_all_members(tmp_path: Path, codec_name: str) -> None:
    vectors = [torch.randn(CHUNK_ELEMENTS + 1000, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    codec = codec_by_name(codec_name)
    decoded = [(float(r + 1), roundtrip(codec, v)) for r, v in enumerate(vectors)]
    expected = roundtrip(codec.reply, weighted_mean(decoded))
    with lab(tmp_path, 3) as running:
        results = means(running.connect_all(), "a", vectors, codec_name)
    assert all(torch.equal(r.mean, expected) for r in results)
    assert {(r.weight, r.members, r.included) for r in results} == {(6.0, (0, 1, 2), True)}


def test_one_that_reads_that_it_was_left_out_and_taken_back_at_once_is_back(tmp_path: Path) -> None:
    """As after it was frozen: what was sent meanwhile arrives together."""
    returned = list[int]()
    with lab(tmp_path, 2) as running:
        a, b = running.connect_all(on_return=lambda: returned.append(1))
        with b._changed:
            for members in ((0,), (0, 1)):
                b._on_status(b._status.model_copy(update={"form": None, "members": members}))
        until(lambda: returned)
        assert [result.members for result in means([a, b], "x", [torch.ones(1)] * 2, "fp32")] == [(0, 1)] * 2
    assert returned == [1]


def test_weight_zero_takes_part_and_gets_the_result(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        a, b = running.connect_all()
        pending = a.start_mean("x", torch.tensor([4.0]), 2.0, FP32), b.start_mean("x", torch.tensor([9.0]), 0.0, FP32)
        results = [p.wait(60) for p in pending]
    assert [r.mean.tolist() for r in results] == [[4.0], [4.0]]
    assert results[1].weight == 2.0 and results[1].included


def test_contribution_is_copied_at_once(tmp_path: Path) -> None:
    for codec in ("fp32", "mxfp4"):
        with lab(tmp_path, 1) as running:
            values = torch.ones(3 * CHUNK_ELEMENTS)
            pending = running.connect_all()[0].start_mean("x", values, 1.0, codec_by_name(codec))
            values.zero_()
            assert bool((pending.wait(60).mean == 1.0).all())


@pytest.mark.parametrize("elements", [10, 200_000])
def test_a_caller_that_stops_waiting_may_change_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    """They are not copied while it waits, and others need them still."""
    values = torch.full((elements,), 4.0)
    with lab(tmp_path, 2) as running:
        one, other = running.connect_all()
        with monkeypatch.context() as patch:
            patch.setattr(mesh_operations, "STANDSTILL", 0.2)
            with pytest.raises(ExchangeTimeout):
                one.mean("x", values, 1.0, FP32)
        values.zero_()
        result = other.mean("x", torch.zeros(elements), 1.0, FP32)
    assert set(result.mean.tolist()) == {2.0} and result.members == (0, 1)


def test_a_mean_leaves_the_callers_values_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "AT_ONCE", 1000)
    with lab(tmp_path, 2) as running, ThreadPoolExecutor(2) as pool:
        vectors = [torch.full((200_000,), float(rank)) for rank in range(2)]
        results = list(pool.map(lambda m: m.mean("x", vectors[m.rank], 1.0, FP32), running.connect_all()))
    assert [vector[0].item() for vector in vectors] == [0.0, 1.0]
    assert all(set(result.mean.tolist()) == {0.5} for result in results)


def test_many_operations_overlap(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        members = running.connect_all()
        pending = [
            [m.start_mean(f"grad/{i}", torch.full((5000 * i,), float(m.rank)), 1.0, FP32) for i in range(40)]
            for m in members
        ]
        for one, other in zip(*pending):
            assert torch.equal(one.wait(60).mean, other.wait(60).mean)
            assert one.done()


@pytest.mark.parametrize("elements", [10, 200_000])
def test_a_caller_that_waits_at_once_carries_the_mean_out_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    threads = list[threading.Thread]()
    complete = MeshMean.complete
    monkeypatch.setattr(
        MeshMean, "complete", lambda mean: (threads.append(threading.current_thread()), complete(mean))[1]
    )
    with lab(tmp_path, 2) as running, ThreadPoolExecutor(2, "caller") as pool:
        members = running.connect_all()
        for member in members:  # its links' thread has been at the handover of results
            until(lambda member=member: not member.mesh._loop._turn.locked())  # type: ignore[misc]  # its default
        list(pool.map(lambda member: member.mean("x", torch.ones(elements), 1.0, FP32), members))
    assert [thread.name.partition("_")[0] for thread in threads] == ["caller", "caller"]


def test_a_result_is_kept_until_all_have_begun_the_next(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        members = running.connect_all()
        for _ in range(10):
            one_by_one(members, "x")
        assert all(len(member._log._results) <= 2 for member in members)


def test_operations_alone_are_reported_a_few_times_a_second(tmp_path: Path) -> None:
    with lab(tmp_path, 1) as running:
        (member,) = running.connect_all()
        client, count, begin = member._client, itertools.count(), time.monotonic()
        report = client._report
        client._report = lambda: (next(count), report())[1]
        while time.monotonic() < begin + 0.5:
            member.gather("x", b"")
        assert next(count) <= 4 + (time.monotonic() - begin) / coordinator_client._PROGRESS_PAUSE


def test_gather(tmp_path: Path) -> None:
    payloads = [b"", b"x" * 10, bytes(range(256)) * 8192]
    with lab(tmp_path, 3) as running:
        pending = [m.start_gather("g", p) for m, p in zip(running.connect_all(), payloads)]
        assert all(p.wait(60) == dict(enumerate(payloads)) for p in pending)


def test_wrong_use_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with lab(tmp_path, 1) as running:
        member = running.connect_all()[0]
        with pytest.raises(ValueError, match="flat fp32"):
            member.start_mean("x", torch.zeros(2, 2), 1.0, FP32)
        with pytest.raises(ValueError, match="4 MiB"):
            member.start_gather("x", bytes((4 << 20) + 1))


@pytest.mark.parametrize("codec_name", ["fp32", "fp16", "mxfp4"])
def test_what_is_not_finite_stays_with_its_member_and_all_are_told(tmp_path: Path, codec_name: str) -> None:
    bad = 1e5 if codec_name == "fp16" else float("nan")
    with lab(tmp_path, 2) as running:
        pending = [
            m.start_mean("x", torch.tensor([value, 4.0]), 1.0, codec_by_name(codec_name), flags)
            for m, value, flags in zip(running.connect_all(), (2.0, bad), (b"\x01", b"\x02"))
        ]
        fine, own = (p.wait(60) for p in pending)
    assert fine.mean.tolist() == own.mean.tolist() == [2.0, 4.0]
    assert (fine.weight, fine.refused, fine.flags) == (own.weight, own.refused, own.flags) == (1.0, (1,), b"\x01")
    assert fine.included and fine.is_finite and not own.is_finite and sum(b - a for a, b in own.left_out) == 2


@pytest.mark.parametrize("codec_name", ["int8", "mxfp4", "topk:0.05"])
def test_the_means_of_a_stream_owe_nothing_for_long_also_after_a_restart(tmp_path: Path, codec_name: str) -> None:
    """Each member keeps what encoding its own shard lost; together that is what one would keep."""
    elements, codec = CHUNK_ELEMENTS + 40, codec_by_name(codec_name)
    expected = stream_means(codec_name, elements, 2, 4)
    kept: list[Residual | None] = [None, None]
    for start in (0, 2):
        with lab(tmp_path, 2) as running:
            members = running.connect_all()
            for member, residual in zip(members, kept):
                if residual is not None:
                    member.restore_residual("s", residual)
            for number in (start, start + 1):
                pending = [
                    m.start_mean("s", contribution(m.rank, number, elements), 1.0, codec, stream="s") for m in members
                ]
                assert all(torch.equal(p.wait(60).mean, expected[number]) for p in pending)
            kept = [member.residual("s") for member in members]
            assert sum(len(one.values) for one in kept if one is not None) == elements, "each keeps its own shard only"


def test_what_others_own_after_a_restart_is_lost_once_and_no_more(tmp_path: Path) -> None:
    elements, codec = CHUNK_ELEMENTS, codec_by_name("mxfp4")

    def rounds(
        running: Lab, shards: dict[int, float], kept: list[Residual | None], numbers: range
    ) -> list[Residual | None]:
        members = running.connect_all(shards=shards)
        for member, one in zip(members, kept):
            if one is not None:
                member.restore_residual("s", one)
        for number in numbers:
            pending = [
                m.start_mean("s", contribution(m.rank, number, elements), 1.0, codec, stream="s") for m in members
            ]
            means[number], _ = (p.wait(60).mean for p in pending)
        return [member.residual("s") for member in members]

    means: dict[int, torch.Tensor] = {}
    with lab(tmp_path, 2) as running:
        kept = rounds(running, {0: 1.0, 1: 1.0}, [None, None], range(2))
    with lab(tmp_path, 2) as running:
        after = rounds(running, {0: 1.0, 1: 3.0}, kept, range(2, 3))
    same = stream_means("mxfp4", elements, 2, 3)[2]
    quarter = elements // 4
    assert torch.equal(means[2][:quarter], same[:quarter]) and torch.equal(means[2][2 * quarter :], same[2 * quarter :])
    assert [one and one.bounds is not None and one.bounds.tolist() for one in after] == [
        [[0, quarter]],
        [[quarter, elements]],
    ]


def test_bytes_of_any_length_are_broadcast(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (13 << 20,), dtype=torch.uint8).numpy().tobytes()
    with lab(tmp_path, 2) as running, ThreadPoolExecutor(2) as pool:
        members = running.connect_all()
        whole = list(pool.map(lambda m: broadcast(m, "b", data if m.rank == 1 else b"mine", 1), members))
        assert whole == [data, data]
        gone = pool.map(lambda m: broadcast(m, "c", b"", 5), members)
        with pytest.raises(ExchangeError, match="member 5 did not hand over"):
            list(gone)
        both = list(pool.map(lambda m: broadcasts(m, "d", data[m.rank :: 2 + m.rank], (0, 1, 5), len(data)), members))
        assert both == [{0: data[::2], 1: data[1::3]}] * 2


def test_a_wait_without_a_deadline_ends_when_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_operations, "STANDSTILL", 0.2)
    with lab(tmp_path, 2) as running, pytest.raises(ExchangeTimeout, match="x:1 was not done"):
        running.connect_all()[0].gather("x", b"")


def test_a_wait_goes_on_while_bytes_move() -> None:
    clock = itertools.count(step=mesh_operations.STANDSTILL / 4)
    meter, answers, moved = mesh_operations.Meter(lambda: next(clock)), iter([False] * 20 + [True]), itertools.count(1)

    def settled(seconds: float) -> bool:
        meter.update(0, next(moved))
        return next(answers)

    assert meter.wait(settled)


@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "int8", "mxfp4", "topk:0.03"])
def test_bytes_are_within_three_per_cent_of_theory(tmp_path: Path, codec_name: str) -> None:
    elements = 2_000_000
    codec = codec_by_name(codec_name)
    shard = codec.max_encoded_bytes(elements // 2)
    with lab(tmp_path, 2) as running:
        members = running.connect_all()
        vector = torch.randn(elements)
        means(members, "x", [vector, vector], codec_name)
        until(lambda: members[0].traffic.bytes_received)
        traffic = members[0].traffic.copy()
    # a piece of a sparse reply has up to all members' values
    most = shard + (2 if codec_name.startswith("topk") else 1) * shard
    assert 0.97 * 2 * shard <= traffic.bytes_sent <= 1.03 * most
    assert 0.97 * 2 * shard <= traffic.bytes_received <= 1.03 * most


# ------------------------------------------------------------------------------------------------- late, lost, and gone


def one_by_one(members: list[MeshMember], name: str) -> list[float]:
    return [r.mean.item() for r in means(members, name, [torch.tensor([float(m.rank)]) for m in members], "fp32", 1.0)]


def test_quorum_closes_at_the_deadline_and_the_late_one_gets_the_result(tmp_path: Path) -> None:
    with lab(tmp_path, 3, quorum=0.5, round_deadline=0.3) as running:
        members = running.connect_all()
        early = [m.start_mean("x", torch.tensor([float(m.rank)]), 1.0, FP32) for m in members[:2]]
        results = [p.wait(60) for p in early]
        late = members[2].start_mean("x", torch.tensor([9.0]), 1.0, FP32)
        assert not late.done() or late.wait(60).left_out
        next_ones = [m.start_mean("y", torch.tensor([float(m.rank)]), 1.0, FP32) for m in members]
        after = [p.wait(60) for p in next_ones]
        result = late.wait(60)
    assert {(r.mean.item(), r.weight, r.members) for r in (*results, result)} == {(0.5, 2.0, (0, 1))}
    assert [r.included for r in (*results, result)] == [True, True, False] and result.left_out == ((0, 1),)
    assert len({r.mean.item() for r in after}) == 1


def test_without_a_quorum_the_deadline_does_not_close(tmp_path: Path) -> None:
    with lab(tmp_path, 3, quorum=0.5, round_deadline=0.1) as running:
        members = running.connect_all()
        pending = members[0].start_mean("x", torch.tensor([1.0]), 1.0, FP32)
        with pytest.raises(ExchangeTimeout, match="x:1 was not done"):
            pending.wait(0.4)
        members[1].start_mean("x", torch.tensor([3.0]), 1.0, FP32)
        assert pending.wait(60).mean.tolist() == [2.0]


def test_who_goes_waits_until_the_others_have_its_last_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = threading.Event()
    with lab(tmp_path, 2) as running:
        one, other = running.connect_all()
        pending = other.start_mean("x", torch.ones(100_000), 1.0, FP32)
        complete = pending.complete
        monkeypatch.setattr(pending, "complete", lambda: complete() if there.wait(60) else None)
        one.mean("x", torch.ones(100_000), 1.0, FP32)
        going = threading.Thread(target=one.close)
        going.start()
        until(lambda: running.coordinator.group.members[0].report.leaving)
        there.set()
        assert pending.wait(60).members == (0, 1)
        going.join(60)


def test_who_does_not_come_is_given_up(tmp_path: Path) -> None:
    with lab(tmp_path, 2, give_up=0.3) as running:
        members = running.connect_all()
        assert members[0].start_mean("x", torch.tensor([1.0]), 1.0, FP32).wait(60).members == (0,)
        with pytest.raises(ExchangeError, match="did not reach exchange 1"):
            members[1].start_mean("x", torch.tensor([1.0]), 1.0, FP32).wait(60)


@pytest.mark.parametrize("clean", [True, False])
def test_survivors_close_as_soon_as_a_member_is_gone(tmp_path: Path, clean: bool) -> None:
    with lab(tmp_path, 3, lease=100.0) as running:  # so that no lease ends before the test does
        members = running.connect_all()
        pending = [m.start_mean("x", torch.tensor([float(m.rank)]), 1.0, FP32) for m in members[:2]]
        gathers = [m.start_gather("g", b"%d" % m.rank) for m in members[:2]]
        if clean:
            members[2].close()
        else:
            cut(members[2])
        results = [p.wait(60) for p in pending]
        assert [g.wait(60) for g in gathers] == [{0: b"0", 1: b"1"}] * 2
        until(lambda: running.statuses(2)[-1] == ("left" if clean else "lost"))
        assert {(r.mean.item(), r.members) for r in results} == {(0.5, (0, 1))}
        assert members[0].members == (0, 1)


def test_a_broken_line_to_the_coordinator_is_dialled_again(tmp_path: Path) -> None:
    with lab(tmp_path, 3) as running:
        members = running.connect_all()
        one_by_one(members, "before")
        running.hang_up(2)
        until(lambda: running.statuses(2)[-2:] == ["lost", "joined"])
        assert one_by_one(members, "after")[0] in (0.5, 1.0)
        until(lambda: len(set(one_by_one(members, "later"))) == 1 and members[0].members == (0, 1, 2))


@pytest.mark.parametrize("error", [RuntimeError("no report today"), asyncio.CancelledError()])
def test_who_listens_and_reports_no_more_holds_nobody_up(tmp_path: Path, error: BaseException) -> None:
    def report() -> Report:
        raise error

    with lab(tmp_path, 2, lease=1000.0) as running:
        first, second = running.connect_all()
        second._client._report = report
        assert first.start_mean("x", torch.ones(8), 1.0, FP32).wait(PATIENCE).members == (0,)
        until(lambda: not second._client._thread.is_alive())
        with pytest.raises(ExchangeError, match=f"the connection with the coordinator failed: {error}"):
            second.mean("x", torch.ones(8), 1.0, FP32)


def test_a_process_that_was_stopped_keeps_its_line_to_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab(tmp_path, 1) as running:
        (member,) = running.connect_all()
        loop: Any = member._client._loop
        select, stopped, heard = loop._selector.select, 0.0, 0

        def stops(timeout: float | None) -> list[Any]:
            """What came is there still, and the time that it was waited for is over."""
            nonlocal stopped, heard
            events: list[Any] = select(timeout)
            from_coordinator = any(key.fd != loop._ssock.fileno() for key, _ in events)
            heard += from_coordinator
            if not from_coordinator or stopped:
                return events
            stopped = 100.0
            return []

        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + stopped)
        monkeypatch.setattr(loop._selector, "select", stops)
        until(lambda: heard > 2)
        assert running.statuses(0) == ["joined"]


class Killed(GroupMembership):
    """Ends without a word."""

    def close(self, reason: str) -> None:
        pass


def test_a_stranger_at_the_port_of_a_coordinator_that_comes_back_ends_nothing(tmp_path: Path) -> None:
    with lab(tmp_path, 2, tls=True, decides=Killed) as running:
        members = running.connect_all()
        one_by_one(members, "before")
        running.coordinator.stop()
        with socket.create_server(("127.0.0.1", running.port)) as stranger:
            stranger.settimeout(PATIENCE)
            for _ in range(4):  # each member dials again after it has heard that
                with stranger.accept()[0] as dialled:
                    dialled.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        running.coordinator = Coordinator(running.config.model_copy(update={"port": running.port}))
        running.coordinator.start()
        assert one_by_one(members, "after") == [0.5, 0.5]


class Busy(GroupMembership):
    def on_report(self, member: Member, report: Report) -> None:
        if report.leaves:
            time.sleep(0.5)  # with the words of the others unread
        super().on_report(member, report)


@pytest.mark.parametrize("tls", [False, True])
def test_all_may_leave_a_busy_coordinator_at_once(tmp_path: Path, tls: bool) -> None:
    with lab(tmp_path, 3, tls=tls, decides=Busy) as running, ThreadPoolExecutor(3) as pool:
        members = running.connect_all()
        one_by_one(members, "x")
        list(pool.map(MeshMember.close, members))
        until(lambda: all(running.statuses(rank)[-1] in ("left", "lost") for rank in range(3)))
        assert [running.statuses(rank)[-1] for rank in range(3)] == ["left"] * 3


def test_incomplete_group_names_who_is_missing(tmp_path: Path) -> None:
    def told() -> str:
        with pytest.raises(ExchangeTimeout) as caught:
            running.connect(0, timeout=0.3)
        return str(caught.value)

    with lab(tmp_path, 3) as running:
        until(lambda: "rank 1 (machine-1), rank 2 (machine-2) did not connect" in told())


def test_no_coordinator() -> None:
    with pytest.raises(ExchangeError, match=r"cannot reach the machine that holds the run together \(127.0.0.1\)"):
        MeshMember(JoinConfig("127.0.0.1:9", None, RUN, 0, 1, "a")).join(0.5)


def test_who_cannot_reach_the_coordinator_says_so_and_dials_where_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "_UNREACHED_AFTER", 0.0)
    where, reported = ["127.0.0.1:9"], []

    def move(address: str, why: str, carrier: int | None) -> None:
        reported.append(address)
        where[0] = running.address

    with lab(tmp_path, 1) as running:
        running.connect(0, rendezvous=lambda: (where[0], ""), on_unreachable=move)
    assert reported == ["127.0.0.1:9"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the segments of a connection")
def test_the_coordinator_and_its_members_send_packets_that_pass_everywhere(tmp_path: Path) -> None:
    with lab(tmp_path, 1) as running:
        running.connect(0)
        (there,) = [writer.get_extra_info("socket") for writer in running.coordinator._connections]
        assert 0 < there.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= SMALL_SEGMENT


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs both kinds of addresses")
def test_a_coordinator_on_all_addresses_knows_members_by_their_own(tmp_path: Path) -> None:
    with lab(tmp_path, 1, tls=True, address="::") as running:
        running.connect(0, rendezvous=lambda: (f"127.0.0.1:{running.port}", ""))
        assert running.coordinator.group.members[0].seen == "127.0.0.1"


def test_an_attempt_ends_when_the_coordinator_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, lab(tmp_path, 1, tls=True) as running:
        dead = f"127.0.0.1:{silent.getsockname()[1]}"
        moves = iter([dead] * 4)
        running.connect(0, rendezvous=lambda: (next(moves, running.address), ""), lease=PATIENCE)


@pytest.mark.parametrize(
    ("rank", "size", "run", "message"),
    [(5, 2, RUN, "rank 5 of 2"), (0, 3, RUN, "rank 0 of 3 in a run of 2"), (0, 2, "other", "another run")],
)
def test_a_stranger_is_refused(tmp_path: Path, rank: int, size: int, run: str, message: str) -> None:
    with lab(tmp_path, 2) as running:
        with pytest.raises(ExchangeError, match=message):
            MeshMember(JoinConfig(running.address, None, run, rank, size, "x")).join(60)
        assert message in running.warnings()[0]


def test_a_coordinator_that_is_stopped_ends_what_is_pending(tmp_path: Path) -> None:
    running = Lab(tmp_path, 2)
    members = running.connect_all()
    pending = members[0].start_mean("x", torch.zeros(1), 1.0, FP32)
    running.coordinator.stop()
    with pytest.raises(ExchangeError, match="coordinator was stopped"):
        pending.wait(60)
    with pytest.raises(ExchangeError, match="coordinator was stopped"):
        members[0].start_mean("y", torch.zeros(1), 1.0, FP32)
    running.close()


# ------------------------------------------------------------------------------------------------------------ newcomers


def newcomer(running: Lab, rank: int) -> MeshMember:
    """Lose a member, and let its rank come back."""
    cut(running.members[rank])
    until(lambda: "lost" in running.statuses(rank))
    return running.connect(rank)


def fetching(pool: ThreadPoolExecutor, fresh: MeshMember, donor: MeshMember) -> Future[JoiningState]:
    joining = pool.submit(fresh.fetch_state, 60)
    until(lambda: donor.must_publish_state)
    return joining


def test_nobody_waits_for_a_newcomer_that_is_not_ready(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        donor = running.connect_all()[0]
        fresh = newcomer(running, 1)
        assert donor.start_mean("x", torch.tensor([1.0]), 1.0, FP32).wait(60).members == (0,)
        assert fresh.is_newcomer and not donor.must_publish_state


def test_a_newcomer_that_is_not_ready_hears_that_nobody_is_left(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        donor = running.connect_all()[0]
        fresh = newcomer(running, 1)
        donor.close()
        with pytest.raises(ExchangeError, match="no machine has the training state"):
            fresh.fetch_state(60)


def test_spare_ranks_are_for_later(tmp_path: Path) -> None:
    with lab(tmp_path, 1, spare=1) as running:
        with pytest.raises(ExchangeError, match="has not begun"):
            running.connect(1)
        running.connect_all()
        assert running.connect(1).is_newcomer
        with pytest.raises(ExchangeError, match="rank 2 of 1"):
            running.connect(2)


def test_newcomer_gets_the_anchor_and_is_a_member_from_then_on(tmp_path: Path) -> None:
    weights = torch.randn(700_000)
    with lab(tmp_path, 3) as running, ThreadPoolExecutor(1) as pool:
        members = running.connect_all()
        one_by_one(members, "0")
        fresh = newcomer(running, 2)
        assert fresh.is_newcomer and not members[1].must_publish_state
        one_by_one(members[:2], "1")
        coming = fetching(pool, fresh, members[0])
        members[0].publish_state(JoiningState({"w": weights, "n": torch.tensor(3)}, {"step": 7, "list": [1, "a"]}))
        assert not members[0].must_publish_state
        joining = coming.result(60)
        results = means([*members[:2], fresh], "2", [torch.ones(4)] * 3, "fp32")
        assert fresh.members == (0, 1, 2)
    assert torch.equal(joining.tensors["w"], weights) and joining.tensors["n"].item() == 3
    assert joining.state == {"step": 7, "list": [1, "a"]} and not fresh.is_newcomer
    assert all(r.members == (0, 1, 2) and r.included for r in results)


def test_newcomer_is_waited_for_from_the_donors_next_contribution_on(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running, ThreadPoolExecutor(1) as pool:
        donor = running.connect_all()[0]
        fresh = newcomer(running, 1)
        coming = fetching(pool, fresh, donor)
        donor.publish_state(JoiningState({}, {}))
        pending = donor.start_mean("x", torch.tensor([1.0]), 1.0, FP32)
        coming.result(60)
        assert not pending.done()
        fresh.start_mean("x", torch.tensor([3.0]), 1.0, FP32)
        assert pending.wait(60).mean.tolist() == [2.0]


@pytest.mark.parametrize("published", [False, True])
def test_the_next_member_is_asked_when_the_donor_dies(tmp_path: Path, published: bool) -> None:
    with lab(tmp_path, 3) as running, ThreadPoolExecutor(1) as pool:
        members = running.connect_all()
        fresh = newcomer(running, 2)
        coming = fetching(pool, fresh, members[0])
        if published:
            members[0].publish_state(JoiningState({"w": torch.zeros(20_000_000)}, {}))
        cut(members[0])

        def handed_over() -> bool:
            if members[1].must_publish_state:  # again, where the newcomer saw its donor go before the coordinator did
                members[1].publish_state(JoiningState({"w": torch.ones(3)}, {}))
            return coming.done()

        until(handed_over)
        assert coming.result().tensors["w"].tolist() == [1.0] * 3
        assert one_by_one([members[1], fresh], "x") == [1.5, 1.5] and fresh.members == (1, 2)


def test_a_newcomer_that_dies_while_it_fetches_holds_nobody(tmp_path: Path) -> None:
    with lab(tmp_path, 3) as running, ThreadPoolExecutor(1) as pool:
        members = running.connect_all()
        fresh = newcomer(running, 2)
        coming = fetching(pool, fresh, members[0])
        members[0].publish_state(JoiningState({"w": torch.zeros(20_000_000)}, {}))
        pending = [m.start_gather("g", b"") for m in members[:2]]
        cut(fresh)
        assert [p.wait(60).keys() for p in pending] == [{0, 1}, {0, 1}]
        with pytest.raises(ExchangeError):
            coming.result(60)


def test_two_newcomers_come_at_once_while_a_member_is_lost(tmp_path: Path) -> None:
    with lab(tmp_path, 4) as running, ThreadPoolExecutor(2) as pool:
        members = running.connect_all()
        one_by_one(members, "x")
        fresh = [newcomer(running, 2), newcomer(running, 3)]
        coming = [pool.submit(one.fetch_state, 60) for one in fresh]
        until(lambda: members[0].must_publish_state)
        cut(members[1])
        while not all(one.done() for one in coming):
            if members[0].must_publish_state:
                members[0].publish_state(JoiningState({"w": torch.ones(3)}, {}))
            time.sleep(0.01)
        assert [one.result().tensors["w"].tolist() for one in coming] == [[1.0] * 3] * 2
        assert one_by_one([members[0], *fresh], "y") == [pytest.approx(5 / 3)] * 3


def test_nobody_left_to_join(tmp_path: Path) -> None:
    with lab(tmp_path, 1) as running:
        running.connect_all()[0].close()
        until(lambda: "left" in running.statuses(0))
        with pytest.raises(ExchangeError, match="resume"):
            running.connect(0)


def test_a_rank_that_comes_back_early_takes_its_place(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        first = running.connect_all()
        again = running.connect(1)
        assert again.is_newcomer
        with pytest.raises(ExchangeError, match="came back on a new connection"):
            first[1].start_mean("x", torch.zeros(1), 1.0, FP32).wait(60)


def test_a_banned_member_stays_away_until_it_is_admitted(tmp_path: Path) -> None:
    with lab(tmp_path, 3) as running:
        members = running.connect_all()
        running.coordinator.ban(2)
        with pytest.raises(ExchangeError, match="dropped from the run"):
            members[2].start_gather("x", b"").wait(60)
        assert one_by_one(members[:2], "x") == [0.5, 0.5]
        with pytest.raises(ExchangeError, match="dropped from the run"):
            running.connect(2)
        running.coordinator.admit(2)
        assert running.connect(2).is_newcomer
