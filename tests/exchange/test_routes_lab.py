"""Pairs in networks of their own: dialled one way only, not at all, or over the second of two cables."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from test_listener import exchanged
from test_mesh import at_once, told
from test_relay import Loop
from waiting import PATIENCE, until

from tests.lab.network import need_root_and_tools
from training.exchange.base import ExchangeTimeout
from training.exchange.codecs import codec_by_name
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.coordinator_state import CoordinatorConfig
from training.exchange.group.join_config import JoinConfig
from training.exchange.links import dialling
from training.exchange.links.certificates import relay_key
from training.exchange.links.connection import Connection
from training.exchange.links.dialling import Address, DialHistory
from training.exchange.links.link import PeerLost
from training.exchange.links.listener import ConnectTimeouts, Identity, Listener
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.mesh_member import MeshMember
from training.records.events import PeerPath, WaysEvent

pytestmark = pytest.mark.lab
T = TypeVar("T")
_CLONE_NEWNET = 0x40000000


class Nets:
    """Network namespaces, and cables between them."""

    def __init__(self, *names: str) -> None:
        self._own = {name: f"mu{os.getpid()}{name}" for name in names}
        for name in names:
            self._ip("netns", "add", self._own[name])
            self.ip(name, "link", "set", "lo", "up")

    def ip(self, name: str, *words: str) -> str:
        return self._ip("-n", self._own[name], *words)

    def cable(self, a: str, b: str, device: str, net: str) -> None:
        """Lay a cable called ``device`` at both ends, with the addresses ``net``.1 and ``net``.2."""
        self.ip(a, "link", "add", device, "type", "veth", "peer", "name", device, "netns", self._own[b])
        for end, number in ((a, 1), (b, 2)):
            self.ip(end, "addr", "add", f"{net}.{number}/24", "dev", device)
            self.ip(end, "link", "set", device, "up")
        for end in (a, b):  # the kernel lets packets pass only after it has noticed the other end
            until(functools.partial(self._is_up, end, device))

    def _is_up(self, name: str, device: str) -> bool:
        return self.ip(name, "-br", "link", "show", "dev", device).split()[1] == "UP"

    def forwards(self, name: str, yes: bool) -> None:
        self._ip("netns", "exec", self._own[name], "sh", "-c", f"echo {int(yes)} > /proc/sys/net/ipv4/ip_forward")

    def inside(self, name: str, work: Callable[[], T]) -> T:
        """Carry out ``work``, and what it starts, in a namespace."""

        def enter_and_work() -> T:
            with open(f"/run/netns/{self._own[name]}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            return work()

        return at_once(enter_and_work)[0]

    def close(self) -> None:
        for name in self._own.values():
            self._ip("netns", "del", name)

    @staticmethod
    def _ip(*words: str) -> str:
        return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Pair:
    """Member 0 in namespace ``a``, member 1 in ``b``."""

    def __init__(self, nets: Nets, certificates: Path) -> None:
        self._nets = nets
        self._channels = 0
        self.later = 0.0
        """Seconds by which what is known of ways is older than it is."""
        self.listeners = {
            rank: nets.inside(
                place, lambda rank=rank: Listener("0.0.0.0", Identity("run", rank, certificates / f"member-{rank}"))
            )
            for rank, place in enumerate("ab")
        }
        for one in self.listeners.values():
            one.dial_history = DialHistory(lambda: time.monotonic() + self.later)

    def form(self, a: list[str], b: list[str], relays: dict[str, Address] | None = None) -> list[Mesh]:
        """Form a group; ``a`` and ``b`` are the addresses that the two are told of one another."""
        self._channels += 1
        places = {
            rank: [(host, self.listeners[rank].address[1]) for host in hosts] for rank, hosts in enumerate((a, b))
        }

        def one(rank: int, place: str) -> Mesh:
            relay = (relays or {}).get(place)
            channel = f"c{self._channels}"
            return self._nets.inside(
                place, lambda: Mesh.form(self.listeners[rank], channel, places, seconds=PATIENCE, relay=relay)
            )

        return at_once(functools.partial(one, 0, "a"), functools.partial(one, 1, "b"))

    def close(self) -> None:
        for one in self.listeners.values():
            one.close()


@pytest.fixture
def nets() -> Iterator[Nets]:
    need_root_and_tools()
    made = Nets("a", "b", "r")
    yield made
    made.close()


@pytest.fixture
def pair(nets: Nets, certificates: Path) -> Iterator[Pair]:
    made = Pair(nets, certificates)
    yield made
    made.close()


def close(meshes: list[Mesh]) -> None:
    for mesh in meshes:
        mesh.close()


@pytest.fixture
def router(nets: Nets) -> Nets:
    """Each member has a network of its own, with the router between."""
    nets.cable("r", "a", "toa", "10.77.1")
    nets.cable("r", "b", "tob", "10.77.2")
    nets.ip("a", "route", "add", "default", "via", "10.77.1.1")
    nets.ip("b", "route", "add", "default", "via", "10.77.2.1")
    return nets


def test_neither_can_be_dialled_and_the_router_says_nothing(pair: Pair, router: Nets, certificates: Path) -> None:
    router.forwards("r", False)
    serving = router.inside("r", lambda: Loop(relay_key(certificates / "coordinator"), "0.0.0.0"))
    relays = {place: (f"10.77.{number}.1", serving.address[1]) for number, place in enumerate("ab", 1)}
    for _ in range(2):  # the second time they know
        meshes = pair.form(["10.77.1.2"], ["10.77.2.2"], relays)
        exchanged(meshes, 3_000_000)
        assert [told(mesh) for mesh in meshes] == [{1: "relayed"}, {0: "relayed"}]
        close(meshes)
    router.forwards("r", True)  # a way comes up: it is found once what is known is old
    pair.later += 600.0
    meshes = pair.form(["10.77.1.2"], ["10.77.2.2"], relays)
    exchanged(meshes, 10)
    assert [told(mesh) for mesh in meshes] == [{1: "direct 10.77.2.2"}, {0: "direct 10.77.1.2"}]
    close(meshes)
    serving.close()


@pytest.mark.parametrize("answer", ["blackhole", "prohibit", "unreachable"])
def test_only_one_of_them_can_be_dialled(pair: Pair, router: Nets, answer: str) -> None:
    router.forwards("r", True)
    router.ip("r", "route", "add", answer, "10.88.0.0/16")
    for _ in range(2):
        meshes = pair.form(["10.88.0.1"], ["10.77.2.2"])
        exchanged(meshes, 3_000_000)
        assert [told(mesh) for mesh in meshes] == [{1: "direct 10.77.2.2"}, {0: "direct 10.77.1.2"}]
        close(meshes)


def swallow_large_packets(router: Nets, *places: str) -> None:
    """Have the router take packets of 1300 bytes at most, without a word, as a VPN does whose ICMP is filtered."""
    router.forwards("r", True)
    for place in places:
        router.ip(place, "link", "set", f"to{place}", "gso_max_segs", "1")
        router.ip("r", "link", "set", f"to{place}", "mtu", "1300")


@pytest.mark.parametrize("places", ["a", "ab"])
def test_where_large_packets_are_lost_small_ones_are_sent(pair: Pair, router: Nets, places: str) -> None:
    swallow_large_packets(router, *places)
    for _ in range(2):  # the second time they know
        meshes = pair.form(["10.77.1.2"], ["10.77.2.2"])
        exchanged(meshes, 3_000_000)
        assert [told(mesh) for mesh in meshes] == [{1: "direct 10.77.2.2"}, {0: "direct 10.77.1.2"}]
        assert [way.loses_large for mesh in meshes for way in mesh.routes.values()] == [True, "b" in places]
        close(meshes)


def test_where_not_even_those_pass_they_meet_at_the_relay(pair: Pair, router: Nets, certificates: Path) -> None:
    router.cable("a", "b", "fast", "10.1.0")
    router.ip("a", "link", "set", "fast", "gso_max_segs", "1")
    router.ip("b", "link", "set", "fast", "mtu", "900")
    router.ip("b", "route", "replace", "10.1.0.0/24", "dev", "fast", "src", "10.1.0.2", "advmss", "1460")
    serving = router.inside("r", lambda: Loop(relay_key(certificates / "coordinator"), "0.0.0.0"))
    relays = {place: (f"10.77.{number}.1", serving.address[1]) for number, place in enumerate("ab", 1)}
    meshes = pair.form(["10.1.0.1"], ["10.1.0.2"], relays)
    exchanged(meshes, 3_000_000)
    assert [told(mesh) for mesh in meshes] == [{1: "relayed"}, {0: "relayed"}]
    close(meshes)
    serving.close()


def test_without_a_relay_it_is_said_which_way_failed_and_why(pair: Pair, router: Nets) -> None:
    router.forwards("r", True)
    router.ip("r", "route", "add", "prohibit", "10.88.0.0/16")
    with pytest.raises(ExchangeTimeout, match=r"rank 0: 10\.88\.0\.1:\d+: "):
        router.inside("b", lambda: Mesh.form(pair.listeners[1], "c", {0: [("10.88.0.1", 9)], 1: []}, seconds=2.0))


def test_a_pair_goes_over_to_its_other_cable_and_comes_back(pair: Pair, nets: Nets) -> None:
    nets.cable("a", "b", "fast", "10.1.0")
    nets.cable("a", "b", "slow", "10.2.0")
    hosts = ["10.1.0.1", "10.2.0.1"], ["10.1.0.2", "10.2.0.2"]
    meshes = pair.form(*hosts)
    assert [told(mesh) for mesh in meshes] == [{1: "direct 10.1.0.2"}, {0: "direct 10.1.0.1"}]
    nets.ip("b", "addr", "del", "10.1.0.2/24", "dev", "fast")  # nothing that is sent there is answered
    waiting = meshes[0].receive(1, 1, memoryview(bytearray(1)))
    for mesh in meshes:
        mesh.break_off(PeerLost(1 - mesh.rank, "the other", "its lease is over"))
    with pytest.raises(PeerLost):
        waiting.wait(PATIENCE)
    meshes = pair.form(*hosts)
    exchanged(meshes, 3_000_000)
    assert [told(mesh) for mesh in meshes] == [{1: "direct 10.2.0.2"}, {0: "direct 10.2.0.1"}]
    close(meshes)
    nets.ip("b", "addr", "add", "10.1.0.2/24", "dev", "fast")
    pair.later += 61.0
    meshes = pair.form(*hosts)
    assert [told(mesh) for mesh in meshes] == [{1: "direct 10.1.0.2"}, {0: "direct 10.1.0.1"}]
    close(meshes)


def test_a_machine_that_all_wait_for_is_missed_soon_and_a_stopped_process_is_not(
    router: Nets, certificates: Path
) -> None:
    """What a stage listens with: nothing of the processes here reads or sends, as if both were stopped."""
    router.forwards("r", True)
    watched = ConnectTimeouts(is_watched=True)
    ends = {
        rank: router.inside("ab"[rank], lambda rank=rank: Listener(
            "0.0.0.0", Identity("run", rank, certificates / f"member-{rank}"), timeouts=watched))
        for rank in range(2)
    }  # fmt: skip

    def meet(rank: int) -> Connection:
        peer = [(f"10.77.{2 - rank}.2", ends[1 - rank].address[1])]
        deadline = time.monotonic() + PATIENCE
        return router.inside("ab"[rank], lambda: ends[rank].meet("c", 1 - rank, rank == 0, peer, deadline))

    outgoing, incoming = at_once(functools.partial(meet, 0), functools.partial(meet, 1))
    before, probes = _without_data(incoming), sum(dialling.WATCHED)
    until(lambda: _without_data(incoming) - before > 2 * probes)  # of both ends, for longer than silence may last
    router.forwards("r", False)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        incoming.socket.recv(1)
    assert time.monotonic() - begin < dialling.SILENT + dialling.ASK_EVERY * dialling.ASK_TIMES
    for end in (outgoing.socket, incoming.socket, *ends.values()):
        end.close()


def _without_data(connection: Connection) -> int:
    """Return how many segments without data have come: answers to probes, and the peer's probes."""
    info = connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    segments_in, data_segments_in = struct.unpack_from("I", info, 140)[0], struct.unpack_from("I", info, 152)[0]
    return int(segments_in - data_segments_in)


@pytest.fixture
def coordinator(router: Nets, certificates: Path) -> Iterator[tuple[int, list[WaysEvent]]]:
    """On the router; gives its port, and what it tells of ways."""
    config = CoordinatorConfig(
        run_id="run", names=("studio", "tower"), certificates=certificates / "coordinator", address="0.0.0.0"
    )
    told: list[WaysEvent] = []
    made = router.inside(
        "r", lambda: Coordinator(config, lambda e: told.append(e) if isinstance(e, WaysEvent) else None)
    )
    yield router.inside("r", made.start), told
    made.stop()


def test_a_run_goes_on_through_the_relay_when_the_way_between_two_dies(
    coordinator: tuple[int, list[WaysEvent]], router: Nets, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SILENT", "ASK_EVERY", "ASK_TIMES"):
        monkeypatch.setattr(dialling, name, 1)
    router.forwards("r", True)

    def join(rank: int) -> MeshMember:
        keys, host = certificates / f"member-{rank}", f"10.77.{rank + 1}."
        address, names = f"{host}1:{coordinator[0]}", ("studio", "tower")
        return router.inside(
            "ab"[rank],
            lambda: MeshMember(JoinConfig(address, keys, "run", rank, 2, names[rank], "0.0.0.0", [f"{host}2"])).join(
                120
            ),
        )

    members = at_once(functools.partial(join, 0), functools.partial(join, 1))
    codec = codec_by_name("fp32")
    for member in members:
        member.expect_model(9)
    for number, way in enumerate(["direct", "relayed", "relayed"]):
        pending = [m.start_mean(f"m{number}", torch.full((9,), 2.0 * m.rank), 1.0, codec) for m in members]
        assert [one.wait(PATIENCE).mean.tolist() for one in pending] == [[1.0] * 9] * 2
        assert all(str(mesh.routes[1 - mesh.rank]).startswith(way) for m in members if (mesh := m.mesh))
        router.forwards("r", False)

    def reported() -> dict[int, list[PeerPath]]:
        return {rank: [way for one in coordinator[1] if one.member == rank for way in one.ways] for rank in range(2)}

    until(lambda: all(len(ways) >= 2 for ways in reported().values()))
    found = reported()
    assert {rank: [str(way) for way in ways] for rank, ways in found.items()} == {
        0: ["direct 10.77.2.2", "relayed"],
        1: ["direct 10.77.1.2", "relayed"],
    }
    assert [(way.interface, way.peer) for way in found[0]] == [("toa", 1)] * 2
    for member in members:
        member.close()
