"""How deltas come to all members in one order while everybody goes on training.

A thread of every member takes part in rounds: each says whether a delta waits at its side, and those that wait are
handed to all at the same time, and applied in the order of ranks. The threads are always there, whatever the training
does, so nobody waits for the step of a slower member: only for the way of its own delta, and for what is under way just
then. In a round a member also says whether all are to meet soon.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import Protocol

from training.exchange.base import Exchange, ExchangeError
from training.exchange.broadcast import broadcasts
from training.exchange.codecs import Codec, all_finite, chunk_bounds
from training.exchange.untimed import untimed
from training.lazy import torch

_SAID = struct.Struct("<??d")
_LEAST_PAUSE, _MOST_PAUSE, _SHARE_OF_PAUSE = 0.02, 1.0, 0.01
"""Seconds between two rounds without a delta, and what they are of the time in which a member makes one."""
_MOST_SPEED = 1e9


def believed(speed: float | bytes) -> float:
    """Return the speed, in steps a second, that a member says it has; what can be none is 0: not known."""
    try:
        reported_speed = float(speed)
    except ValueError:
        return 0.0
    return reported_speed if 0.0 <= reported_speed < _MOST_SPEED else 0.0


class Stretch(Protocol):
    """What rounds change. All of it is called by their thread, with :attr:`Rounds.changed` held."""

    @property
    def version(self) -> int:
        """How many deltas were applied."""
        ...

    @property
    def over(self) -> bool:
        """Whether the stretch is at its end."""
        ...

    @property
    def seconds(self) -> float:
        """In which the fastest member makes a delta, as far as that is known."""
        ...

    def asked(self) -> bool:
        """Whether this member is to meet the others soon."""
        ...

    def cut(self) -> None:
        """Some member is: the stretch ends as soon as it can."""
        ...

    def apply(self, rank: int, delta: torch.Tensor | None, speed: float) -> None:
        """Apply the delta of a member, if it can be used; that member has this speed."""
        ...

    def are_there(self, ranks: Collection[int]) -> None:
        """These members have taken part in the round."""
        ...


class DeltaTransport:
    """Deltas as bytes.

    Args:
        elements: of a delta.
        beside: whether deltas come while the training goes on.
    """

    def __init__(self, exchange: Exchange, codec: Codec, elements: int, name: str, in_background: bool) -> None:
        self._in_background = in_background
        self._exchange, self._codec, self._elements, self._name = exchange, codec, elements, name
        self._max_bytes = sum(codec.max_encoded_bytes(stop - start) for start, stop in chunk_bounds(elements))

    def encoded(self, delta: torch.Tensor) -> bytes:
        """Return a delta as it goes to the others; nothing if it has what is no number."""
        if not self._codec.carries(delta):
            return b""
        chunks = (self._codec.encode(delta[start:stop]) for start, stop in chunk_bounds(self._elements))
        return b"".join(chunk.numpy().tobytes() for chunk in chunks)

    def decoded(self, data: bytes) -> torch.Tensor | None:
        """Return the delta, the same bits on all members; ``None`` if it is none."""
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

    def handed_over(self, version: int, data: bytes, sources: Collection[int]) -> dict[int, bytes]:
        """Return the encoded deltas of some members, by rank; all do this together. What did not come whole is not
        there, on any member."""
        start = time.monotonic()
        try:
            return broadcasts(self._exchange, f"{self._name}/{version}", data, sources, self._max_bytes)
        except ExchangeError:  # a lost group is found next
            return {}
        finally:
            if self._in_background:
                self._exchange.traffic.transfer_seconds += time.monotonic() - start


class Rounds:
    """The rounds of one stretch, and the thread that takes part in them.

    Args:
        wire: for the deltas.
        stretch: that they move on.
    """

    def __init__(self, exchange: Exchange, wire: DeltaTransport, stretch: Stretch) -> None:
        self.changed = threading.Condition()
        """Held by whoever looks at what the deltas change."""
        self._exchange, self._wire, self._stretch = exchange, wire, stretch
        self._waiting: tuple[bytes, float] | None = None
        self._error: Exception | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._take_part, name="deltas", daemon=True)
        self._thread.start()

    def give(self, delta: bytes, speed: float) -> bool:
        """Give a delta and wait until it is applied; return whether it was: not if the others are at the end.

        Raises:
            ExchangeError: the exchange cannot go on.
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
        """Wait until all members are at the end of the stretch, or there is ``more`` to do before; return whether it is
        the end.

        Raises:
            ExchangeError: the exchange cannot go on.
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
        except Exception as error:  # noqa: BLE001 - raised again where the training waits
            self._error = error
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def _round(self) -> bool:
        """Take part in one round; return whether it was the last."""
        stretch = self._stretch
        with self.changed:
            if stretch.over:
                return True
            pause = min(max(stretch.seconds * _SHARE_OF_PAUSE, _LEAST_PAUSE), _MOST_PAUSE)
            self.changed.wait_for(lambda: self._waiting is not None, pause)
            pending_delta, asked = self._waiting, stretch.asked()
        payload = _SAID.pack(pending_delta is not None, asked, pending_delta[1] if pending_delta else 0.0)
        payloads = self._exchange.gather("async_diloco/round", payload)
        reports = {rank: _SAID.unpack(one) for rank, one in payloads.items() if len(one) == _SAID.size}
        with self.changed:
            version = stretch.version
            if any(asked for _, asked, _ in reports.values()):
                stretch.cut()
        ranks = sorted(rank for rank, (has_delta, *_) in reports.items() if has_delta)
        encoded_deltas = (
            self._wire.handed_over(version, pending_delta[0] if pending_delta else b"", ranks) if ranks else {}
        )
        for rank in ranks:
            delta = self._wire.decoded(encoded_deltas.pop(rank, b""))
            with self.changed:
                stretch.apply(rank, delta, believed(reports[rank][2]))
                if rank == self._exchange.rank:
                    self._waiting = None
                    self.changed.notify_all()
        with self.changed:
            stretch.are_there(payloads.keys())
            self.changed.notify_all()
        return False


class Stopwatch:
    """How fast a member is: the time of its own steps, without what it waited."""

    def __init__(self) -> None:
        self._seconds, self._steps, self._speed = 0.0, 0, 0.0
        self._since = 0.0

    def start(self) -> None:
        """A step begins now."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """A step has ended; another one begins at once, unless the watch is started again."""
        self._seconds += time.monotonic() - self._since
        self._steps += 1
        self.start()

    @property
    def speed(self) -> float:
        """Steps a second, of those since this was asked last if there were any; 0: not known."""
        if self._seconds:
            self._speed = self._steps / self._seconds
        self._seconds, self._steps = 0.0, 0
        return self._speed
