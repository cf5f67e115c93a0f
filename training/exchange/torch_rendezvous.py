"""How the members of a process group meet: at a store of our own; who is there, which backend fits them, which
connections it made."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from training.exchange.base import ExchangeError
from training.exchange.store_client import StoreClient, StoreTimeout


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
        raise ExchangeError(f"stock torch cannot join {who} in one group; use engine = mesh")
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
