"""Delivery of deltas to all members in one order, while all continue training.

A background thread of every member takes part in rounds: each member reports whether it has a delta; those deltas are
broadcast at the same time and applied in rank order. The threads run independently of the training, so no member waits
for the step of a slower one, only for the transfer of its own delta and of those in flight at that time. In a round a
member also reports whether it requests a meeting.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from training.exchange.base import Exchange, ExchangeError
from training.exchange.codecs import Codec, all_finite, chunk_bounds
from training.exchange.mean.broadcast import broadcasts
from training.exchange.untimed import untimed
from training.lazy import torch

_REPORT = struct.Struct("<??d")
_MIN_PAUSE, _MAX_PAUSE, _PAUSE_SHARE = 0.02, 1.0, 0.01
"""Seconds between two rounds without a delta, and their share of the time in which a member makes a delta."""
_MAX_SPEED = 1e9


def parse_speed(speed: float | bytes) -> float:
    """Return a reported speed in steps a second; 0 (not known) if it is malformed or out of range."""
    try:
        reported_speed = float(speed)
    except ValueError:
        return 0.0
    return reported_speed if 0.0 <= reported_speed < _MAX_SPEED else 0.0


class AsyncSegment(Protocol):
    """What rounds act on. The thread of :class:`Rounds` calls it, holding :attr:`Rounds.changed`."""

    @property
    def version(self) -> int:
        """Number of deltas that were applied."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the segment is over."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds in which the fastest member makes a delta; 0: not known."""
        ...

    def requests_meeting(self) -> bool:
        """Return whether this member requests a meeting."""
        ...

    def end_early(self) -> None:
        """A member requested a meeting: end the segment as early as possible."""
        ...

    def apply(self, rank: int, delta: torch.Tensor | None, speed: float) -> None:
        """Apply a member's delta (``None``: unusable), and note its speed."""
        ...

    def note_members(self, ranks: Collection[int]) -> None:
        """Called after a round with the ranks that took part."""
        ...


class DeltaTransport:
    """Encodes and broadcasts deltas.

    Args:
        elements: of a delta.
        name: prefix of the operations on the wire.
        in_background: whether deltas are sent while the training continues.
    """

    def __init__(self, exchange: Exchange, codec: Codec, elements: int, name: str, in_background: bool) -> None:
        self._in_background = in_background
        self._exchange, self._codec, self._elements, self._name = exchange, codec, elements, name
        self._max_bytes = sum(codec.max_encoded_bytes(stop - start) for start, stop in chunk_bounds(elements))

    def encoded(self, delta: torch.Tensor) -> bytes:
        """Return the encoded delta; empty if it is not finite."""
        if not self._codec.carries(delta):
            return b""
        chunks = (self._codec.encode(delta[start:stop]) for start, stop in chunk_bounds(self._elements))
        return b"".join(chunk.numpy().tobytes() for chunk in chunks)

    def decoded(self, data: bytes) -> torch.Tensor | None:
        """Return the decoded delta, with the same bits on all members; ``None`` if it is invalid."""
        delta, offset = torch.empty(self._elements), 0
        try:
            for start, stop in chunk_bounds(self._elements):
                size = self._codec.max_encoded_bytes(stop - start)
                chunk = torch.frombuffer(bytearray(data[offset : offset + size]), dtype=torch.uint8)
                delta[start:stop] = self._codec.decode(chunk, stop - start)
                offset += size
        except ValueError:
            return None
        return delta if offset == len(data) and all_finite(delta) else None

    def broadcast_deltas(self, version: int, data: bytes, sources: Collection[int]) -> dict[int, bytes]:
        """Broadcast the encoded deltas of some members; return them by rank, without incomplete ones.

        A collective: all members call it together, and all get the same.
        """
        start = time.monotonic()
        try:
            return broadcasts(self._exchange, f"{self._name}/{version}", data, sources, self._max_bytes)
        except ExchangeError:  # the next operation finds a lost group
            return {}
        finally:
            if self._in_background:
                self._exchange.traffic.transfer_seconds += time.monotonic() - start


class Rounds:
    """The rounds of one segment, and the thread that takes part in them.

    Args:
        wire: transports the deltas.
        segment: the segment that they advance.
    """

    def __init__(self, exchange: Exchange, wire: DeltaTransport, segment: AsyncSegment) -> None:
        self.changed = threading.Condition()
        """Held to access what the deltas change."""
        self._exchange, self._wire, self._segment = exchange, wire, segment
        self._waiting: tuple[bytes, float] | None = None
        self._error: Exception | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._take_part, name="deltas", daemon=True)
        self._thread.start()

    def submit(self, delta: bytes, speed: float) -> bool:
        """Submit a delta and wait until it is applied; return ``False`` if the segment ended before.

        Raises:
            ExchangeError: the exchange failed.
        """
        with self.changed:
            if not self._ended:
                self._waiting = delta, speed
                self.changed.notify_all()
                self.changed.wait_for(lambda: self._waiting is None or self._ended)
            applied, self._waiting = self._waiting is None and not self._error, None
        self._check()
        return applied

    def wait_for_end(self, has_work: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the segment is over, or this member has work again; return whether it is over.

        Args:
            has_work: returns whether this member was assigned work of a lost one.

        Raises:
            ExchangeError: the exchange failed.
        """
        with self.changed:
            self.changed.wait_for(lambda: self._ended or has_work())
            if has_work() and not self._ended:
                return False
        self._thread.join()
        self._check()
        return True

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _take_part(self) -> None:
        try:
            with untimed():
                while not self._round():
                    pass
        except Exception as error:  # noqa: BLE001 - raised again in the training thread
            self._error = error
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def _round(self) -> bool:
        """Take part in one round; return whether the segment is over."""
        segment = self._segment
        with self.changed:
            if segment.is_over:
                return True
            pause = min(max(segment.seconds * _PAUSE_SHARE, _MIN_PAUSE), _MAX_PAUSE)
            self.changed.wait_for(lambda: self._waiting is not None, pause)
            pending_delta, asked = self._waiting, segment.requests_meeting()
        payload = _REPORT.pack(pending_delta is not None, asked, pending_delta[1] if pending_delta else 0.0)
        payloads = self._exchange.gather("async_diloco/round", payload)
        reports = {rank: _REPORT.unpack(data) for rank, data in payloads.items() if len(data) == _REPORT.size}
        with self.changed:
            version = segment.version
            if any(asked for _, asked, _ in reports.values()):
                segment.end_early()
        ranks = sorted(rank for rank, (has_delta, *_) in reports.items() if has_delta)
        encoded_deltas = (
            self._wire.broadcast_deltas(version, pending_delta[0] if pending_delta else b"", ranks) if ranks else {}
        )
        for rank in ranks:
            delta = self._wire.decoded(encoded_deltas.pop(rank, b""))
            with self.changed:
                segment.apply(rank, delta, parse_speed(reports[rank][2]))
                if rank == self._exchange.rank:
                    self._waiting = None
                    self.changed.notify_all()
        with self.changed:
            segment.note_members(payloads.keys())
            self.changed.notify_all()
        return False


class Stopwatch:
    """Measures a member's speed: the time of its own steps, without waiting."""

    def __init__(self) -> None:
        self._seconds, self._steps, self._speed = 0.0, 0, 0.0
        self._since = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """End a step; the next one begins at once unless :meth:`start` is called."""
        self._seconds += time.monotonic() - self._since
        self._steps += 1
        self.start()

    @property
    def speed(self) -> float:
        """Steps a second since the last access, or the value of then if there were none; 0: not known."""
        if self._seconds:
            self._speed = self._steps / self._seconds
        self._seconds, self._steps = 0.0, 0
        return self._speed
