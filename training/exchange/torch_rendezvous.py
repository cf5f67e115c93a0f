"""How the members of a process group meet: at a store of our own; who is there, which backend fits them, which
connections it made."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from training.exchange.base import ExchangeError
from training.exchange.store_server import MAX_LINE, Reply, decode, encode


@dataclass(frozen=True)
class Introduction:
    """What a member tells the others before they form a group."""

    rank: int
    host: str
    system: str
    """Operating system: gloo's transports of Linux and macOS do not speak to each other."""
    gpu: str
    """Unique id of the CUDA device; empty if the member trains on another device, or has no NCCL."""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def introduce(
    store: StoreClient, rank: int, world_size: int, device: torch.device, timeout: float
) -> list[Introduction]:
    """Tell the others about this member and return everybody, in rank order.

    Raises:
        ExchangeError: somebody did not come within ``timeout`` seconds.
    """
    gpu = ""
    if device.type == "cuda" and dist.is_nccl_available():
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    own = Introduction(rank, socket.gethostname(), platform.system(), gpu)
    store.set(f"member/{rank}", json.dumps(asdict(own)))
    try:
        answers = store.get_all([f"member/{other}" for other in range(world_size)], timeout)
    except StoreTimeout as error:
        ranks = ", ".join(key.rpartition("/")[2] for key in error.missing)
        raise ExchangeError(f"rank {ranks} did not come within {timeout:g} s; see the log of that machine") from error
    return [Introduction(**json.loads(answer)) for answer in answers]


def choose_backend(members: Sequence[Introduction]) -> str:
    """Return ``nccl`` where every member has a CUDA device of its own, else ``gloo``.

    Raises:
        ExchangeError: the members' operating systems differ.
    """
    systems = {member.system: member for member in members}
    if len(systems) > 1:
        who = " and ".join(f"{system} ({member})" for system, member in systems.items())
        raise ExchangeError(f"stock torch cannot join {who} in one group; use engine = hub")
    gpus = {member.gpu for member in members}
    return "nccl" if "" not in gpus and len(gpus) == len(members) else "gloo"


def form_group(
    backend: str, store: StoreClient, rank: int, world_size: int, device: torch.device, interface: str, timeout: float
) -> Links:
    """Initialise ``torch.distributed`` over ``interface`` and return the connections it made.

    Raises:
        ExchangeError: there is no such interface, or the group did not come up.
    """
    _set_environment(backend, interface)
    before = _connections()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
            device_id=device if backend == "nccl" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise ExchangeError(f"the {backend} group did not come up: {first_line(error)}") from error
    return Links(_connections() - before if backend == "gloo" else set())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: torch appends whole stack traces."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _set_environment(backend: str, interface: str) -> None:
    """Name the interface: left to itself gloo looks the host's own name up, and NCCL takes the first it finds."""
    names = [name for _, name in socket.if_nameindex()]
    chosen = interface or ("lo0" if platform.system() == "Darwin" else "lo")
    if chosen not in names:
        raise ExchangeError(f"there is no network interface '{chosen}' on {socket.gethostname()}: {', '.join(names)}")
    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = chosen
        return
    os.environ["NCCL_SOCKET_IFNAME"] = f"={chosen}"
    # A failure is to become an exception in wait(), not the end of the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"


class Links:
    """gloo's connections. gloo cannot abort a collective, but one whose connections are shut down fails at once."""

    def __init__(self, descriptors: set[int]) -> None:
        self._descriptors = descriptors

    def cut(self) -> None:
        """Shut the connections down; only while the group exists, as descriptors are used again afterwards."""
        for descriptor in self._descriptors:
            connection = _socket_of(descriptor)
            if connection is not None:
                with connection, contextlib.suppress(OSError):  # the peer was faster
                    connection.shutdown(socket.SHUT_RDWR)


def _connections() -> set[int]:
    """Return the descriptors of this process's connected TCP sockets."""
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return set()
    return {descriptor for descriptor in descriptors if _is_connected(descriptor)}


def _is_connected(descriptor: int) -> bool:
    connection = _socket_of(descriptor)
    if connection is None:
        return False
    with connection:
        try:
            connection.getpeername()
        except OSError:
            return False
        return connection.family in (socket.AF_INET, socket.AF_INET6)


def _socket_of(descriptor: int) -> socket.socket | None:
    """Return a socket of its own on an open descriptor, ``None`` if it is no socket."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


_ANSWER = 30.0
"""Seconds the server has to answer, besides those that it was asked to wait for a key."""


class StoreClient(Store):
    """A :class:`torch.distributed.Store` on our own store server; safe to use from several threads.

    A blocking ``get`` or ``wait`` keeps other threads waiting: give those a :meth:`clone`.

    Args:
        address: ``host:port`` of the server.
        token: what lets this run's members in.
        timeout: seconds to wait for the server, and for a key.
        prefix: put before every key.

    Raises:
        ExchangeError: the store cannot be reached, does not know the token, or did not have a key in time.
    """

    def __init__(self, address: str, token: str, timeout: float, prefix: str = "") -> None:
        super().__init__()
        self.address = address
        self._token = token
        self._prefix = prefix
        self._seconds = timeout
        self._lock = threading.Lock()
        self._socket = _connect(address, timeout)
        self._stream = self._socket.makefile("rb")
        self._clones: list[StoreClient] = []
        try:
            self._exchange(token.encode(), timeout)
        except ExchangeError as error:
            self.close()
            raise ExchangeError(f"{error}, or this run's token is not the store's") from error
        self.set_timeout(timedelta(seconds=timeout))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(op="set", key=self._prefix + key, value=encode(value))

    def get(self, key: str) -> bytes:
        return self.get_all([key], self._seconds)[0]

    def get_all(self, keys: Sequence[str], seconds: float) -> list[bytes]:
        """Wait for all ``keys`` and return their values."""
        reply = self._ask(seconds, op="get", keys=[self._prefix + key for key in keys], timeout=seconds)
        if "missing" in reply:
            raise StoreTimeout([key.removeprefix(self._prefix) for key in reply["missing"]], seconds)
        return [decode(value) for value in reply["values"]]

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of ``keys`` as they are, ``None`` where there is none."""
        values = self._ask(op="read", keys=[self._prefix + key for key in keys])["values"]
        return [None if value is None else decode(value) for value in values]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(op="add", key=self._prefix + key, amount=amount)["total"])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        reply = self._ask(op="compare_set", key=self._prefix + key, expected=encode(expected), desired=encode(desired))
        return decode(reply["values"][0])

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self.read(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.get_all(keys, self._seconds if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(op="delete", key=self._prefix + key)["deleted"])

    def num_keys(self) -> int:
        return int(self._ask(op="count")["total"])

    def has_extended_api(self) -> bool:
        return False

    def clone(self) -> StoreClient:
        """Return a client of the same store on a connection of its own."""
        clone = StoreClient(self.address, self._token, self._seconds, self._prefix)
        self._clones.append(clone)  # torch holds only the C++ half of it
        return clone

    def close(self) -> None:
        """Hang up, clones included. Idempotent."""
        for clone in self._clones:
            clone.close()
        self._stream.close()
        self._socket.close()

    def _ask(self, seconds: float = 0.0, **request: Any) -> Reply:
        return self._exchange(json.dumps(request).encode(), seconds)

    def _exchange(self, request: bytes, seconds: float) -> Reply:
        with self._lock:
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


class StoreTimeout(ExchangeError):
    """Keys did not appear in time."""

    def __init__(self, missing: list[str], seconds: float) -> None:
        super().__init__(f"the rendezvous store had no {', '.join(missing)} within {seconds:g} s")
        self.missing = missing


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
            time.sleep(0.05)  # the forward to it may come up a little later than this worker
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
