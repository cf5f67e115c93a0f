"""A relay and two members of whom neither can be dialled; strangers, and a relay that changes what it passes on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_listener import exchanged, hung_up
from test_mesh import at_once, told
from waiting import PATIENCE, timed_out, until

from profiles.errors import BadInput
from profiles.schema import Transport
from training.exchange.base import ExchangeTimeout
from training.exchange.links.certificates import relay_key
from training.exchange.links.dialling import Address
from training.exchange.links.link import PeerLost
from training.exchange.links.listener import ConnectTimeouts, Identity, Listener
from training.exchange.links.relay import Relay, connect_through_relay
from training.exchange.mean.mesh import Mesh
from training.exchange.unauthenticated import MAX_PER_HOST

pytestmark = pytest.mark.slow

T = TypeVar("T")
NAMES = {0: "studio", 1: "tower"}
SIDES = ("group/1", 0, 1)


class Loop:
    """An event loop on a thread, and the relay in it."""

    def __init__(self, key: bytes, host: str = "127.0.0.1") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.relay = Relay(key)
        self.address: Address = self.run(self.relay.start(host))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def close(self) -> None:
        self.run(self.relay.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


@pytest.fixture(scope="module")
def key(certificates: Path) -> bytes:
    return relay_key(certificates / "coordinator")


@pytest.fixture
def serving(key: bytes) -> Iterator[Loop]:
    made = Loop(key)
    yield made
    made.close()


@pytest.fixture
def listeners(certificates: Path, request: pytest.FixtureRequest) -> Iterator[list[Listener]]:
    transport: Transport = getattr(request, "param", "auto")
    soon = ConnectTimeouts(relay_after=0.1)
    made = [
        Listener("127.0.0.1", Identity("run", rank, certificates / f"member-{rank}", transport), timeouts=soon)
        for rank in range(2)
    ]
    yield made
    while _formed:
        _formed.pop().give_up()
    for one in made:
        one.close()


_formed: list[Mesh] = []


def form(
    listeners: list[Listener],
    through: Address,
    channel: str = "c",
    seconds: float = PATIENCE,
    places: dict[int, list[Address]] | None = None,
) -> list[Mesh]:
    def one(listener: Listener) -> Mesh:
        mesh = Mesh.form(listener, channel, places or {0: [], 1: []}, NAMES, seconds, relay=through)
        _formed.append(mesh)
        return mesh

    return at_once(*(functools.partial(one, listener) for listener in listeners))


def claim(address: Address, key: bytes, sends: bool, stop: Callable[[], bool] = lambda: False) -> socket.socket:
    found = connect_through_relay(address, key, SIDES, sends, stop)
    assert found is not None
    found.settimeout(PATIENCE)
    return found


def claiming(key: bytes, nonce: bytes, side: int, token: bytes) -> bytes:
    """What a member says, as the relay's protocol has it."""
    proof = hmac.digest(key, b"muster relay proof" + nonce + bytes([side]) + token, "sha256")
    return bytes([side]) + token + proof


def test_who_cannot_be_dialled_is_met_at_the_relay(listeners: list[Listener], serving: Loop) -> None:
    meshes = form(listeners, serving.address)
    exchanged(meshes, 3_000_001)
    assert [told(mesh) for mesh in meshes] == [{1: "relayed"}, {0: "relayed"}]
    for mesh in meshes:
        mesh.close()
    until(lambda: not serving.relay.connections)  # nothing is left of connections that have ended


def test_who_can_be_dialled_does_not_go_through_the_relay(listeners: list[Listener], serving: Loop) -> None:
    addresses = {rank: [one.address] for rank, one in enumerate(listeners)}
    meshes = form(listeners, serving.address, places=addresses)
    assert [told(mesh) for mesh in meshes] == [{1: "direct 127.0.0.1"}, {0: "direct 127.0.0.1"}]
    for mesh in meshes:
        mesh.close()


def test_the_relay_sees_nothing_but_what_is_encrypted(
    listeners: list[Listener], serving: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = bytearray()
    write = asyncio.StreamWriter.write
    monkeypatch.setattr(asyncio.StreamWriter, "write", lambda self, data: (seen.extend(data), write(self, data))[1])
    meshes = form(listeners, serving.address)
    word = b"what only the two may read " * 1000
    operation = meshes[0].send(1, 7, memoryview(word))
    room = bytearray(len(word))
    meshes[1].receive(0, 7, memoryview(room)).wait(PATIENCE)
    operation.wait(PATIENCE)
    assert room == word and len(seen) > len(word) and b"only the two" not in seen and b"muster 1" not in seen


@pytest.mark.parametrize("listeners", ["tls"], indirect=True)
def test_with_transport_tls_nothing_but_its_records_goes_over_the_wire(
    listeners: list[Listener], serving: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    meshes = form(listeners, serving.address)
    seen, write = dict[asyncio.StreamWriter, bytes](), asyncio.StreamWriter.write

    def note(self: asyncio.StreamWriter, data: bytes) -> None:
        seen[self] = seen.get(self, b"") + data
        write(self, data)

    monkeypatch.setattr(asyncio.StreamWriter, "write", note)
    exchanged(meshes, 300_001)
    assert len(seen) == 2
    for stream in seen.values():
        assert len(stream) > 300_001
        while stream:
            assert stream.startswith(b"\x17\x03\x03")
            stream = stream[5 + int.from_bytes(stream[3:5]) :]


@pytest.mark.parametrize("listeners", ["auto", "tls"], indirect=True)
@pytest.mark.parametrize("flaw", ["changed", "doubled", "left out"])
def test_a_relay_that_changes_frames_ends_the_connection_and_nothing_wrong_is_read(
    listeners: list[Listener], serving: Loop, monkeypatch: pytest.MonkeyPatch, flaw: str
) -> None:
    meshes = form(listeners, serving.address)
    write = asyncio.StreamWriter.write

    lied: list[bytes] = []

    def lie(self: asyncio.StreamWriter, data: bytes) -> None:
        if len(data) < 100 or lied:
            return write(self, data)
        lied.append(data)
        changed = {"changed": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:], "doubled": data + data, "left out": b""}
        return write(self, changed[flaw])

    monkeypatch.setattr(asyncio.StreamWriter, "write", lie)
    received = meshes[1].exchange({}, {0: [memoryview(bytearray(5000)), memoryview(bytearray(5000))]})
    meshes[0].exchange({1: [memoryview(bytes(5000))]}, {})
    until(lambda: lied)
    meshes[0].exchange({1: [memoryview(bytes(5000))]}, {})
    told = r"frame \d+ was changed|frame \d+ where \d+|\[SSL: "
    with pytest.raises(PeerLost, match=f"studio is lost: ({told})") as caught:
        received.wait(PATIENCE)
    assert not caught.value.hung_up  # nobody is: somebody on the way has changed it


@pytest.mark.parametrize(
    "word",
    [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(65), bytes(10_000)],
    ids=["nothing", "a request", "noise", "zeros"],
)
def test_strangers_get_nothing_and_members_still_come_through(
    listeners: list[Listener], serving: Loop, word: bytes
) -> None:
    strangers = [socket.create_connection(serving.address, PATIENCE) for _ in range(5)]
    for one in strangers:
        with contextlib.suppress(OSError):  # it may have hung up already
            one.sendall(word)
            one.shutdown(socket.SHUT_WR)
    assert all(map(hung_up, strangers))
    exchanged(form(listeners, serving.address), 10)
    assert not serving.relay.waiting


@given(side=st.integers(0, 255), token=st.binary(min_size=32, max_size=32), rest=st.binary(max_size=80))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_claim_without_the_key_is_hung_up_on(serving: Loop, side: int, token: bytes, rest: bytes) -> None:
    stranger = socket.create_connection(serving.address, PATIENCE)
    nonce = stranger.recv(16)
    stranger.sendall(claiming(b"", nonce, side, token) + rest)
    assert hung_up(stranger) and not serving.relay.waiting


def test_ipv4_and_ipv6_meet_at_one_relay(key: bytes) -> None:
    serving = Loop(key, "::")
    port = serving.address[1]
    one, other = at_once(lambda: claim(("127.0.0.1", port), key, True), lambda: claim(("::1", port), key, False))
    one.sendall(b"over both")
    assert other.recv(9, socket.MSG_WAITALL) == b"over both"
    one.close()
    other.close()
    serving.close()


def test_silent_strangers_of_one_host_take_no_more_than_their_part(serving: Loop) -> None:
    strangers = [socket.create_connection(serving.address, PATIENCE) for _ in range(MAX_PER_HOST + 20)]
    for one in strangers[MAX_PER_HOST:]:
        assert hung_up(one)
    for one in strangers:
        one.close()
    until(lambda: not serving.relay.connections)


def test_a_proof_that_was_overheard_is_of_no_use(serving: Loop, key: bytes) -> None:
    overheard = socket.create_connection(serving.address, PATIENCE)
    said = claiming(key, overheard.recv(16), 0, secrets.token_bytes(32))
    overheard.sendall(said)
    until(lambda: serving.relay.waiting)
    stranger = socket.create_connection(serving.address, PATIENCE)
    stranger.recv(16)
    stranger.sendall(said)
    assert hung_up(stranger) and serving.relay.waiting == 1
    overheard.close()
    until(lambda: not serving.relay.waiting)


def test_what_was_sent_before_hanging_up_still_arrives(serving: Loop, key: bytes) -> None:
    one, other = at_once(*(lambda sends=sends: claim(serving.address, key, sends) for sends in (True, False)))
    threading.Thread(target=lambda: (one.sendall(bytes(1_000_000)), one.close()), daemon=True).start()
    came = 0
    while piece := other.recv(1 << 16):
        came += len(piece)
    other.close()
    assert came == 1_000_000
    until(lambda: not serving.relay.connections)


def test_who_does_not_read_holds_up_the_sender_and_takes_no_memory(serving: Loop, key: bytes) -> None:
    one, other = at_once(*(lambda sends=sends: claim(serving.address, key, sends) for sends in (True, False)))
    one.settimeout(0.5)
    sent = 0
    with contextlib.suppress(TimeoutError):
        while sent < 200 << 20:
            sent += one.send(bytes(1 << 20))
    assert sent < 40 << 20  # the buffers of two connections, and the relay's own megabyte
    one.close()
    other.close()


def test_who_comes_again_takes_the_place_of_its_older_connection(serving: Loop, key: bytes) -> None:
    older: list[Exception] = []

    def first() -> None:
        try:
            claim(serving.address, key, True).close()
        except (OSError, EOFError) as error:
            older.append(error)

    thread = threading.Thread(target=first, daemon=True)
    thread.start()
    until(lambda: serving.relay.waiting)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(claim, serving.address, key, True)
        thread.join(PATIENCE)
        assert len(older) == 1
        other = claim(serving.address, key, False)
        one = again.result(PATIENCE)
    one.sendall(b"new")
    assert other.recv(3) == b"new"
    one.close()
    other.close()


def test_a_relay_that_is_gone_is_named(listeners: list[Listener]) -> None:
    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))  # where nobody listens, nor comes to
        address = gone.getsockname()
        told = rf"(studio|tower): relay 127\.0\.0\.1:{address[1]}: Connection refused"
        timed_out(functools.partial(form, listeners, address, "c"), ExchangeTimeout, told)


def test_a_missing_or_damaged_key_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"relay\.key"):
        relay_key(tmp_path)
    (tmp_path / "relay.key").write_bytes(b"short")
    with pytest.raises(BadInput, match="5 bytes"):
        relay_key(tmp_path)


def test_many_groups_meet_at_once_and_hear_of_the_relays_end(listeners: list[Listener], serving: Loop) -> None:
    groups = at_once(*(lambda n=n: form(listeners, serving.address, f"c{n}") for n in range(4)))
    for meshes in groups:
        exchanged(meshes, 1000)
    serving.run(serving.relay.close())
    with pytest.raises(PeerLost):
        groups[0][0].receive(1, 1, memoryview(bytearray(1))).wait(PATIENCE)
