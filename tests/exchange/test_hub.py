"""The hub engine over real connections: arithmetic, lateness, losses, newcomers, accounting."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hub_lab import RUN, Lab, cut, lab
from stream_reference import contribution, stream_means

from profiles.errors import BadInput
from tests.waiting import PATIENCE, until
from training.events import MemberEvent, WarningEvent
from training.exchange import operations, wire
from training.exchange.base import Anchor, ExchangeError, ExchangeTimeout, MeanResult, weighted_mean
from training.exchange.codecs import CHUNK_ELEMENTS, codec_by_name, roundtrip
from training.exchange.group import Group
from training.exchange.hub import Hub
from training.exchange.hub_pb2 import Hello
from training.exchange.member import HubMember
from training.exchange.seat import HubConfig, Outbox, Seat

FP32 = codec_by_name("fp32")


def means(members: list[HubMember], name: str, vectors: list[torch.Tensor], codec_name: str) -> list[MeanResult]:
    codec = codec_by_name(codec_name)
    pending = [m.start_mean(name, v, float(m.rank + 1), codec) for m, v in zip(members, vectors)]
    return [p.wait(60) for p in pending]


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


@pytest.mark.parametrize("elements", [0, 1, 33, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1])
def test_any_length(tmp_path: Path, elements: int) -> None:
    with lab(tmp_path, 2) as running:
        members = running.connect_all()
        results = means(members, "a", [torch.full((elements,), 3.0 * r) for r in range(2)], "fp32")
    assert torch.equal(results[0].mean, torch.full((elements,), 2.0))


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
        with pytest.raises(ValueError, match="name"):
            member.start_mean("a b", torch.zeros(2), 1.0, FP32)
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
    assert fine.included and fine.fit and not own.fit and own.left_out == ((0, 2),)


@pytest.mark.parametrize("codec_name", ["fp32", "topk:0.01"])
def test_flags_travel_beside_the_values_exactly(tmp_path: Path, codec_name: str) -> None:
    with lab(tmp_path, 2) as running:
        pending = [
            m.start_mean("x", torch.randn(300_000), 1.0, codec_by_name(codec_name), flags)
            for m, flags in zip(running.connect_all(), (b"\x01\x80", b"\x10\x00"))
        ]
        assert [p.wait(60).flags for p in pending] == [b"\x11\x80"] * 2


@pytest.mark.parametrize("codec_name", ["int8", "mxfp4", "topk:0.05"])
def test_the_means_of_a_stream_owe_nothing_for_long_also_after_a_restart(tmp_path: Path, codec_name: str) -> None:
    elements, codec = CHUNK_ELEMENTS + 40, codec_by_name(codec_name)
    expected, kept = stream_means(codec_name, elements, 2, 4), None
    for start in (0, 2):
        with lab(tmp_path, 2) as running:
            members = running.connect_all()
            if kept is not None:
                members[0].restore_residual("s", kept)
                assert torch.equal(members[0].residual("s", elements), kept)
            for number in (start, start + 1):
                pending = [
                    m.start_mean("s", contribution(m.rank, number, elements), 1.0, codec, stream="s") for m in members
                ]
                assert all(torch.equal(p.wait(60).mean, expected[number]) for p in pending)
            assert members[1].residual("s", elements) is None
            kept = members[0].residual("s", elements)


def test_one_name_may_be_said_again(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        members = running.connect_all()
        for again in (b"a", b"b"):
            pending = [m.start_gather("eval/validation/20", again) for m in members]
            assert [p.wait(60) for p in pending] == [{0: again, 1: again}] * 2


def test_bytes_of_any_length_are_broadcast(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (13 << 20,), dtype=torch.uint8).numpy().tobytes()
    with lab(tmp_path, 2) as running, ThreadPoolExecutor(2) as pool:
        members = running.connect_all()
        whole = list(pool.map(lambda m: m.broadcast("b", data if m.rank == 1 else b"mine", 1), members))
        assert whole == [data, data]
        gone = pool.map(lambda m: m.broadcast("c", b"", 5), members)
        with pytest.raises(ExchangeError, match="member 5 did not hand over"):
            list(gone)


def test_a_wait_without_a_deadline_ends_when_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "STANDSTILL", 0.2)
    monkeypatch.setattr(operations, "_SLICE", 0.05)
    with lab(tmp_path, 2) as running, pytest.raises(ExchangeTimeout, match="x:1 was not done"):
        running.connect_all()[0].gather("x", b"")


def test_a_wait_goes_on_while_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "STANDSTILL", 0.2)
    meter, answers = operations.Meter(), iter([False] * 3 + [True])

    def settled(seconds: float) -> bool:
        time.sleep(0.1)
        meter.received(1)
        return next(answers)

    assert meter.wait(settled)


def test_quorum_closes_at_the_deadline_and_the_late_one_gets_the_result(tmp_path: Path) -> None:
    with lab(tmp_path, 3, quorum=0.5, round_deadline=0.3) as running:
        members = running.connect_all()
        early = [m.start_mean("x", torch.tensor([float(m.rank)]), 1.0, FP32) for m in members[:2]]
        results = [p.wait(60) for p in early]
        late = members[2].start_mean("x", torch.tensor([9.0]), 1.0, FP32).wait(60)
    assert [r.included for r in (*results, late)] == [True, True, False]
    assert {(r.mean.item(), r.weight, r.members) for r in (*results, late)} == {(0.5, 2.0, (0, 1, 2))}


def test_without_a_quorum_the_deadline_does_not_close(tmp_path: Path) -> None:
    with lab(tmp_path, 3, quorum=0.5, round_deadline=0.1) as running:
        members = running.connect_all()
        pending = members[0].start_mean("x", torch.tensor([1.0]), 1.0, FP32)
        with pytest.raises(ExchangeTimeout, match="x:1 was not done"):
            pending.wait(0.4)
        members[1].start_mean("x", torch.tensor([3.0]), 1.0, FP32)
        assert pending.wait(60).mean.tolist() == [2.0]


def test_a_round_that_cannot_close_fails_for_all_and_names_who_is_missing(tmp_path: Path) -> None:
    with lab(tmp_path, 2, give_up=0.3) as running:
        members = running.connect_all()
        with pytest.raises(ExchangeError, match=r"x:1 failed.*nothing came from rank 1"):
            members[0].start_mean("x", torch.tensor([1.0]), 1.0, FP32).wait(60)
        assert "x:1 failed" in running.warnings()[0]


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


def test_a_silent_member_is_lost_within_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lab(tmp_path, 2, lease=PATIENCE) as running:
        members = running.connect_all()
        group = running.hub._group
        heard = group.heard
        monkeypatch.setattr(group, "heard", lambda seat: None if seat.rank == 1 else heard(seat))
        group._seats[1].silent = PATIENCE  # as if so many seconds had passed
        result = members[0].start_mean("x", torch.tensor([1.0]), 1.0, FP32).wait(60)
        assert result.members == (0,)
        with pytest.raises(ExchangeError, match=r"silent for 60 s"):
            members[1].start_mean("x", torch.tensor([1.0]), 1.0, FP32).wait(60)


def test_a_member_on_the_hubs_machine_is_lost_with_its_connection_not_by_silence() -> None:
    """Where others take the processors, a heartbeat may be late; the end of a process closes its connection at once."""
    events: list[MemberEvent | WarningEvent] = []
    group = Group(HubConfig(run_id=RUN, names=("a", "b"), elements=8, local=frozenset({0})), events.append)
    seats = [
        group.hello(
            Hello(version=wire.PROTOCOL_VERSION, run_id=RUN, rank=rank, world_size=2, name="ab"[rank]), Outbox(1 << 16)
        )
        for rank in (0, 1)
    ]
    for seat in seats:
        group.open_bulk(wire.Open(seat.rank, seat.session), Outbox(1 << 16))
    group.tick(100.0, 90.0)
    lost = [event.member for event in events if isinstance(event, MemberEvent) and event.status == "lost"]
    assert lost == [1]
    group.lose(seats[0], "its stream broke")
    assert isinstance(events[-1], MemberEvent) and (events[-1].member, events[-1].status) == (0, "lost")


def test_a_member_on_the_hubs_machine_waits_for_a_hub_that_gets_no_processor_time(tmp_path: Path) -> None:
    for local in (True, False):
        member = HubMember("127.0.0.1:1", None, RUN, 0, 1, "a", local)
        for _ in range(100):
            member._beat()
        assert bool(member._ended) is not local
        member.close()


def test_incomplete_group_names_who_is_missing(tmp_path: Path) -> None:
    with lab(tmp_path, 3) as running, pytest.raises(ExchangeTimeout, match=r"rank 1 \(machine-1\), rank 2 \(mach"):
        running.connect(0, timeout=1.5)


def test_no_hub(tmp_path: Path) -> None:
    with pytest.raises(ExchangeTimeout, match=r"the hub at 127.0.0.1:9"):
        HubMember.connect("127.0.0.1:9", None, RUN, 0, 1, "a", timeout=0.5)


@pytest.mark.parametrize(
    ("rank", "size", "run", "message"),
    [(5, 2, RUN, "rank 5 of 2"), (0, 3, RUN, "rank 0 of 3 in a run of 2"), (0, 2, "other", "another run")],
)
def test_a_stranger_is_refused(tmp_path: Path, rank: int, size: int, run: str, message: str) -> None:
    with lab(tmp_path, 2) as running:
        with pytest.raises(ExchangeError, match=message):
            HubMember.connect(running.address, None, run, rank, size, "x", timeout=60)
        assert message in running.warnings()[0]


def test_losing_the_hub_fails_what_is_pending(tmp_path: Path) -> None:
    running = Lab(tmp_path, 2)
    members = running.connect_all()
    pending = members[0].start_mean("x", torch.zeros(1), 1.0, FP32)
    running.hub.stop()
    with pytest.raises(ExchangeError, match="hub"):
        pending.wait(60)
    with pytest.raises(ExchangeError, match="hub"):
        members[0].start_mean("y", torch.zeros(1), 1.0, FP32)
    running.close()


def newcomer(running: Lab, rank: int) -> HubMember:
    """Lose a member, and let its rank come back."""
    cut(running.members[rank])
    until(lambda: "lost" in running.statuses(rank))
    fresh = running.connect(rank)
    fresh.ask_for_anchor()
    return fresh


def test_nobody_waits_for_a_newcomer_that_is_not_ready(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        donor, gone = running.connect_all()
        cut(gone)
        until(lambda: "lost" in running.statuses(1))
        fresh = running.connect(1)
        assert donor.start_mean("x", torch.tensor([1.0]), 1.0, FP32).wait(60).members == (0,)
        assert fresh.is_newcomer and not donor.anchor_wanted
        fresh.ask_for_anchor()
        until(lambda: donor.anchor_wanted)


def test_a_newcomer_that_is_not_ready_hears_that_nobody_is_left(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        donor, gone = running.connect_all()
        cut(gone)
        until(lambda: "lost" in running.statuses(1))
        fresh = running.connect(1)
        donor.close()
        with pytest.raises(ExchangeError, match="no member is left"):
            fresh.fetch_anchor(20)


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
    with lab(tmp_path, 3) as running:
        members = running.connect_all()
        means(members, "0", [torch.zeros(4)] * 3, "fp32")
        fresh = newcomer(running, 2)
        assert fresh.is_newcomer and not members[1].anchor_wanted
        means(members[:2], "1", [torch.zeros(4)] * 2, "fp32")
        until(lambda: members[0].anchor_wanted)
        members[0].publish_anchor(Anchor({"w": weights, "n": torch.tensor(3)}, {"step": 7, "list": [1, "a"]}))
        assert not members[0].anchor_wanted
        anchor = fresh.fetch_anchor(20)
        results = means([*members[:2], fresh], "2", [torch.ones(4)] * 3, "fp32")
    assert torch.equal(anchor.tensors["w"], weights) and anchor.tensors["n"].item() == 3
    assert anchor.state == {"step": 7, "list": [1, "a"]}
    assert not fresh.is_newcomer and fresh.members == (0, 1, 2)
    assert all(r.members == (0, 1, 2) and r.included for r in results)


def test_newcomer_is_waited_for_from_the_donors_next_contribution_on(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        donor, _ = running.connect_all()
        fresh = newcomer(running, 1)
        until(lambda: donor.anchor_wanted)
        donor.publish_anchor(Anchor({}, {}))
        pending = donor.start_mean("x", torch.tensor([1.0]), 1.0, FP32)
        fresh.fetch_anchor(20)
        assert not pending.done()
        fresh.start_mean("x", torch.tensor([3.0]), 1.0, FP32)
        assert pending.wait(60).mean.tolist() == [2.0]


def test_the_next_member_is_asked_when_the_donor_dies(tmp_path: Path) -> None:
    with lab(tmp_path, 3) as running:
        members = running.connect_all()
        fresh = newcomer(running, 2)
        until(lambda: members[0].anchor_wanted)
        cut(members[0])
        until(lambda: members[1].anchor_wanted)
        members[1].publish_anchor(Anchor({"w": torch.ones(3)}, {}))
        assert fresh.fetch_anchor(20).tensors["w"].tolist() == [1.0] * 3
        assert fresh.members == (1, 2)


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


@pytest.mark.parametrize("codec_name", ["fp32", "bf16", "int8", "mxfp4", "topk:0.03"])
def test_bytes_are_within_three_per_cent_of_theory(tmp_path: Path, codec_name: str) -> None:
    elements = 3_000_000
    codec = codec_by_name(codec_name)
    bounds = [min(CHUNK_ELEMENTS, elements - start) for start in range(0, elements, CHUNK_ELEMENTS)]
    up = sum(codec.max_encoded_bytes(n) for n in bounds)
    with lab(tmp_path, 2) as running:
        members = running.connect_all()
        vector = torch.randn(elements)
        means(members, "x", [vector, vector], codec_name)
        sent, received = members[0].traffic.bytes_sent, members[0].traffic.bytes_received
    assert up <= sent <= 1.03 * up
    assert 0.97 * up <= received <= 1.03 * up


def test_time_is_accounted(tmp_path: Path) -> None:
    with lab(tmp_path, 2) as running:
        a, b = running.connect_all()
        pending = a.start_mean("x", torch.zeros(1), 1.0, FP32)
        timer = threading.Timer(0.3, lambda: b.start_mean("x", torch.zeros(1), 1.0, FP32))
        before, began = a.traffic.copy(), time.perf_counter()
        timer.start()
        pending.wait(60)
        spent, elapsed = a.traffic.since(before), time.perf_counter() - began
        pending.wait(60)
        assert a.traffic.wait_seconds - before.wait_seconds == spent.wait_seconds
        timer.join()
    assert 0 < spent.wait_seconds <= elapsed
    assert a.traffic.transfer_seconds >= 0.29  # from the first one's start to the second one's


def test_close_is_idempotent_and_says_so(tmp_path: Path) -> None:
    with lab(tmp_path, 1) as running:
        member = running.connect_all()[0]
        member.close()
        member.close()
        with pytest.raises(ExchangeError, match="left the group"):
            member.mean("x", torch.zeros(1), 1.0, FP32)


def test_two_tcp_connections_a_member(tmp_path: Path) -> None:
    import psutil

    with lab(tmp_path, 1) as running:
        running.connect_all()
        port = int(running.address.rpartition(":")[2])
        connections = psutil.Process().net_connections("tcp")
        assert sum(bool(c.raddr) and c.raddr.port == port and c.status == "ESTABLISHED" for c in connections) == 2


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6(tmp_path: Path) -> None:
    with lab(tmp_path, 1, tls=True, address="::1") as running:
        assert running.connect_all()[0].mean("x", torch.ones(1), 1.0, FP32).mean.tolist() == [1.0]


def test_a_taken_port_is_bad_input(tmp_path: Path) -> None:
    with lab(tmp_path, 1) as running:
        port = int(running.address.rpartition(":")[2])
        with pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{port}"):
            Hub(HubConfig(run_id=RUN, names=("a",), elements=1, port=port)).start()


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.5"])
def test_traffic_in_clear_stays_on_this_machine(address: str) -> None:
    with pytest.raises(BadInput, match="loopback"):
        Hub(HubConfig(run_id=RUN, names=("a",), elements=1, address=address)).start()
    with pytest.raises(BadInput, match="loopback"):
        HubMember.connect(f"{address}:1", None, RUN, 0, 1, "a", timeout=1)


def test_a_group_that_falls_silent_all_at_once_with_a_newcomer_is_lost_whole() -> None:
    """As when the hub's own cable is pulled: the last member's end takes the newcomer along, whose turn is next."""
    events: list[MemberEvent | WarningEvent] = []
    group = Group(HubConfig(run_id=RUN, names=("a", "b"), elements=8), events.append)

    def sit(rank: int) -> Seat:
        seat = group.hello(
            Hello(version=wire.PROTOCOL_VERSION, run_id=RUN, rank=rank, world_size=2, name="ab"[rank]), Outbox(1 << 16)
        )
        return group.open_bulk(wire.Open(rank, seat.session), Outbox(1 << 16))

    sit(0), sit(1)
    sit(1)
    group.tick(10.0, 6.0)
    lost = [event.member for event in events if isinstance(event, MemberEvent) and event.status == "lost"]
    assert lost == [1, 0, 1]
    group.tick(20.0, 6.0)
    assert len(events) == 6
