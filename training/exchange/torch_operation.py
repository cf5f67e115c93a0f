"""A started exchange of the torch engine and the time it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as futures_wait
from typing import Generic, TypeVar

from training.exchange.base import STANDSTILL, ExchangeTimeout, Traffic, wait_while_moving

V = TypeVar("V")


class Operation(Generic[V]):
    """A started exchange."""

    def __init__(self, future: Future[V], deliver: Callable[[V], V], clock: Clock) -> None:
        self._future = future
        self._deliver = deliver
        self._clock = clock

    def wait(self, timeout: float | None = None) -> V:
        began = time.perf_counter()
        try:
            if timeout is None and not wait_while_moving(self._settled, self._clock.last_move):
                timeout = 0.0
            return self._deliver(self._future.result(timeout))
        except FutureTimeout:
            raise ExchangeTimeout(f"the exchange was not complete within {timeout or STANDSTILL:g} s") from None
        finally:
            self._clock.waited(time.perf_counter() - began)

    def _settled(self, seconds: float) -> bool:
        return bool(futures_wait([self._future], seconds).done)

    def done(self) -> bool:
        return self._future.done()


class Clock:
    """Keeps the seconds of :class:`Traffic`."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._moved = 0.0
        self._bytes = 0

    def last_move(self) -> float:
        """When an exchange began or ended last, or was seen to have gone on, of :func:`time.perf_counter`."""
        with self._lock:
            if self._bytes != self._traffic.bytes_sent:
                self._bytes, self._moved = self._traffic.bytes_sent, time.perf_counter()
            return self._moved

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    def begin(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
            self._moved = time.perf_counter()

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            self._moved = time.perf_counter()
            if self._under_way == 0:
                self._traffic.transfer_seconds += time.perf_counter() - self._since

    def waited(self, seconds: float) -> None:
        self._traffic.wait_seconds += seconds
