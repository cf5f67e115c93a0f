"""Operations that a member has started, and the account of what they cost: for both engines."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from training.exchange.base import STANDSTILL, ExchangeError, ExchangeTimeout, Traffic

R = TypeVar("R")
_SLICE = 30.0


class Meter:
    """Keeps one :class:`Traffic`; safe to use from several threads."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._moved = 0.0

    def sent(self, size: int) -> None:
        with self._lock:
            self.traffic.bytes_sent += size
            self._moved = time.perf_counter()

    def received(self, size: int) -> None:
        with self._lock:
            self.traffic.bytes_received += size
            self._moved = time.perf_counter()

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return self._under_way > 0

    def wait(self, settled: Callable[[float], bool]) -> bool:
        """Wait until ``settled(seconds)`` is true, or nothing has moved for :data:`STANDSTILL` seconds."""
        began = time.perf_counter()
        while not settled(_SLICE):
            if time.perf_counter() - max(began, self._moved) > STANDSTILL:
                return False
        return True

    def waited(self, seconds: float) -> None:
        with self._lock:
            self.traffic.wait_seconds += seconds
            self._settle()

    def begin(self) -> None:
        """An operation starts."""
        with self._lock:
            self._settle()
            self._under_way += 1
            self._moved = self._since

    def end(self) -> None:
        """An operation has its result, or failed."""
        with self._lock:
            self._settle()
            self._under_way -= 1
            self._moved = self._since

    def _settle(self) -> None:
        now = time.perf_counter()
        if self._under_way:
            self.traffic.transfer_seconds += now - self._since
        self._since = now


class Operation(ABC, Generic[R]):
    """A started operation: waiting, failing and finishing."""

    def __init__(self, name: str, meter: Meter) -> None:
        self.name = name
        self._meter = meter
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._error: ExchangeError | None = None
        meter.begin()

    def wait(self, timeout: float | None = None) -> R:
        """Block until the result is there; see :class:`training.exchange.base.Pending`."""
        if not self._settled.is_set():
            start = time.perf_counter()
            there = self._meter.wait(self._settled.wait) if timeout is None else self._settled.wait(timeout)
            self._meter.waited(time.perf_counter() - start)
            if not there:
                raise ExchangeTimeout(f"exchange {self.name} was not done within {timeout or STANDSTILL:g} s")
        if self._error is not None:
            raise type(self._error)(str(self._error))
        return self._result()

    def done(self) -> bool:
        return self._settled.is_set()

    def finish(self, error: ExchangeError | str = "") -> None:
        """Let :meth:`wait` return the result, or raise ``error``; the first end counts."""
        with self._lock:
            if self._settled.is_set():
                return
            self._error = ExchangeError(error) if error and isinstance(error, str) else error or None
            self._settled.set()
        self._meter.end()

    @abstractmethod
    def _result(self) -> R: ...
