"""One direction to or from one peer: a connection, and the jobs on it.

Messages of any length follow one another in the order in which they were started. The receiver names the operation
whose message it wants; messages of other operations that arrive first are kept, up to :data:`MAX_EARLY` bytes.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping

from training.exchange.base import ExchangeError
from training.exchange.links.connection import Connection
from training.exchange.links.flow_control import FlowControl
from training.exchange.links.loop import NOTHING, READABLE, WRITABLE, JobQueue, Loop
from training.exchange.links.sealing import HEADER, MAX_FRAME, TAG, FrameError, Opener, Sealer, parse_header

MAX_EARLY = 64 << 20
"""Limit of the bytes of messages that arrived before they were asked for."""
_WAKE = 32 << 10
"""Bytes of a long message that must have arrived before its loop is woken, instead of once for every packet."""
_TURN = 16 << 10
"""Bytes of a frame after which the other links have their turn."""
_REST = 4 << 10
"""Bytes that a frame may have more, where the next one would have no others."""
_EARLY_OVERHEAD = 512
"""Bytes that keeping a message takes besides its contents: empty ones are not free."""
MARKS, OPERATIONS = (1 << 12) - 1, 1 << 20
"""The number on the wire is ``MARKS`` times the operation's count plus a mark of its kind: equal at both ends."""
FAREWELL = 0xFFFFFFFF
"""Operation number of a link's last message: which member its sender has lost, and why."""
_CUT_SECONDS = 1.0
_FAREWELL_HEADER = struct.Struct("<I")
_MAX_WHY = 200


class PeerLost(ExchangeError):
    """The connection to a member ended, or carried something invalid.

    Args:
        hung_up: it ended without anything to show which side caused it.
    """

    def __init__(self, rank: int, name: str, why: str, hung_up: bool = False) -> None:
        super().__init__(f"the connection with {name} is lost: {why}")
        self.rank = rank
        self.why = why
        self.hung_up = hung_up


Ended = Callable[[PeerLost | None], None]


class _Link(JobQueue[PeerLost]):
    """What both directions share.

    Args:
        connection: used only by this link from now on, or a function that makes it for the first job, and holds up the
            whole loop meanwhile.
        peer: rank of the other end; ``names`` are the members' by rank.
        on_error: called when the link fails.
        loop: default: one of its own.
    """

    def __init__(
        self,
        connection: Connection | Callable[[], Connection],
        peer: int,
        names: Mapping[int, str],
        on_error: Callable[[PeerLost], None],
        loop: Loop | None = None,
    ) -> None:
        super().__init__(loop or Loop(f"{type(self).__name__} {peer}"))
        self.peer = peer
        self._names = names
        self.bytes = self.bytes_before = 0
        """Bytes over the connection, with headers and tags, without TLS records; and those before the current job."""
        self._connection = connection
        self._socket: socket.socket | None = None
        self._cut = False
        self._on_error = on_error
        if isinstance(connection, Connection):
            self._begin(connection)
        self.loop.add(self)

    @property
    def socket(self) -> socket.socket | None:
        return self._socket

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def lost(self, why: str, rank: int | None = None, hung_up: bool = False) -> PeerLost:
        """Return the error for the loss of the peer, or of ``rank``."""
        rank = self.peer if rank is None else rank
        return PeerLost(rank, self._names.get(rank, f"rank {rank}"), why, hung_up)

    def cut(self) -> None:
        self._cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                _shut(self._socket, socket.SHUT_RDWR)
        self.loop.wake()

    def close(self, seconds: float) -> None:
        """Let submitted jobs end within ``seconds``, and hang up."""
        self.drain(seconds)
        self.cut()
        self.drain(_CUT_SECONDS)
        with self.loop.stopped(_CUT_SECONDS):
            if self._socket is not None:
                self._socket.close()
        self.loop.start()  # which ends with its last link

    def _prepare(self) -> None:
        self.bytes_before = self.bytes
        if self._cut:
            raise EOFError("it was closed")
        if self._socket is None:
            assert not isinstance(self._connection, Connection)
            self._begin(self._connection())

    def _refused(self) -> PeerLost:
        return self.lost("it was closed")

    def _failed(self, problem: BaseException) -> PeerLost:
        if isinstance(problem, PeerLost):
            lost = problem
        elif isinstance(problem, (ConnectionError, ssl.SSLEOFError)):
            lost = self.lost("it closed the connection", hung_up=True)
        else:
            ended = isinstance(problem, (EOFError, OSError)) and not isinstance(problem, ssl.SSLError)
            lost = self.lost(str(problem) or type(problem).__name__, hung_up=ended)
        if not isinstance(problem, Exception):  # a frame that was begun cannot be ended
            self.cut()
        self._on_error(lost)
        return lost

    def _begin(self, connection: Connection) -> None:
        """Take over the connection."""
        self._socket = connection.socket
        self._socket.setblocking(False)
        if self._cut:
            self.cut()


class Outgoing(_Link):
    """The direction to a peer."""

    _socket: socket.socket
    _counter = 0
    _farewell: PeerLost | None = None

    def say_farewell(self, lost: PeerLost) -> None:
        """Tell the peer which member is lost, after the current message, and send nothing more."""
        self._farewell = lost
        self.submit(lambda link: link.send(FAREWELL, memoryview(b"")), lambda error: None)

    def _begin(self, connection: Connection) -> None:
        super()._begin(connection)
        self._sealer = Sealer(connection.secret, connection.cipher) if connection.sealed else None
        self._flow = FlowControl(connection.socket, connection.round_trip)

    def send(self, operation: int, *buffers: memoryview) -> Iterator[int]:
        """Send one message, the concatenation of ``buffers``."""
        left = sum(map(len, buffers))
        if not left:
            yield from self._send_frame(operation, memoryview(b""), 0)
        for buffer in buffers:
            start = 0
            while start < len(buffer):
                size = self._flow.frame if len(buffer) - start > self._flow.frame + _REST else len(buffer) - start
                frame = buffer[start : start + size]
                start += len(frame)
                left -= len(frame)
                yield from self._send_frame(operation, frame, left)

    def _send_frame(self, operation: int, payload: memoryview, left: int) -> Iterator[int]:
        if (lost := self._farewell) is not None:
            payload = memoryview(_FAREWELL_HEADER.pack(lost.rank) + lost.why.encode()[:_MAX_WHY])
            operation, left = FAREWELL, 0
        if self._sealer is not None:
            pieces = [self._sealer.seal(operation, payload, left)]
        else:
            pieces = [memoryview(HEADER.pack(self._counter, operation, len(payload), left)), payload]
            self._counter += 1
        begin = time.perf_counter()
        for piece in pieces:
            yield from self._write(piece)
        self._flow.note(len(payload), time.perf_counter() - begin)
        if lost is not None:
            self._cut = True  # for later jobs; the peer still reads what was sent
            _shut(self._socket, socket.SHUT_WR)  # and is woken, however many bytes it waits for
            raise lost
        if len(payload) >= _TURN:
            yield NOTHING

    def _write(self, data: memoryview) -> Iterator[int]:
        while len(data):
            try:
                size = self._socket.send(data)
            except (BlockingIOError, ssl.SSLWantWriteError):
                yield WRITABLE
            except ssl.SSLWantReadError:
                yield READABLE
            else:
                self.bytes += size
                data = data[size:]


class Incoming(_Link):
    """The direction from a peer.

    Args:
        believes: whether to accept the peer's report of a lost member; not where a coordinator judges losses.
    """

    _socket: socket.socket

    def __init__(
        self,
        connection: Connection | Callable[[], Connection],
        peer: int,
        names: Mapping[int, str],
        on_error: Callable[[PeerLost], None],
        believes: bool = True,
        loop: Loop | None = None,
    ) -> None:
        self._believes = believes
        self._header = memoryview(bytearray(HEADER.size))
        self._early: dict[int, deque[bytearray]] = {}
        self.early_bytes = 0
        self._counter = 0
        self._outstanding, self._low_watermark = 0, 1
        """Bytes of the current message known to be outstanding, and bytes that must have arrived for a wake-up."""
        super().__init__(connection, peer, names, on_error, loop)

    def _begin(self, connection: Connection) -> None:
        super()._begin(connection)
        self._opener = Opener(connection.secret, connection.cipher) if connection.sealed else None
        self._sealed = memoryview(bytearray(MAX_FRAME + TAG if connection.sealed else 0))
        self._in_tls = isinstance(connection.socket, ssl.SSLSocket)

    def receive(self, operation: int, into: memoryview) -> Generator[int, None, int]:
        """Wait for the next message of ``operation``; return its length in ``into``.

        Raises:
            PeerLost: the connection ended, or the message is longer.
        """
        if early := self._early.get(operation):
            message = early.popleft()
            if not early:
                del self._early[operation]
            self.early_bytes -= _EARLY_OVERHEAD + len(message)
            if len(message) > len(into):
                raise self._too_long(operation, len(message), len(into))
            into[: len(message)] = message
            return len(message)
        while True:
            arriving, length, left = yield from self._read_header()
            if arriving == operation:
                break
            yield from self._keep_early(arriving, length, left, operation)
        if length + left > len(into):
            yield from self._take(length, memoryview(bytearray(length)))  # this authenticates the header
            raise self._too_long(operation, length + left, len(into))
        yield from self._take(length, into[:length])
        return (yield from self._read(operation, length, left, into))

    def _keep_early(self, operation: int, length: int, left: int, awaited: int) -> Iterator[int]:
        first_frame = memoryview(bytearray(length))
        yield from self._take(length, first_frame)
        self.early_bytes += _EARLY_OVERHEAD + length + left
        if self.early_bytes > MAX_EARLY or operation // MARKS == awaited // MARKS:
            raise self.lost("it is doing another operation than this machine")
        message = bytearray(length + left)
        message[:length] = first_frame
        yield from self._read(operation, length, left, memoryview(message))
        self._early.setdefault(operation, deque()).append(message)

    def _read(self, operation: int, length: int, left: int, into: memoryview) -> Generator[int, None, int]:
        """Read the rest of a message after its first frame."""
        start = length
        while left:
            expected, (arriving, length, left) = left, (yield from self._read_header())
            if arriving != operation or length + left != expected or not length:
                raise FrameError("a message was continued by another one")
            yield from self._take(length, into[start : start + length])
            start += length
        return start

    def _take(self, length: int, plaintext: memoryview) -> Iterator[int]:
        """Read the contents of a frame after its header."""
        if self._opener is None:
            yield from self._fill(plaintext)
        else:
            sealed = self._sealed[: length + TAG]
            yield from self._fill(sealed)
            self._opener.open(self._header, sealed, plaintext)
        if length >= _TURN:
            yield NOTHING

    def _read_header(self) -> Generator[int, None, tuple[int, int, int]]:
        yield from self._fill(self._header)
        if self._opener is None:
            counter = HEADER.unpack(self._header)[0]
            if counter != self._counter:
                raise FrameError(f"frame {counter} where {self._counter} had to come")
            self._counter += 1
        operation, length, left = parse_header(self._header)
        self._outstanding = length + left
        if operation == FAREWELL and not self._believes:
            raise FrameError("it left in the middle of an operation")
        if operation == FAREWELL and _FAREWELL_HEADER.size <= length <= _FAREWELL_HEADER.size + _MAX_WHY and not left:
            word = bytearray(length)
            yield from self._take(length, memoryview(word))
            why = word[_FAREWELL_HEADER.size :].decode(errors="replace")
            raise self.lost(f"{why} ({self._names[self.peer]} says)", _FAREWELL_HEADER.unpack_from(word)[0])
        return operation, length, left

    def _fill(self, into: memoryview) -> Iterator[int]:
        while len(into):
            try:
                size = self._socket.recv_into(into)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._set_low_watermark()
                yield READABLE
            except ssl.SSLWantWriteError:
                yield WRITABLE
            else:
                if not size or (self._cut and self._in_tls):  # a closed SSLSocket would go on reading ciphertext
                    raise EOFError("it closed the connection")
                self.bytes += size
                self._outstanding -= size
                into = into[size:]

    def _set_low_watermark(self) -> None:
        """Set how many bytes must arrive for a wake-up: no more than are still to come."""
        many = not self._in_tls and self._outstanding >= 2 * _WAKE and sys.platform == "linux"
        low_watermark = _WAKE if many else 1
        if low_watermark != self._low_watermark:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_watermark)
            self._low_watermark = low_watermark

    def _too_long(self, operation: int, size: int, capacity: int) -> PeerLost:
        return self.lost(f"it sent {size} bytes for operation {operation // MARKS} where {capacity} belong")


def _shut(connection: socket.socket, direction: int) -> None:
    """Shut a connection down; :meth:`ssl.SSLSocket.shutdown` would first let a thread that uses it go on in clear."""
    socket.socket.shutdown(connection, direction)
