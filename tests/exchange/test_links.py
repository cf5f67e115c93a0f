"""One link over a real connection: a man in the middle, jobs from several threads, and the end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from waiting import until

from training.exchange.links import sealing
from training.exchange.links.connection import Connection
from training.exchange.links.link import MAX_EARLY, Incoming, Outgoing, PeerLost
from training.exchange.links.loop import READABLE, Loop
from training.exchange.links.sealing import HEADER, TAG, Opener, Sealer
from training.exchange.mean.transfer import PendingTransfer

SECRET = bytes(range(32))
PATIENCE = 60.0
NAMES = {0: "studio", 1: "tower"}


class Wire:
    """A receiving link, and the bytes that its peer would send."""

    def __init__(self) -> None:
        self.here, there = socket.socketpair()
        self.errors: list[PeerLost] = []
        self.sealer = Sealer(SECRET, "aes")
        self.link = Incoming(Connection(there, SECRET, "aes", True), 1, NAMES, self.errors.append)

    def frame(self, data: bytes, operation: int = 7, left: int = 0) -> bytearray:
        return bytearray(self.sealer.seal(operation, memoryview(data), left))

    def start(self, size: int, operation: int = 7) -> tuple[PendingTransfer, bytearray]:
        room = bytearray(size)
        return self.receive(PendingTransfer(1), room, operation).submit(), room

    def receive(self, work: PendingTransfer, into: bytearray, operation: int = 1) -> PendingTransfer:
        """Prepare to receive one message, as the only part of ``work``."""
        work.add(self.link, lambda link: link.receive(operation, memoryview(into)))
        return work


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.here.close()
    made.link.close(PATIENCE)


@pytest.mark.parametrize("place", [0, 8, 12, 16, 23, 24, 33, HEADER.size + 10 + TAG - 1])
def test_a_changed_byte_ends_the_connection_before_its_word_is_believed(wire: Wire, place: int) -> None:
    """Wherever it is: in the header it must neither take memory, nor speak in the peer's name."""
    work, _ = wire.start(10)
    frame = wire.frame(bytes(10))
    frame[place] ^= 0x80 if place != 16 else 1
    wire.here.sendall(frame + bytes(1 << 10))
    with pytest.raises(PeerLost, match=r"tower is lost: (frame .*|a frame of \d+ bytes is above .*)$"):
        work.wait(PATIENCE)
    assert wire.link.early_bytes == 0


@pytest.mark.parametrize(
    ("forge", "told"),
    [
        (lambda a, b, c: a + a, "frame 0 where 1 had to come"),
        (lambda a, b, c: a + c, "frame 2 where 1 had to come"),
        (lambda a, b, c: b, "frame 1 where 0 had to come"),
        (lambda a, b, c: a + b[:-1], "it closed the connection"),
        (lambda a, b, c: a + b[:5], "it closed the connection"),
        (lambda a, b, c: a + a[:8] + b[8:], "frame 0 where 1 had to come"),
        (lambda a, b, c: a + b[:8] + c[8:], "frame 1 was changed"),
    ],
    ids=["replayed", "left out", "reordered", "truncated", "cut in the header", "old counter", "another's bytes"],
)
def test_only_the_next_whole_frame_is_taken(wire: Wire, forge: Callable[..., bytes], told: str) -> None:
    for _ in range(2):
        wire.start(4)
    last, _ = wire.start(4)
    wire.here.sendall(forge(*(bytes(wire.frame(bytes([number]) * 4)) for number in range(3))))
    wire.here.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost):
        last.wait(PATIENCE)
    assert told in str(wire.errors[0])


def test_a_message_goes_on_over_a_new_key_and_counters_beyond_32_bits(wire: Wire) -> None:
    for keys in (wire.sealer._keys, wire.link._opener._keys):
        keys._counter = (1 << 32) - 2
    work, room = wire.start(16)
    for number in range(4):
        wire.here.sendall(wire.frame(bytes([number]) * 4, left=12 - 4 * number))
    work.wait(PATIENCE)
    assert room == b"".join(bytes([number]) * 4 for number in range(4))


@pytest.mark.parametrize("cipher", ["aes", "chacha"])
def test_no_nonce_comes_twice_with_a_key(monkeypatch: pytest.MonkeyPatch, cipher: sealing.Cipher) -> None:
    """Also where a frame could not be sealed, and at both ends alike."""
    used: list[tuple[bytes, bytes]] = []

    class Noted:
        def __init__(self, key: bytes) -> None:
            self._key = key

        def encrypt_into(self, nonce: bytes, *_: object) -> None:
            used.append((self._key, nonce))
            if len(used) == 5:
                raise MemoryError

        decrypt_into = encrypt_into

    monkeypatch.setattr(sealing, "AESGCM", Noted)
    monkeypatch.setattr(sealing, "ChaCha20Poly1305", Noted)
    sealer = Sealer(SECRET, cipher, rekey_after=3)
    for _ in range(10):
        try:
            sealer.seal(1, memoryview(b"x"), 0)
        except MemoryError:
            continue
    assert len(set(used)) == 10 and len({key for key, _ in used}) == 4


def test_the_opener_refuses_the_frame_of_a_key_that_is_past() -> None:
    """What was sealed with the first key under the counter of the second is no frame."""
    sealer, opener = Sealer(SECRET, "aes", 1 << 20), Opener(SECRET, "aes", 2)
    frames = [bytes(sealer.seal(1, memoryview(b"x"), 0)) for _ in range(3)]
    for number, frame in enumerate(frames):
        into = memoryview(bytearray(1))
        if number < 2:
            opener.open(memoryview(frame[: HEADER.size]), memoryview(frame[HEADER.size :]), into)
            continue
        with pytest.raises(sealing.FrameError, match="was changed"):
            opener.open(memoryview(frame[: HEADER.size]), memoryview(frame[HEADER.size :]), into)


def test_a_loss_met_in_the_callers_thread_may_submit_more() -> None:
    here, there = socket.socketpair()
    here.close()
    told = threading.Event()

    def lost(error: PeerLost) -> None:
        link.submit(lambda link: None, lambda error: told.set())

    link = Outgoing(Connection(there, SECRET, "aes", True), 1, NAMES, lost)
    work = PendingTransfer(1)
    work.add(link, lambda link: link.send(1, memoryview(b"x")))
    work.submit(start=False).drive()
    with pytest.raises(PeerLost, match="tower is lost: it closed the connection"):
        work.wait(0.0)
    assert told.wait(PATIENCE)
    link.close(PATIENCE)


def test_a_job_meanwhile_waits_for_the_one_in_the_callers_thread(wire: Wire) -> None:
    first, second, a, b = PendingTransfer(1), PendingTransfer(1), bytearray(1), bytearray(1)
    thread = threading.Thread(target=lambda: wire.receive(first, a).submit(start=False).drive(), daemon=True)
    thread.start()
    until(lambda: not wire.link.idle)
    wire.receive(second, b).submit()
    wire.here.sendall(wire.frame(b"a", 1) + wire.frame(b"b", 1))
    second.wait(PATIENCE)
    thread.join(PATIENCE)
    assert (a, b) == (b"a", b"b")


def test_what_the_caller_leaves_the_links_thread_goes_on_with(wire: Wire) -> None:
    work, room = PendingTransfer(1), bytearray(1)
    wire.receive(work, room).submit(start=False).drive(seconds=0.01)
    wire.here.sendall(wire.frame(b"a", 1))
    work.wait(PATIENCE)
    assert room == b"a"


def test_the_links_thread_takes_over_what_the_caller_could_not_drive(wire: Wire) -> None:
    """Another thread drives, and waits for bytes: it is told of the new job."""
    before, _ = wire.start(1, 5)
    until(lambda: wire.link.awaits == READABLE)
    ended = threading.Event()
    work = PendingTransfer(1, lambda error: ended.set())
    work.add(wire.link, lambda link: link.receive(1, memoryview(bytearray(1))))
    wire.here.sendall(wire.frame(b"a", 5) + wire.frame(b"b", 1))
    assert work.submit(start=False).drive_for(ended, PATIENCE)
    before.wait(PATIENCE)


def test_links_of_one_loop_do_not_wait_for_one_another() -> None:
    """The first has nothing to receive, and the second as much to send as its peer does not take yet."""
    loop, pairs = Loop("links"), [socket.socketpair() for _ in range(3)]
    near = [Connection(there, SECRET, "aes", True) for _, there in pairs]
    silent = Incoming(near[0], 1, NAMES, lambda lost: None, loop=loop)
    full, third = (Outgoing(one, 1, NAMES, lambda lost: None, loop) for one in near[1:])
    silent.submit(lambda link: link.receive(1, memoryview(bytearray(1))), lambda error: None)
    full.submit(lambda link: link.send(1, memoryview(bytes(8 << 20))), lambda error: None)
    sent = threading.Event()
    third.submit(lambda link: link.send(1, memoryview(b"x")), lambda error: sent.set())
    assert sent.wait(PATIENCE)
    for link, (here, _) in zip((silent, full, third), pairs):
        link.close(0.0)
        here.close()


def test_what_comes_after_the_end_fails_and_does_not_wait(wire: Wire) -> None:
    before, _ = wire.start(1)
    wire.link.close(0.0)
    after, _ = wire.start(1)
    for work in (before, after):
        with pytest.raises(PeerLost, match="tower is lost"):
            work.wait(PATIENCE)


def test_what_is_kept_for_later_is_bounded_by_what_was_proven_to_come(wire: Wire) -> None:
    work, _ = wire.start(1, 9)
    wire.here.sendall(wire.frame(bytes(10), 5, left=MAX_EARLY))
    with pytest.raises(PeerLost, match="another operation"):
        work.wait(PATIENCE)


def test_a_farewell_ends_what_is_sent() -> None:
    """Who waits for a long message is woken for many bytes only, or for the end."""
    here, there = socket.socketpair()
    here.settimeout(PATIENCE)
    link = Outgoing(Connection(there, SECRET, "aes", True), 0, NAMES, lambda lost: None)
    link.say_farewell(link.lost("its cable was pulled", 1))
    with here:
        assert len(b"".join(iter(lambda: here.recv(1 << 10), b""))) > HEADER.size + TAG
    link.close(PATIENCE)
