"""One direction to or from one peer: a connection, and the thread that works on it.

Messages of any length follow one another in the order in which they were started. The receiver names the operation
whose message it wants; one of another operation that comes first is kept for it, up to :data:`MAX_EARLY` bytes.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from training.exchange.base import ExchangeError
from training.exchange.connection import Connection
from training.exchange.rotation import SLOT, Rotation
from training.exchange.sealing import HEADER, MAX_FRAME, TAG, FrameError, Opener, Sealer, parse_header

MAX_EARLY = 64 << 20
"""Bytes of messages that came before anybody asked for them."""
_EARLY_OVERHEAD = 512
"""What keeping a message takes besides its bytes: empty ones are not free."""
_FEWEST, _FIRST, _ALIGNMENT = 16 << 10, 64 << 10, 4 << 10
_LEAST_BUFFER, _MOST_BUFFER = 128 << 10, 4 << 20
_LOCAL = 1 << 31
"""Bytes a second above which nothing is limited by the link."""


MARKS, OPERATIONS = (1 << 12) - 1, 1 << 20
"""An operation's number is ``MARKS`` times the one that counts it, plus a mark of what it is: equal at both ends."""
FAREWELL = 0xFFFFFFFF
"""The operation of a link's last message: whom its sender has lost, and why."""
_LAST_WORD = struct.Struct("<I")
_MAX_WHY = 200


class PeerLost(ExchangeError):
    """The connection to a member ended, or carried something that it must not."""

    def __init__(self, rank: int, who: str, why: str) -> None:
        super().__init__(f"the connection with {who} is lost: {why}")
        self.rank = rank
        self.why = why


Job = Callable[[Any], None]
"""Work on a link, which is given to it."""
Ended = Callable[[PeerLost | None], None]


class _Link:
    """What both directions share.

    Args:
        connection: that only this link uses from now on, or what makes it when the first job comes.
        peer: rank of the other end; ``names`` are the members' by rank.
        on_error: told when the link ends by itself.
    """

    def __init__(
        self,
        connection: Connection | Callable[[], Connection],
        peer: int,
        names: Mapping[int, str],
        on_error: Callable[[PeerLost], None],
    ) -> None:
        self.peer = peer
        self._names = names
        self.bytes = self.bytes_before = 0
        """That went over the connection, headers and tags included; and before the job under way."""
        self._connection = connection
        self._socket: socket.socket | None = None
        self._cut = False
        if isinstance(connection, Connection):
            self._begin(connection)
        self._on_error = on_error
        self._jobs: queue.SimpleQueue[tuple[Job, Ended] | None] = queue.SimpleQueue()
        self._pending = 0
        self._closed = False
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"{type(self).__name__} {peer}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Ended) -> None:
        """Have ``job`` carried out after those that were submitted before; ``done`` hears of its end."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._pending += 1
                self._jobs.put((job, done))
        if closed:
            done(self.lost("it was ended"))

    def try_now(self, job: Job) -> bool:
        """Carry a small job out in the calling thread if nothing is under way; return whether that was so."""
        with self._lock:
            if self._pending or self._closed:
                return False
            self._pending = 1
            self._turn.acquire()
        try:  # without the lock: who loses a member in here, or elsewhere meanwhile, submits a farewell
            error = self._carry_out(job)
        except BaseException:  # ctrl+c in the middle of a frame
            self.cut()
            raise
        finally:
            self._turn.release()
            with self._lock:
                self._pending -= 1
        if error is not None:
            raise error
        return True

    @property
    def idle(self) -> bool:
        return not self._pending

    @property
    def socket(self) -> socket.socket | None:
        return self._socket

    def lost(self, why: str, rank: int | None = None) -> PeerLost:
        """Return the error that says that the other end, or ``rank``, is lost."""
        rank = self.peer if rank is None else rank
        return PeerLost(rank, self._names.get(rank, f"rank {rank}"), why)

    def cut(self) -> None:
        """End the connection; what is under way fails."""
        self._cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float) -> None:
        """Let what was submitted end within ``seconds``, and hang up."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        self.cut()
        if self._socket is not None:
            self._socket.close()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            with self._turn:
                error = self._carry_out(job)
            with self._lock:
                self._pending -= 1
            done(error)
            del item, job, done  # they hold the tensors of their operation, and the next may be long in coming

    def _carry_out(self, job: Job) -> PeerLost | None:
        self.bytes_before = self.bytes
        try:
            if self._cut:
                raise EOFError("it was ended")
            if self._socket is None:
                assert not isinstance(self._connection, Connection)
                self._begin(self._connection())
            job(self)
        except PeerLost as error:
            lost = error
        except ConnectionError:
            lost = self.lost("it hung up")
        except Exception as error:  # noqa: BLE001 - a link whose thread ends without a word hangs the run
            lost = self.lost(str(error) or type(error).__name__)
        else:
            return None
        self._on_error(lost)
        return lost

    def _begin(self, connection: Connection) -> None:
        """Take the connection for this link's own."""
        self._socket = connection.socket
        if self._cut:
            self.cut()


class Outgoing(_Link):
    """To a peer.

    Args:
        rotation: turns of all flows out of this member.
    """

    _socket: socket.socket

    def __init__(
        self,
        connection: Connection | Callable[[], Connection],
        peer: int,
        names: Mapping[int, str],
        on_error: Callable[[PeerLost], None],
        rotation: Rotation | None = None,
    ) -> None:
        self._rotation = rotation
        self._sent_lately = self._seconds_lately = 0.0
        self._frame = _FIRST
        self._buffer = 0
        self._counter = 0
        self._last_word: PeerLost | None = None
        super().__init__(connection, peer, names, on_error)

    def say_farewell(self, lost: PeerLost) -> None:
        """Tell the peer who is lost as soon as the message under way allows it, and send nothing more."""
        self._last_word = lost
        self.submit(lambda link: link.send(FAREWELL, memoryview(b"")), lambda error: None)

    def _begin(self, connection: Connection) -> None:
        super()._begin(connection)
        self._sealer = Sealer(connection.secret, connection.cipher) if connection.sealed else None
        self._round_trip = connection.round_trip
        self._hold(_LEAST_BUFFER)

    def send(self, operation: int, data: memoryview) -> None:
        """Send one message."""
        size, start = len(data), 0
        while True:
            part = data[start : start + self._frame]
            start += len(part)
            self._send_frame(operation, part, size - start)
            if start >= size:
                return

    def _send_frame(self, operation: int, part: memoryview, left: int) -> None:
        if (lost := self._last_word) is not None:
            part = memoryview(_LAST_WORD.pack(lost.rank) + lost.why.encode()[:_MAX_WHY])
            operation, left = FAREWELL, 0
        if self._sealer is not None:
            pieces = [self._sealer.seal(operation, part, left)]
        else:
            pieces = [memoryview(HEADER.pack(self._counter, operation, len(part), left)), part]
            self._counter += 1
        rotation = self._rotation if len(part) >= _FEWEST else None
        if rotation is not None:
            rotation.enter(self.peer)
        try:
            begin = time.perf_counter()
            for piece in pieces:
                self._socket.sendall(piece)
            self._note(len(part), time.perf_counter() - begin)
        finally:
            if rotation is not None:
                rotation.leave(self.peer)
        self.bytes += sum(map(len, pieces))
        if lost is not None:
            self._cut = True  # for the jobs behind; the peer still reads what was sent
            raise lost

    def _note(self, size: int, seconds: float) -> None:
        """Follow the link's rate with the size of frames and of the kernel's buffer.

        A buffer of some 10 ms keeps the link busy and no more: what waits in it is late for the rotation. It never
        gets below twice what is under way on the link, or it would hold the rate down.
        """
        if size < _FEWEST:
            return
        self._sent_lately = 0.8 * self._sent_lately + size
        self._seconds_lately = 0.8 * self._seconds_lately + seconds
        rate = min(self._sent_lately / max(self._seconds_lately, 1e-9), float(_LOCAL))
        self._frame = int(min(MAX_FRAME, max(_FEWEST, rate * SLOT // _ALIGNMENT * _ALIGNMENT)))
        wanted = int(min(_MOST_BUFFER, max(_LEAST_BUFFER, rate * (2 * SLOT + 2 * self._round_trip))))
        if not 0.5 < self._buffer / wanted < 2.0:
            self._hold(wanted)

    def _hold(self, size: int) -> None:
        self._buffer = size
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)


class Incoming(_Link):
    """From a peer."""

    _socket: socket.socket

    def __init__(
        self,
        connection: Connection | Callable[[], Connection],
        peer: int,
        names: Mapping[int, str],
        on_error: Callable[[PeerLost], None],
    ) -> None:
        self._header = memoryview(bytearray(HEADER.size))
        self._early: dict[int, deque[bytearray]] = {}
        self._early_bytes = 0
        self._counter = 0
        super().__init__(connection, peer, names, on_error)

    def _begin(self, connection: Connection) -> None:
        super()._begin(connection)
        self._opener = Opener(connection.secret, connection.cipher) if connection.sealed else None
        self._sealed = memoryview(bytearray(MAX_FRAME + TAG if connection.sealed else 0))
        self._flags = 0 if isinstance(connection.socket, ssl.SSLSocket) else socket.MSG_WAITALL

    def receive(self, operation: int, into: memoryview) -> int:
        """Wait for the next message of ``operation``; return how many bytes of ``into`` it has.

        Raises:
            PeerLost: the connection ended, or the message is longer.
        """
        if early := self._early.get(operation):
            message = early.popleft()
            if not early:
                del self._early[operation]
            self._early_bytes -= _EARLY_OVERHEAD + len(message)
            if len(message) > len(into):
                raise self._too_long(operation, len(message), len(into))
            into[: len(message)] = message
            return len(message)
        while True:
            coming, length, left = self._read_header()
            if coming == operation:
                break
            self._keep(coming, length, left, operation)
        if length + left > len(into):
            self._take(length, memoryview(bytearray(length)))  # only then is the header known to be the peer's
            raise self._too_long(operation, length + left, len(into))
        self._take(length, into[:length])
        return self._read(operation, length, left, into)

    def _keep(self, operation: int, length: int, left: int, wanted: int) -> None:
        first = memoryview(bytearray(length))
        self._take(length, first)
        self._early_bytes += _EARLY_OVERHEAD + length + left
        if self._early_bytes > MAX_EARLY or operation // MARKS == wanted // MARKS:
            raise self.lost("it is at another operation than this machine")
        message = bytearray(length + left)
        message[:length] = first
        self._read(operation, length, left, memoryview(message))
        self._early.setdefault(operation, deque()).append(message)

    def _read(self, operation: int, length: int, left: int, into: memoryview) -> int:
        """Read the rest of a message whose first frame was read."""
        start = length
        while left:
            expected, (coming, length, left) = left, self._read_header()
            if coming != operation or length + left != expected or not length:
                raise FrameError("the rest of a message is another one's")
            self._take(length, into[start : start + length])
            start += length
        return start

    def _take(self, length: int, part: memoryview) -> None:
        """Read what follows a header."""
        if self._opener is None:
            self._fill(part)
            return
        sealed = self._sealed[: length + TAG]
        self._fill(sealed)
        self._opener.open(self._header, sealed, part)

    def _read_header(self) -> tuple[int, int, int]:
        self._fill(self._header)
        if self._opener is None:
            counter = HEADER.unpack(self._header)[0]
            if counter != self._counter:
                raise FrameError(f"frame {counter} where {self._counter} had to come")
            self._counter += 1
        operation, length, left = parse_header(self._header)
        if operation == FAREWELL and _LAST_WORD.size <= length <= _LAST_WORD.size + _MAX_WHY and not left:
            word = bytearray(length)
            self._take(length, memoryview(word))
            why = word[_LAST_WORD.size :].decode(errors="replace")
            raise self.lost(f"{why} ({self._names[self.peer]} says)", _LAST_WORD.unpack_from(word)[0])
        return operation, length, left

    def _fill(self, into: memoryview) -> None:
        while len(into):
            size = self._socket.recv_into(into, len(into), self._flags)
            if not size:
                raise EOFError("it hung up")
            self.bytes += size
            into = into[size:]

    def _too_long(self, operation: int, size: int, room: int) -> PeerLost:
        return self.lost(f"it sent {size} bytes for operation {operation // MARKS} where {room} belong")
