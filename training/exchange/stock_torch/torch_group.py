"""A process group of stock torch in addition to a mesh: NCCL if every member has a CUDA device of its own, else gloo.

It lives and ends with its mesh. Its members connect over the links of the mesh, encrypted: torch's store operations go
over them, so there is no second rendezvous and no second detection of lost members. When a link ends, or the
coordinator gives the mesh up, the group is aborted, and the next mesh has another one.

Operations end in the order in which they were begun, those on the links included: which results some members have
is known by the number of the last one (:class:`~training.exchange.mean.operation_log.OperationLog`).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions

from profiles.quantities import span_text
from training.exchange.base import STANDSTILL, ExchangeError
from training.exchange.links.dialling import interface_at
from training.exchange.links.link import PeerLost
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.transfer import Done
from training.exchange.stock_torch.mesh_store import FORM_SECONDS, MeshStore

_POLL_SECONDS = 0.02
"""Seconds between two checks, while a group forms, that its mesh still stands."""
_VERDICT_SECONDS = 2.0
"""Seconds that a failed exchange waits for the links to show which member is at fault."""
_CLOSE_SECONDS = 5.0
_GLOO_SECONDS, _NCCL_SECONDS = 2 * FORM_SECONDS, 60.0
"""Seconds for the members to exchange keys and for gloo to come up, or NCCL."""
_UNUSED_TAG = 1 << 20
"""Tag of a message that is never sent."""


class UnusableMember(ExchangeError):
    """This member cannot be part of any group."""


class NcclFailed(ExchangeError):
    """NCCL does not come up here."""


def choose_backend(mesh: Mesh, reports: Mapping[int, Mapping[str, str]]) -> str:
    """Return ``nccl`` if every member has a CUDA device of its own, else ``gloo``.

    Args:
        reports: by rank: its ``system``, and the unique id of its ``gpu``, empty without one or without NCCL.

    Raises:
        PeerLost: a member has another operating system than the first.
        UnusableMember: this member has.
    """
    first_system = reports[mesh.members[0]].get("system")
    for rank in mesh.members:
        if (system := reports[rank].get("system")) != first_system:  # gloo's transports of Linux and macOS do not meet
            why = f"stock torch cannot join {first_system} and {system} in one group; use engine = mesh"
            raise UnusableMember(why) if rank == mesh.rank else PeerLost(rank, mesh.names[rank], why)
    gpus = {report.get("gpu", "") for report in reports.values()}
    return "nccl" if "" not in gpus and len(gpus) == len(reports) else "gloo"


@dataclass(frozen=True)
class PendingFrames:
    """Frames in flight."""

    work: Any
    received: torch.Tensor
    sizes: list[int]

    def wait(self) -> list[torch.Tensor]:
        """Return one frame of every peer, in rank order.

        Raises:
            RuntimeError: a peer is gone, or the group was aborted.
        """
        if self.work is not None:
            self.work.wait()
        return list(torch.split(self.received, self.sizes)) if self.sizes else []


class TorchGroup:
    """The group of one mesh, and the only thread that uses it.

    All transfers are ``all_to_all`` with unequal splits: the one collective that both gloo and NCCL carry out without
    copies of their own, and with exactly the given bytes on the wire.

    Args:
        mesh: nothing else may be in flight on it until :meth:`wait_formed` returns.
        interface: network interface that reaches the others; empty for the one that the mesh uses.
    """

    def __init__(self, mesh: Mesh, device: torch.device, interface: str) -> None:
        self.mesh = mesh
        self.group_rank = mesh.members.index(mesh.rank)
        self.device = torch.device("cpu")
        """The device on which frames have to be."""
        self.backend = ""
        self.bytes_sent = self.bytes_received = 0
        self._member_device, self._interface = device, interface
        self._group: Any = None
        self._store: MeshStore | None = None
        self._problem: Exception | None = None
        self._formed, self._ended = threading.Event(), threading.Event()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="torch group", daemon=True)
        self._thread.start()

    def wait_formed(self) -> None:
        """Return when the group is formed.

        Raises:
            NcclFailed: it is a group of NCCL, and does not come up.
            ExchangeError: it does not come up, or its mesh has ended.
        """
        begun = time.monotonic()
        while not self._formed.wait(_POLL_SECONDS):
            if self.mesh.lost is not None:  # torch would keep trying for a while
                raise self.mesh.lost
            seconds, error = (_NCCL_SECONDS, NcclFailed) if self.backend == "nccl" else (_GLOO_SECONDS, ExchangeError)
            if time.monotonic() > begun + seconds:
                raise error(f"the process group did not come up within {span_text(seconds)}{self._missing_reports()}")
        if self._problem is not None:
            raise self.mesh.lost or self._problem

    def carry_out(self, task: Callable[[], None], on_done: Done) -> None:
        """Run ``task`` in the group's thread after everything begun before; ``on_done`` is called there at its end."""

        def run() -> None:
            problem: Exception | None = None
            try:
                task()
                if self.device.type == "cuda":  # where what was aborted seems to have come to its end
                    torch.cuda.current_stream(self.device).synchronize()
                    if self._ended.is_set():
                        raise RuntimeError("the group was broken off")
            except Exception as error:  # noqa: BLE001 - after any error the mesh must end on all members
                problem = error
                self._blame(error)
            on_done(problem)

        self._tasks.put(run)

    def in_turn(self, on_done: Done) -> Done:
        """Return a callback for the end of an operation; ``on_done`` is called once all operations before it have
        ended."""
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._tasks.put(lambda: on_done(ended.get()))
        return ended.put

    def exchange(self, frames: Sequence[torch.Tensor], receive: Sequence[int]) -> PendingFrames:
        """Start to send one frame to every peer and to receive one of ``receive`` bytes from each, in rank order."""
        if not frames:
            return PendingFrames(None, torch.empty(0, dtype=torch.uint8), [])
        data = torch.cat(list(frames)) if len(frames) != 1 else frames[0]
        received = torch.empty(sum(receive), dtype=torch.uint8, device=self.device)
        send = [frame.numel() for frame in frames]
        options = AllToAllOptions()
        options.timeout = timedelta(seconds=STANDSTILL)
        work = self._group.alltoall_base(received, data, self._splits(receive), self._splits(send), options)
        self.bytes_sent += sum(send)
        self.bytes_received += sum(receive)
        return PendingFrames(work, received, list(receive))

    def abandon(self) -> None:
        """End all operations; returns at once, callable from any thread. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._tasks.put(None)
        threading.Thread(target=self._abort, name="torch abort", daemon=True).start()

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Let operations that were begun end within ``seconds``."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        if self._thread.is_alive():
            self.abandon()

    def _splits(self, sizes: Sequence[int]) -> list[int]:
        return [*sizes[: self.group_rank], 0, *sizes[self.group_rank :]]

    def _work(self) -> None:
        try:
            if self.mesh.peers:
                self._form()
            if self.device.type == "cuda":
                # A stream of its own, or the exchange would queue behind the training's kernels.
                torch.cuda.set_device(self.device)
                torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]  # torch's
        except ExchangeError as error:
            self._problem = error
        except Exception as error:  # noqa: BLE001 - raised where the group is waited for
            self._problem = self._explain(error)
        self._formed.set()
        while (task := self._tasks.get()) is not None:
            task()
            del task  # it holds tensors of its operation, and the next may take long to arrive
        self._group = None

    def _explain(self, error: Exception) -> Exception:
        """Return why the group does not come up: a lost member, if there is one, rather than torch's message."""
        self._ended.wait(_VERDICT_SECONDS)
        if self._store is not None and self._store.problem is not None:
            return self._store.problem
        kind = NcclFailed if self.backend == "nccl" else ExchangeError
        return kind(f"the {self.backend} group did not come up: {first_line(error)}")

    def _missing_reports(self) -> str:
        """Return a text that names members that have not reported; empty if all have."""
        store, names = self._store, self.mesh.names
        missing = [names[rank] for rank in self.mesh.members if store is not None and not store.check([_key(rank)])]
        return f": {', '.join(missing)} said nothing" if missing else ""

    def _form(self) -> None:
        store = self._store = MeshStore(self.mesh)  # torch holds only the C++ half of it
        gpu = ""
        if self._member_device.type == "cuda" and dist.is_nccl_available():
            gpu = str(torch.cuda.get_device_properties(self._member_device).uuid)
        store.set(_key(self.mesh.rank), json.dumps({"system": platform.system(), "gpu": gpu}))
        size = len(self.mesh.members)
        reports = {rank: json.loads(store.get(_key(rank))) for rank in self.mesh.members}
        self.backend = choose_backend(self.mesh, reports)
        _set_environment(self.backend, self._interface or _mesh_interface(self.mesh))
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=STANDSTILL)
            self.device = self._member_device
            torch.cuda.set_device(self.device)
            self._group = dist.ProcessGroupNCCL(store, self.group_rank, size, options)
            # NCCL connects in its first operation, while the store is in use.
            self.exchange([torch.zeros(1, dtype=torch.uint8, device=self.device)] * (size - 1), [1] * (size - 1)).wait()
        else:
            self._group = dist.ProcessGroupGloo(store, self.group_rank, size, timedelta(seconds=FORM_SECONDS))
        store.settle()

    def _blame(self, error: Exception) -> None:
        """End the mesh after a failure. torch does not tell which member is at fault; the links do."""
        if isinstance(error, RuntimeError):
            self._ended.wait(_VERDICT_SECONDS)
        lost = PeerLost(self.mesh.rank, self.mesh.names[self.mesh.rank], first_line(error))
        self.mesh.break_off(error if isinstance(error, PeerLost) else lost)

    def _abort(self) -> None:
        group = self._group
        if group is not None and self.backend == "nccl":
            group.abort()
        elif group is not None:
            # gloo cannot abort, but closes all its connections when one message times out. From a peer that is gone
            # a receive fails at once, and closes no other connection.
            for peer in {*range(len(self.mesh.members))} - {self.group_rank}:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class TorchMesh(Mesh):
    """A mesh with a process group of stock torch."""

    group: TorchGroup | None = None

    def open(self, device: torch.device, interface: str) -> TorchGroup:
        """Form the group; see :class:`TorchGroup`."""
        group = TorchGroup(self, device, interface)
        try:
            group.wait_formed()
        except ExchangeError:
            group.abandon()
            raise
        self.group = group
        if self.lost is not None:  # lost before the group was attached
            group.abandon()
        return group

    @property
    def bytes_sent(self) -> int:
        return super().bytes_sent + (self.group.bytes_sent if self.group is not None else 0)

    @property
    def bytes_received(self) -> int:
        return super().bytes_received + (self.group.bytes_received if self.group is not None else 0)

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        if self.group is not None:
            self.group.close(seconds)
        super().close(seconds)

    def _in_turn(self, on_done: Done | None) -> Done | None:
        return on_done if self.group is None or on_done is None else self.group.in_turn(on_done)

    def _cut(self) -> None:
        super()._cut()
        if self.group is not None:
            self.group.abandon()


def _key(rank: int) -> str:
    """Return the store's key under which a member reports."""
    return f"member/{rank}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text: torch appends whole stack traces."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _mesh_interface(mesh: Mesh) -> str:
    """Return the interface over which the mesh reaches most other members."""
    local_addresses = Counter(link.socket.getsockname()[0] for link in mesh.links() if link.socket is not None)
    near = next((host for host, _ in local_addresses.most_common() if not host.startswith("127.")), "127.0.0.1")
    return interface_at(near)


def _set_environment(backend: str, interface: str) -> None:
    """Set the interface: by default gloo looks up the host's own name, and NCCL takes the first it finds."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        available = f"{socket.gethostname()}: {', '.join(names)}"
        raise UnusableMember(f"there is no network interface '{interface}' on {available}")
    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        return
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    # A failure is to become an exception in wait(), not the end of the process.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
