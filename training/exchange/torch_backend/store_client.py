"""The rendezvous store's client: a ``torch.distributed.Store`` on our own server (``store_server.py``)."""

from __future__ import annotations

import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from profiles.quantities import span_text
from training.exchange.base import ExchangeError, ExchangeTimeout
from training.exchange.torch_backend.store_server import MAX_LINE, Reply, decode, encode

_ANSWER = 30.0
"""Seconds the server has to answer, in addition to those it was asked to wait for a key."""
_REDIAL_FOR = 60.0
"""Seconds within which a broken connection must be restored: the SSH forward below it may be re-established."""


class MissingKey(ExchangeTimeout, DistStoreError):
    """A key did not come in time; an error as torch's own stores raise it."""


class StoreClient(Store):
    """A :class:`torch.distributed.Store` on our own store server. Thread-safe.

    A broken connection is restored, and the request repeated. A blocking ``get`` or ``wait`` keeps other threads
    waiting: give those a :meth:`clone`.

    Args:
        address: ``host:port`` of the server.
        token: admits members of this run.
        timeout: seconds to wait for the server, and for a key.
        prefix: put before every key.

    Raises:
        ExchangeError: the store cannot be reached, rejects the token, or (:class:`MissingKey`) has no such key in time.
    """

    def __init__(self, address: str, token: str, timeout: float, prefix: str = "") -> None:
        super().__init__()
        self.address = address
        self._token = token
        self._prefix = prefix
        self._seconds = timeout
        self._lock, self._closed = threading.Lock(), False
        self._id, self._numbers = secrets.token_hex(8), itertools.count()
        self._clones: list[StoreClient] = []
        self._dial(timeout)
        self.set_timeout(timedelta(seconds=timeout))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(op="set", key=self._prefix + key, value=encode(value))

    def get(self, key: str) -> bytes:
        return self._get_all([key], self._patience)[0]

    @property
    def _patience(self) -> float:
        """Seconds to wait for a key, which ``set_timeout`` changes, also that of a prefix."""
        return float(self.timeout.total_seconds())  # type: ignore[attr-defined]  # torch's stub lacks it

    def _get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """Wait for all ``keys`` and return their values."""
        reply = self._get(keys, seconds)
        if "missing" in reply:
            missing = ", ".join(key.removeprefix(self._prefix) for key in reply["missing"])
            raise MissingKey(f"the rendezvous store had no {missing} within {span_text(seconds)}")
        return [decode(value) for value in reply["values"]]

    def _get(self, keys: Sequence[str], seconds: float) -> Reply:
        return self._ask(seconds, op="get", keys=[self._prefix + key for key in keys], timeout=seconds)

    def add(self, key: str, amount: int) -> int:
        number = next(self._numbers)  # so that a repeated request is not added twice
        request = {"op": "add", "key": self._prefix + key, "amount": amount, "client": self._id, "number": number}
        return int(self._ask(0.0, **request)["total"])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        reply = self._ask(op="compare_set", key=self._prefix + key, expected=encode(expected), desired=encode(desired))
        return decode(reply["values"][0])

    def check(self, keys: Sequence[str]) -> bool:
        return "missing" not in self._get(keys, 0.0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._get_all(keys, self._patience if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(op="delete", key=self._prefix + key)["deleted"])

    def num_keys(self) -> int:
        return int(self._ask(op="count")["total"])

    deleteKey, getNumKeys = delete_key, num_keys  # their names where torch's C++ calls them, as a PrefixStore does

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> StoreClient:
        """Return a client of the same store on a connection of its own."""
        clone = StoreClient(self.address, self._token, self._seconds, self._prefix)
        self._clones.append(clone)  # torch holds only the C++ half of it
        return clone

    def close(self) -> None:
        """Close the connection, and those of clones. Idempotent."""
        for clone in self._clones:
            clone.close()
        self._closed = True
        self._hang_up()

    def _ask(self, seconds: float = 0.0, **request: Any) -> Reply:
        line = json.dumps(request).encode()
        with self._lock:
            try:
                return self._exchange(line, seconds)
            except ExchangeError:
                if self._closed:
                    raise
            self._hang_up()
            self._dial(min(_REDIAL_FOR, self._seconds))
            return self._exchange(line, seconds)

    def _dial(self, seconds: float) -> None:
        self._socket = _connect(self.address, seconds)
        self._stream = self._socket.makefile("rb")
        try:
            self._exchange(self._token.encode(), seconds)
        except ExchangeError as error:
            self._hang_up()
            raise ExchangeError(f"{error}, or this run's token is not the store's") from error

    def _hang_up(self) -> None:
        self._stream.close()
        self._socket.close()

    def _exchange(self, request: bytes, seconds: float) -> Reply:
        try:
            self._socket.settimeout(seconds + _ANSWER)
            self._socket.sendall(request + b"\n")
            line = self._stream.readline(MAX_LINE)
        except (OSError, ValueError) as error:
            raise ExchangeError(f"the rendezvous store at {self.address} is gone: {error}") from error
        if not line.endswith(b"\n"):
            raise ExchangeError(f"the rendezvous store at {self.address} is gone: the connection was closed")
        reply: Reply = json.loads(line)
        return reply


def _connect(address: str, timeout: float) -> socket.socket:
    """Dial until the store answers or ``timeout`` seconds have passed."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.1, timeout))
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) or time.monotonic() > deadline:
                raise ExchangeError(
                    f"the rendezvous store at {address} cannot be reached: {error}; is the launcher still running?"
                ) from error
            time.sleep(0.05)  # the SSH forward may come up later than this worker
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
