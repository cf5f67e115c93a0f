"""One direction to or from one peer: a connection, and the thread that serves it.

Messages of any length follow one another in the order in which they were started. The receiver names the operation
whose message it wants; messages of other operations that arrive first are kept, up to :data:`MAX_EARLY` bytes.
"""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from training.exchange.base import ExchangeError
from training.exchange.links.connection import Connection
from training.exchange.links.flow_control import FlowControl
from training.exchange.links.sealing import HEADER, MAX_FRAME, TAG, FrameError, Opener, Sealer, parse_header

MAX_EARLY = 64 << 20
"""Limit of the bytes of messages that arrived before they were asked for."""
_WAKE = 32 << 10
"""Bytes of a long message that must have arrived before its thread is woken, instead of once for every packet."""
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


Job = Callable[[Any], None]
"""Work on a link, which is its argument."""
Ended = Callable[[PeerLost | None], None]


class _Link:
    """What both directions share.

    Args:
        connection: used only by this link from now on, or a function that makes it for the first job.
        peer: rank of the other end; ``names`` are the members' by rank.
        on_error: called when the link fails.
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
        """Bytes over the connection, with headers and tags, without TLS records; and those before the current job."""
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
        """Run ``job`` after those submitted before; ``done`` is called at its end."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._pending += 1
                self._jobs.put((job, done))
        if closed:
            done(self.lost("it was closed"))

    def try_now(self, job: Job) -> bool:
        """Run a small job in the calling thread if the link is idle; return whether it was.

        Raises:
            PeerLost: the job failed.
        """
        with self._lock:
            if self._pending or self._closed:
                return False
            self._pending = 1
            self._turn.acquire()
        try:  # without the lock: on a loss, here or elsewhere, a farewell is submitted
            error = self._carry_out(job)
        except BaseException:  # Ctrl-C in the middle of a frame
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

    def lost(self, why: str, rank: int | None = None, hung_up: bool = False) -> PeerLost:
        """Return the error for the loss of the peer, or of ``rank``."""
        rank = self.peer if rank is None else rank
        return PeerLost(rank, self._names.get(rank, f"rank {rank}"), why, hung_up)

    def cut(self) -> None:
        """End the connection; jobs in progress fail."""
        self._cut = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                _shut(self._socket, socket.SHUT_RDWR)

    def close(self, seconds: float) -> None:
        """Let submitted jobs end within ``seconds``, and hang up."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        in_own_thread = threading.current_thread() is self._thread
        if not in_own_thread:
            self._thread.join(seconds)
        self.cut()
        free = in_own_thread or self._turn.acquire(timeout=_CUT_SECONDS)  # a job in another thread has noticed the cut
        if self._socket is not None:
            self._socket.close()
        if free and not in_own_thread:
            self._turn.release()

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            with self._turn:
                error = self._carry_out(job)
            del item, job  # it holds buffers that may be reused once `done` is called
            with self._lock:
                self._pending -= 1
            done(error)
            del done  # the next may be long in coming

    def _carry_out(self, job: Job) -> PeerLost | None:
        self.bytes_before = self.bytes
        try:
            if self._cut:
                raise EOFError("it was closed")
            if self._socket is None:
                assert not isinstance(self._connection, Connection)
                self._begin(self._connection())
            job(self)
        except PeerLost as error:
            lost = error
        except (ConnectionError, ssl.SSLEOFError):
            lost = self.lost("it closed the connection", hung_up=True)
        except Exception as error:  # noqa: BLE001 - a link whose thread ends silently would hang the run
            ended = isinstance(error, (EOFError, OSError)) and not isinstance(error, ssl.SSLError)
            lost = self.lost(str(error) or type(error).__name__, hung_up=ended)
        else:
            return None
        self._on_error(lost)
        return lost

    def _begin(self, connection: Connection) -> None:
        """Take over the connection."""
        self._socket = connection.socket
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

    def send(self, operation: int, *buffers: memoryview) -> None:
        """Send one message, the concatenation of ``buffers``."""
        left = sum(map(len, buffers))
        if not left:
            self._send_frame(operation, memoryview(b""), 0)
        for buffer in buffers:
            start = 0
            while start < len(buffer):
                frame = buffer[start : start + self._flow.frame]
                start += len(frame)
                left -= len(frame)
                self._send_frame(operation, frame, left)

    def _send_frame(self, operation: int, payload: memoryview, left: int) -> None:
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
            self._socket.sendall(piece)
        self._flow.note(len(payload), time.perf_counter() - begin)
        self.bytes += sum(map(len, pieces))
        if lost is not None:
            self._cut = True  # for later jobs; the peer still reads what was sent
            _shut(self._socket, socket.SHUT_WR)  # and is woken, however many bytes it waits for
            raise lost


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
    ) -> None:
        self._believes = believes
        self._header = memoryview(bytearray(HEADER.size))
        self._early: dict[int, deque[bytearray]] = {}
        self.early_bytes = 0
        self._counter = 0
        self._outstanding, self._low_watermark = 0, 1
        """Bytes of the current message known to be outstanding, and bytes that must have arrived for a wake-up."""
        self._poll: select.poll | None = None
        super().__init__(connection, peer, names, on_error)

    def _begin(self, connection: Connection) -> None:
        super()._begin(connection)
        self._opener = Opener(connection.secret, connection.cipher) if connection.sealed else None
        self._sealed = memoryview(bytearray(MAX_FRAME + TAG if connection.sealed else 0))
        self._flags = 0 if isinstance(connection.socket, ssl.SSLSocket) else socket.MSG_WAITALL

    def wait_readable(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether there is something to receive, or the connection has ended."""
        if self._early or self._socket is None:
            return True
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        if self._poll is None:
            poll = select.poll()
            try:
                poll.register(self._socket, select.POLLIN)
            except ValueError:  # closed by another thread: the group has ended
                return True
            self._poll = poll
        return bool(self._poll.poll(1000.0 * seconds))

    def receive(self, operation: int, into: memoryview) -> int:
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
            arriving, length, left = self._read_header()
            if arriving == operation:
                break
            self._keep_early(arriving, length, left, operation)
        if length + left > len(into):
            self._take(length, memoryview(bytearray(length)))  # this authenticates the header
            raise self._too_long(operation, length + left, len(into))
        self._take(length, into[:length])
        return self._read(operation, length, left, into)

    def _keep_early(self, operation: int, length: int, left: int, awaited: int) -> None:
        first_frame = memoryview(bytearray(length))
        self._take(length, first_frame)
        self.early_bytes += _EARLY_OVERHEAD + length + left
        if self.early_bytes > MAX_EARLY or operation // MARKS == awaited // MARKS:
            raise self.lost("it is doing another operation than this machine")
        message = bytearray(length + left)
        message[:length] = first_frame
        self._read(operation, length, left, memoryview(message))
        self._early.setdefault(operation, deque()).append(message)

    def _read(self, operation: int, length: int, left: int, into: memoryview) -> int:
        """Read the rest of a message after its first frame."""
        start = length
        while left:
            expected, (arriving, length, left) = left, self._read_header()
            if arriving != operation or length + left != expected or not length:
                raise FrameError("a message was continued by another one")
            self._take(length, into[start : start + length])
            start += length
        return start

    def _take(self, length: int, plaintext: memoryview) -> None:
        """Read the contents of a frame after its header."""
        if self._opener is None:
            self._fill(plaintext)
            return
        sealed = self._sealed[: length + TAG]
        self._fill(sealed)
        self._opener.open(self._header, sealed, plaintext)

    def _read_header(self) -> tuple[int, int, int]:
        self._fill(self._header)
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
            self._take(length, memoryview(word))
            why = word[_FAREWELL_HEADER.size :].decode(errors="replace")
            raise self.lost(f"{why} ({self._names[self.peer]} says)", _FAREWELL_HEADER.unpack_from(word)[0])
        return operation, length, left

    def _fill(self, into: memoryview) -> None:
        while len(into):
            low_watermark = _WAKE if self._flags and self._outstanding >= 2 * _WAKE and sys.platform == "linux" else 1
            if low_watermark != self._low_watermark:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_watermark)
                self._low_watermark = low_watermark
            chunk = (
                into if low_watermark == 1 else into[:_WAKE]
            )  # some of it may be there: at least as much is still to come
            size = self._socket.recv_into(chunk, len(chunk), self._flags)
            if not size or (self._cut and not self._flags):  # a closed SSLSocket would go on reading ciphertext
                raise EOFError("it closed the connection")
            self.bytes += size
            self._outstanding -= size
            into = into[size:]

    def _too_long(self, operation: int, size: int, capacity: int) -> PeerLost:
        return self.lost(f"it sent {size} bytes for operation {operation // MARKS} where {capacity} belong")


def _shut(connection: socket.socket, direction: int) -> None:
    """Shut a connection down; :meth:`ssl.SSLSocket.shutdown` would first let a thread that uses it go on in clear."""
    socket.socket.shutdown(connection, direction)
