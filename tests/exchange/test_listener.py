"""Strangers, broken networks and crowds at a member's listening socket; all on loopback, with real TLS."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
import resource
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_mesh import Group, at_once, told
from waiting import PATIENCE, timed_out, until

from tests.preloaded.python import python_itself
from training.exchange.base import ExchangeError, ExchangeTimeout
from training.exchange.links import link
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.links.connection_attempt import MAX_WAITING
from training.exchange.links.dialling import Address, DialHistory, first_to_answer, listen_on
from training.exchange.links.handshake import PADDING, RECEIVES, SENDS
from training.exchange.links.link import MAX_EARLY, Incoming, PeerLost
from training.exchange.links.listener import ConnectTimeouts, Identity, Listener
from training.exchange.mean.mesh import Mesh
from training.exchange.unauthenticated import MAX_PER_HOST, UnauthenticatedConnections

pytestmark = pytest.mark.slow

RUN = "run"
HELLO = struct.Struct("<8sIIBB32sH")
"""What who dials says first: see :mod:`training.exchange.links.handshake`."""


@pytest.fixture
def pair(certificates: Path) -> Iterator[Group]:
    made = Group(2, certificates)
    yield made
    made.close()


def dial(group: Group, certificates: Path, rank: int = 1, source: str = "127.0.0.1") -> ssl.SSLSocket:
    """Show a member's certificate to member 0."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    own = certificates / f"member-{rank}"
    context.load_verify_locations(own / "ca.pem")
    context.load_cert_chain(own / "certificate.pem", own / "key.pem")
    plain = socket.create_connection(group.listeners[0].address, PATIENCE, (source, 0))
    return context.wrap_socket(plain)


def hello(
    magic: bytes = b"muster 1", rank: int = 1, to: int = 0, does: int = SENDS, cipher: int = 0, channel: bytes = b"c"
) -> bytes:
    return HELLO.pack(magic, rank, to, does, cipher, os.urandom(32), len(channel)) + channel


def hung_up(connection: socket.socket) -> bool:
    """Wait until the other end has hung up."""
    connection.settimeout(PATIENCE)
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while connection.recv(1000):
            pass
    connection.close()
    return True


def is_hung_up(connection: socket.socket) -> bool:
    """Whether the other end has hung up by now."""
    connection.settimeout(0.02)
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return False
    except (ConnectionError, ssl.SSLError):
        pass
    return True


def give(group: Group, timeouts: ConnectTimeouts) -> None:
    for listener in group.listeners:
        listener.timeouts = timeouts


def exchanged(meshes: list[Mesh], size: int = 1000) -> None:
    """Send random bytes between all, and look at what comes."""
    sent = {mesh.rank: os.urandom(size) for mesh in meshes}
    rooms = {(mesh.rank, peer): bytearray(size) for mesh in meshes for peer in mesh.peers}
    operations = [
        mesh.exchange(
            {peer: [memoryview(sent[mesh.rank])] for peer in mesh.peers},
            {peer: [memoryview(rooms[mesh.rank, peer])] for peer in mesh.peers},
        )
        for mesh in meshes
    ]
    for one in operations:
        one.wait(PATIENCE)
    assert all(room == sent[peer] for (_, peer), room in rooms.items())


# ------------------------------------------------------------------------------------------------------------ strangers


@pytest.mark.parametrize(
    "said",
    [
        hello(magic=b"muster 0"),
        hello(to=1),
        hello(rank=2),
        hello(rank=0),
        hello(does=7),
        hello(cipher=9),
        hello(channel=b"\xff\xfe"),
        hello(channel=b"c" * 129),
        hello() + b"?",
    ],
    ids=["version", "not for it", "another's rank", "its own rank", "direction", "cipher", "text", "long", "no word"],
)
def test_a_wrong_hello_is_hung_up_on(pair: Group, certificates: Path, said: bytes) -> None:
    stranger = dial(pair, certificates)
    stranger.sendall(said)
    assert hung_up(stranger)
    assert not pair.listeners[0].arrivals
    exchanged(pair.form())


@pytest.fixture(scope="module")
def clear() -> Iterator[Group]:
    made = Group(2, None)
    yield made
    made.close()


_bytes, _numbers = st.binary(max_size=40), st.integers(0, 255)
_hellos = st.builds(
    lambda magic, rank, to, does, cipher, length, rest: (
        HELLO.pack(magic, rank, to, does, cipher, bytes(32), length) + rest
    ),
    st.sampled_from([b"muster 1", b"muster 2"]), _numbers, st.integers(0, 1), st.integers(0, 2), st.integers(0, 2),
    st.integers(0, 200), _bytes,
)  # fmt: skip


@given(st.lists(st.one_of(_hellos, _bytes), min_size=1, max_size=3).map(b"".join))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_hung_up_on_or_waited_for_by_nobody(clear: Group, said: bytes) -> None:
    listener = clear.listeners[0]
    with socket.create_connection(listener.address, PATIENCE) as stranger:
        stranger.sendall(said)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        answer = b""
        stranger.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            while not listener.arrivals:  # it may come while nothing is said
                with contextlib.suppress(TimeoutError):
                    if not (piece := stranger.recv(100)):
                        break
                    answer += piece
    assert answer in (b"", b"+", b"++")
    until(lambda: not listener.unauthenticated)
    for key in listener.arrivals.waiting:  # a hello that was whole: on loopback, in clear, it may be a member's
        if (arrival := listener.arrivals.take(key)) is not None:
            arrival.socket.close()


def test_who_drips_its_bytes_is_hung_up_on_in_time(certificates: Path) -> None:
    slow = Group(1, certificates, timeouts=ConnectTimeouts(handshake=1.0))
    stranger = socket.create_connection(slow.listeners[0].address, PATIENCE)
    words = b"\x16\x03\x01\x40\x00" + bytes(16_000)  # a handshake that is long in coming
    stranger.settimeout(0.2)
    with contextlib.suppress(ConnectionError):
        for word in words:
            stranger.send(bytes([word]))
            with contextlib.suppress(TimeoutError):
                if not stranger.recv(100):
                    break
        else:
            raise AssertionError("nobody hung up")
    stranger.close()
    until(lambda: not slow.listeners[0].unauthenticated)
    slow.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_silent_strangers_of_one_host_keep_no_member_out(pair: Group) -> None:
    strangers = [
        socket.create_connection(pair.listeners[0].address, PATIENCE, ("127.0.0.2", 0)) for _ in range(MAX_PER_HOST)
    ]
    surplus = socket.create_connection(pair.listeners[0].address, PATIENCE, ("127.0.0.2", 0))
    assert hung_up(surplus)
    exchanged(pair.form())
    for one in strangers:
        one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system chooses")
def test_any_port_is_one_that_no_outgoing_connection_is_given() -> None:
    with contextlib.ExitStack() as stack:
        listening = [stack.enter_context(listen_on("127.0.0.1", 0)) for _ in range(20)]
        ports = {one.getsockname()[1] for one in listening}
    assert len(ports) == 20 and max(ports) < 32768


def test_hosts_are_counted_by_what_is_their_own() -> None:
    unauthenticated = UnauthenticatedConnections()
    for last in range(MAX_PER_HOST):
        assert unauthenticated.enter(f"2001:db8::{last:x}")
    assert (
        not unauthenticated.enter("2001:db8::ffff")
        and unauthenticated.enter("2001:db8:0:1::1")
        and unauthenticated.enter("10.0.0.1")
    )
    unauthenticated.leave("2001:db8::7")
    assert unauthenticated.enter("2001:db8::ffff")


def test_a_member_keeps_no_more_open_than_it_can_need(pair: Group, certificates: Path) -> None:
    opened = []
    for number in range(MAX_WAITING + 8):
        opened.append(dial(pair, certificates))
        opened[-1].sendall(hello(does=RECEIVES, channel=b"%d" % number))
    # Handshakes are heard side by side, so it need not be the first eight.
    until(lambda: sum(map(is_hung_up, opened)) == 8 and len(pair.listeners[0].arrivals) == MAX_WAITING)
    for one in opened:
        one.close()
    exchanged(pair.form())
    assert len(pair.listeners[0].arrivals) <= 2  # those that were hung up are swept out by who comes next


def test_empty_messages_that_nobody_asks_for_are_bounded(pair: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    most = MAX_EARLY // 16
    monkeypatch.setattr(link, "MAX_EARLY", most)
    a, b = pair.form()
    waiting = b.receive(0, 9, memoryview(bytearray(1)))
    for _ in range(most // 500):
        a.outgoing(1).submit(lambda link: link.send(5, memoryview(b"")), lambda error: None)
    with pytest.raises(PeerLost, match="rank 0 is lost: it is doing another operation"):
        waiting.wait(PATIENCE)


# ------------------------------------------------------------------------------------------------------ broken networks


class Cable:
    """Passes connections on to ``target``; the first ones end after some bytes of one direction."""

    def __init__(self, target: Address, cuts: list[tuple[bool, int]]) -> None:
        self._target, self._cuts = target, cuts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._server.getsockname()
        self.came_back = self.went = 0
        """Bytes that ``target`` has sent and received."""
        self._sockets = [self._server]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target, PATIENCE)
                self._sockets += near, far
                towards, after = self._cuts.pop(0) if self._cuts else (True, 1 << 40)
                for back, left in ((False, after if towards else 1 << 40), (True, 1 << 40 if towards else after)):
                    work = threading.Thread(target=self._pass_on, args=(near, far, back, left), daemon=True)
                    self._threads.append(work)
                    work.start()

    def _pass_on(self, near: socket.socket, far: socket.socket, back: bool, left: int) -> None:
        one, other = (far, near) if back else (near, far)
        with contextlib.suppress(OSError):
            while left and (piece := one.recv(min(left, 1 << 16))):
                left -= len(piece)
                self.came_back += len(piece) if back else 0
                self.went += 0 if back else len(piece)
                other.sendall(piece)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for one in self._sockets:
            one.close()


@pytest.mark.parametrize("towards", [True, False])
@pytest.mark.parametrize("after", [0, 1, 5, 150, 600, 1000, 1150])
def test_a_connection_that_dies_in_any_phase_is_replaced(pair: Group, towards: bool, after: int) -> None:
    cable = Cable(pair.listeners[0].address, [(towards, after), (towards, after)])
    exchanged(pair.form({0: [cable.address], 1: pair.addresses[1]}))
    cable.close()


@pytest.mark.parametrize("towards", [True, False])
@pytest.mark.parametrize("back", [1, 10, 22, 24, 46, 70, 100])
def test_a_connection_that_dies_with_the_last_words_is_replaced_or_noticed(
    pair: Group, towards: bool, back: int
) -> None:
    """Of two ends one is always the last to know; it learns it when it reads, and nobody reads anything wrong."""
    cable = Cable(pair.listeners[0].address, [(towards, _handshake_bytes(pair)[towards] - back)])
    places = {0: [cable.address], 1: pair.addresses[1]}
    formed: list[Mesh] = []

    def form(one: Listener) -> None:
        formed.append(Mesh.form(one, f"dies/{back}", places, seconds=3.0))

    with contextlib.suppress(ExchangeTimeout, PeerLost):
        at_once(*(functools.partial(form, one) for one in pair.listeners))
        exchanged(formed)
    for mesh in formed:
        mesh.give_up()
    cable.close()
    exchanged(pair.form())


def _handshake_bytes(pair: Group) -> tuple[int, int]:
    """Return how many bytes come back from and go to a listener until a connection stands."""
    cable = Cable(pair.listeners[0].address, [])
    found = at_once(
        lambda: pair.listeners[0].meet("count", 1, False, [], time.monotonic() + PATIENCE),
        lambda: pair.listeners[1].meet("count", 0, True, [cable.address], time.monotonic() + PATIENCE),
    )
    for one in found:
        one.socket.close()
    cable.close()
    return cable.came_back, cable.went


@pytest.mark.slow
def test_both_dial_at_once_again_and_again(pair: Group) -> None:
    for number in range(60):
        give(pair, ConnectTimeouts(reverse_after=random.Random(number).choice([0.0, 0.002, 0.005, 0.01])))
        meshes = pair.form()
        exchanged(meshes, 100)
        for mesh in meshes:
            mesh.close()
    until(lambda: not any(one.unauthenticated for one in pair.listeners))
    assert all(len(one.arrivals) <= 4 for one in pair.listeners)


def test_groups_are_formed_at_once_over_the_same_listeners(certificates: Path) -> None:
    group = Group(4, certificates)

    def form(channel: str) -> list[Mesh]:
        return at_once(*(lambda one=one: Mesh.form(one, channel, group.addresses) for one in group.listeners))

    for meshes in at_once(lambda: form("a"), lambda: form("b"), lambda: form("c")):
        exchanged(meshes)
        for mesh in meshes:
            mesh.close()
    group.close()


def test_a_member_that_is_frozen_is_told_from_one_that_is_gone(pair: Group) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        form = functools.partial(Mesh.form, pair.listeners[0], "c", {0: [], 1: [frozen.getsockname()]}, None)
        timed_out(form, ExchangeTimeout, "but says nothing")


def test_who_is_not_wanted_any_more_is_not_waited_for(pair: Group) -> None:
    """As when the coordinator has learned that a member is frozen, in the middle of its handshake."""
    wanted = True
    with socket.create_server(("127.0.0.1", 0)) as frozen:

        def form() -> None:
            places = {0: [], 1: [frozen.getsockname()]}
            Mesh.form(pair.listeners[0], "c", places, seconds=10 * PATIENCE, is_wanted=lambda: wanted)

        with ThreadPoolExecutor(1) as pool:
            formed = pool.submit(form)
            connection, _ = frozen.accept()
            assert connection.recv(1)
            wanted = False
            pair.listeners[0].wake()
            assert isinstance(formed.exception(PATIENCE), ExchangeTimeout)
            connection.close()


def test_ctrl_c_ends_the_search_for_peers(pair: Group) -> None:
    before, main = set(threading.enumerate()), threading.main_thread().ident

    def meeting() -> list[threading.Thread]:
        return [one for one in set(threading.enumerate()) - before if one.name == "meeting"]

    def interrupt() -> None:
        until(lambda: len(meeting()) == 2)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        Mesh.form(pair.listeners[0], "c", {0: [], 1: []}, seconds=10 * PATIENCE)
    until(lambda: not meeting())


def test_a_frozen_member_is_met_again_when_it_goes_on(certificates: Path) -> None:
    """The process is stopped by a signal; the kernel goes on taking connections for it."""
    host = Listener("127.0.0.1", Identity(RUN, 0, certificates / "member-0"))
    command = [python_itself(), "-c", _MEMBER, str(certificates / "member-1"), str(host.address[1])]
    pipe, root = subprocess.PIPE, Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=root) as child:
        try:
            assert child.stdout is not None
            places: dict[int, list[Address]] = {0: [], 1: [("127.0.0.1", int(child.stdout.readline()))]}
            child.send_signal(signal.SIGSTOP)
            timed_out(functools.partial(Mesh.form, host, "frozen", places, None), ExchangeTimeout, "says nothing")
            child.send_signal(signal.SIGCONT)
            mesh = Mesh.form(host, "awake", places)
            room = bytearray(5)
            mesh.receive(1, 7, memoryview(room)).wait(PATIENCE)
            assert room == b"awake"
            child.send_signal(signal.SIGSTOP)
            sent = mesh.send(1, 8, memoryview(bytes(50 << 20)))  # more than all buffers on the way hold
            mesh.break_off(PeerLost(1, "rank 1", "its lease is over"))
            with pytest.raises(PeerLost):
                sent.wait(PATIENCE)
            mesh.close()
        finally:
            child.kill()
            host.close()


_MEMBER = """
import sys
from pathlib import Path
from training.exchange.links.listener import Identity, Listener
from training.exchange.mean.mesh import Mesh
own = Listener("127.0.0.1", Identity("run", 1, Path(sys.argv[1])))
print(own.address[1], flush=True)
mesh = Mesh.form(own, "awake", {0: [("127.0.0.1", int(sys.argv[2]))], 1: []})
mesh.send(0, 7, memoryview(b"awake")).wait()
sys.stdin.read()
"""


def test_another_address_is_tried_where_somebody_takes_connections_and_says_nothing(
    pair: Group,
) -> None:
    give(pair, ConnectTimeouts(hurried=0.2))
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        silent = frozen.getsockname()
        exchanged(pair.form({rank: [silent, *addresses] for rank, addresses in pair.addresses.items()}))
    assert pair.listeners[0].dial_history.sort_addresses(1, [silent, *pair.addresses[1]])[-1] == silent


@pytest.fixture
def hole() -> Iterator[Address]:
    """An address that answers nothing, not even with a refusal: its queue is full."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        address = server.getsockname()
        filling = [socket.socket() for _ in range(4)]
        for one in filling:
            one.setblocking(False)
            one.connect_ex(address)
        yield address
        for one in filling:
            one.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue answers")
def test_a_dead_first_address_holds_nobody_up_and_comes_last_from_then_on(pair: Group, hole: Address) -> None:
    give(pair, ConnectTimeouts(connect=2 * PATIENCE))
    meshes = pair.form({rank: [hole, *addresses] for rank, addresses in pair.addresses.items()})
    exchanged(meshes)
    assert told(meshes[0]) == {1: "direct 127.0.0.1"}
    assert pair.listeners[0].dial_history.sort_addresses(1, [hole, *pair.addresses[1]]) == [*pair.addresses[1], hole]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue answers")
def test_a_receiver_dials_where_the_senders_way_is_dead(pair: Group, hole: Address) -> None:
    give(pair, ConnectTimeouts(connect=2 * PATIENCE, reverse_after=0.1))
    exchanged(pair.form({0: [hole], 1: pair.addresses[1]}))
    assert pair.listeners[0].dial_history.recent_route(1, RECEIVES) == "dialled"
    give(pair, ConnectTimeouts(connect=2 * PATIENCE, reverse_after=2 * PATIENCE))  # it knows better the next time
    exchanged(pair.form({0: [hole], 1: pair.addresses[1]}))


def test_a_closed_listener_ends_what_waits(pair: Group) -> None:
    ended: list[Exception] = []

    def form() -> None:
        try:
            Mesh.form(pair.listeners[0], "c", {0: [], 1: []}, seconds=10 * PATIENCE)
        except ExchangeError as error:
            ended.append(error)

    thread = threading.Thread(target=form, daemon=True)
    thread.start()
    pair.listeners[0].close()
    thread.join(PATIENCE)
    assert ended


@pytest.mark.parametrize("days", [-800, 800])
def test_a_clock_that_jumps_keeps_nobody_out(tmp_path: Path, days: int) -> None:
    then = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    issue_run_certificates(tmp_path, RUN, range(2), ["127.0.0.1"], then)
    group = Group(2, tmp_path)
    exchanged(group.form())
    group.close()


def test_a_listener_survives_the_end_of_descriptors(pair: Group) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 20, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        form = functools.partial(Mesh.form, pair.listeners[0], "early", pair.addresses, None)
        timed_out(form, ExchangeTimeout, "Too many open files")
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    exchanged(pair.form())


def test_a_listener_survives_the_end_of_threads(pair: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = threading.Thread.start, []

    def begin(thread: threading.Thread) -> None:
        if thread.name == "handshake" and len(refused) < 3:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    exchanged(pair.form())
    assert len(refused) == 3


# ----------------------------------------------------------------------------------------------------------------- ways


def test_ipv4_and_ipv6_come_in_at_the_same_socket(certificates: Path) -> None:
    both = Listener("::", Identity(RUN, 0, certificates / "member-0"))
    four, six = (Listener(host, Identity(RUN, 1, certificates / "member-1")) for host in ("127.0.0.1", "::1"))
    port = both.address[1]
    for other, host in ((four, "127.0.0.1"), (six, "::1")):
        places: dict[int, list[Address]] = {0: [(host, port)], 1: []}
        meshes = at_once(*(functools.partial(Mesh.form, one, host, places) for one in (both, other)))
        exchanged(meshes)
        assert [told(mesh) for mesh in meshes] == [{1: f"direct {host}"}, {0: f"direct {host}"}]
        for mesh in meshes:
            mesh.close()
    for one in (both, four, six):
        one.close()


@pytest.mark.parametrize(
    "nonsense", [("studio.local", 5), ("", 5), ("1.2.3", 70_000), ("127.0.0.1", -1), ("é" * 99, 1)]
)
def test_a_useless_address_is_passed_over(pair: Group, nonsense: Address) -> None:
    heard: list[Address] = []
    answer = first_to_answer([nonsense, *pair.addresses[0]], PATIENCE, lambda address, why: heard.append(address))
    assert answer is not None and answer.address == pair.addresses[0][0] and heard == [nonsense]
    answer.socket.close()


def test_a_way_that_failed_is_tried_first_again_after_a_while() -> None:
    now = 1000.0
    ways, fast, slow = DialHistory(lambda: now), ("10.0.0.1", 1), ("10.0.1.1", 1)
    ways.record_failure(1, fast)
    assert ways.sort_addresses(1, [fast, slow]) == [slow, fast] and ways.sort_addresses(2, [fast, slow]) == [fast, slow]
    now += 61
    assert ways.sort_addresses(1, [fast, slow]) == [fast, slow]


def test_a_detour_is_forgotten_after_a_while_however_often_it_is_taken() -> None:
    now = 1000.0
    ways = DialHistory(lambda: now)
    for _ in range(3):
        ways.record_route(1, SENDS, "relayed")
        assert ways.recent_route(1, SENDS) == "relayed"
        now += 120
    assert ways.recent_route(1, SENDS) is None


@pytest.mark.parametrize("crashes", [False, True])
def test_who_leaves_right_after_meeting_is_lost_at_once_and_not_waited_for(pair: Group, crashes: bool) -> None:
    deadline = time.monotonic() + 10 * PATIENCE
    one, other = pair.listeners
    link = one.meet("c", 1, True, pair.addresses[1], deadline)  # the other has heard all it has to, and asks later
    if crashes:
        link.socket.shutdown(socket.SHUT_RDWR)
    link.socket.close()
    until(lambda: len(other.arrivals) == 1)
    found = other.meet("c", 0, False, pair.addresses[0], deadline)
    incoming = Incoming(found, 0, {0: "studio"}, lambda lost: None)
    ended: list[PeerLost | None] = []
    incoming.submit(lambda link: link.receive(1, memoryview(bytearray(1))), ended.append)
    until(lambda: ended)
    assert ended[0] is not None and (ended[0].rank, str(ended[0])) == (
        0,
        "the connection with studio is lost: it closed the connection",
    )


def test_who_gave_a_connection_up_before_its_last_word_is_waited_for(pair: Group, certificates: Path) -> None:
    listener, key = pair.listeners[0], ("c", 1, RECEIVES)
    gone = dial(pair, certificates)
    gone.sendall(hello())
    assert gone.recv(1) == b"+"
    gone.sendall(b"!" + PADDING)
    until(lambda: key in listener.arrivals)
    until(lambda: socket.socket.recv(gone, 1, socket.MSG_PEEK))
    gone.close()  # with the last word unread
    select.select([listener.arrivals.waiting[key].socket], [], [], PATIENCE)
    assert listener.arrivals.take(key) is None
