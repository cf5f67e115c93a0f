"""A started exchange of the torch engine and the time it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from training.exchange.base import ExchangeTimeout, Traffic

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
            return self._deliver(self._future.result(timeout))
        except FutureTimeout:
            raise ExchangeTimeout(f"the exchange was not complete within {timeout:g} s") from None
        finally:
            self._clock.waited(time.perf_counter() - began)

    def done(self) -> bool:
        return self._future.done()


class Clock:
    """Keeps the seconds of :class:`Traffic`."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    def begin(self) -> None:
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1

    def end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._traffic.transfer_seconds += time.perf_counter() - self._since

    def waited(self, seconds: float) -> None:
        self._traffic.wait_seconds += seconds
