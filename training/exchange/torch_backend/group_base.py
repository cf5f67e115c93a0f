"""Base of the ``torch.distributed`` process group, without its collectives: members, links, point-to-point messages."""

# mypy: disable-error-code="override,assignment"
# torch declares each collective in two forms and calls the one that is here.

from __future__ import annotations

import atexit
import json
import os
import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, Store

from profiles.quantities import span_text
from training.exchange.base import ExchangeError, ExchangeTimeout
from training.exchange.group.join_config import parse_endpoint
from training.exchange.links.link import MARKS, OPERATIONS, Incoming, Outgoing, PeerLost
from training.exchange.links.listener import Address, Listener
from training.exchange.mean.mesh import Mesh
from training.exchange.torch_backend.arguments import (
    InvalidArgument,
    check_dense,
    check_single,
    check_writable,
)
from training.exchange.torch_backend.memory_order import Use, in_use
from training.exchange.torch_backend.point_to_point import PointToPointLinks
from training.exchange.torch_backend.tensor_operations import Pieces, names, on_host, receive_buffer, view
from training.exchange.torch_backend.untraced import untraced
from training.exchange.torch_backend.work import BACKEND, MusterWork

_BARRIER_TAG = OPERATIONS - 1


@untraced
class GroupBase(dist.ProcessGroup):
    """A process group without its collectives. Members are numbered from 0, whatever their ranks in the world are.

    Raises:
        ExchangeError: a member is missing or cannot be reached; the message names it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        world_ranks: Sequence[int],
        listener: Listener,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub names the store, the class takes both
        self._rank, self._size = rank, size
        self._name = self._description = ""
        self._seconds = timeout.total_seconds()
        self._world = list(world_ranks) or list(range(size))
        self._listener, self._store = listener, store
        self._mesh: Mesh | None = None
        self.pairs: PointToPointLinks | None = None
        self._begun: list[MusterWork] | None = None
        self._peers = [number for number in range(size) if number != rank]
        if size > 1:
            channel, addresses = self._publish_and_collect(store)
            relay = parse_endpoint(relay_address) if (relay_address := os.environ.get("MUSTER_RELAY")) else None
            self._mesh = Mesh.form(listener, channel, addresses, _names_of(addresses), self._seconds, relay)
            self.pairs = PointToPointLinks(self._mesh, listener, channel, addresses, self._seconds, relay)
            _alive.add(self)

    def _publish_and_collect(self, store: Store) -> tuple[str, dict[int, list[Address]]]:
        """Return this group's name, drawn anew each time, and the addresses of its members' listeners."""
        # A store may be used for several groups in turn: keys of earlier ones must not be mistaken for this one's.
        meeting = store.add(f"meetings/{self._rank}", 1)
        if self._rank == 0:
            store.set(f"{meeting}/channel", secrets.token_hex(8))
        store.set(f"{meeting}/listener/{self._rank}", json.dumps(self._listener.address))
        keys = [f"{meeting}/listener/{number}" for number in range(self._size)]
        try:
            store.wait(keys, timedelta(seconds=self._seconds))
        except RuntimeError as error:
            missing = ", ".join(f"rank {world}" for key, world in zip(keys, self._world) if not store.check([key]))
            raise ExchangeTimeout(f"{missing or 'nobody'} did not connect within {span_text(self._seconds)}") from error
        addresses = {}
        for key, world in zip(keys, self._world):
            host, port = json.loads(store.get(key))
            addresses[world] = [(host, port)]
        return bytes(store.get(f"{meeting}/channel")).decode(), addresses

    @property
    def mesh(self) -> Mesh:
        """The links of its members; a group of one has none."""
        assert self._mesh is not None
        return self._mesh

    # ------------------------------------------------------------------------------------- what torch asks of a group

    def getBackendName(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size

    # Without a backend in C++ the base class knows no name, and functional collectives ask for one.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    # There is no C++ backend: torch asks the group itself for a backend's capabilities.
    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    @property
    def _device_types(self) -> list[torch.device]:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return [torch.device("cpu"), *([torch.device(accelerator.type)] if accelerator is not None else [])]

    def _get_backend(self, device: torch.device) -> GroupBase:
        return self

    def _get_backend_name(self) -> str:
        return BACKEND

    name = getBackendName

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def get_group_store(self) -> Store:
        return self._store

    @property
    def options(self) -> Any:
        return Backend.Options(BACKEND, timedelta(seconds=self._seconds))

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the time after which a stalled member counts as lost."""
        self._seconds = timeout.total_seconds()
        if self.pairs is not None:
            self.pairs.seconds = self._seconds

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        if self._mesh is not None:
            self._mesh.break_off(PeerLost(self._world[self._rank], f"rank {self._rank}", "the group was aborted"))
        self.shutdown()

    def shutdown(self, seconds: float = 5.0) -> None:
        if self._mesh is not None and self.pairs is not None:
            self._mesh.close(seconds)
            self.pairs.close(min(seconds, 1.0))

    def _start_coalescing(self, device: torch.device) -> None:
        self._begun = []

    def _end_coalescing(self, device: torch.device) -> MusterWork:
        begun, self._begun = self._begun or [], None
        for work in begun:
            work.wait()
        done = self._work("coalesced", [])
        done.part_ended(None)
        return done

    def _work(
        self,
        name: str,
        result: Any,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        part_count: int = 1,
        seconds: float = 0.0,
        between_two: bool = False,
    ) -> MusterWork:
        """Start an operation that uses these tensors, once conflicting operations have ended.

        Raises:
            NotImplementedError: a tensor is sparse.
            InvalidArgument: elements of a tensor that is written share memory.
        """
        check_dense(reads, writes)
        check_writable(name, writes)
        waits_for = self.pairs.waits_for if self.pairs is not None else str
        work = MusterWork(result, part_count, name, waits_for, seconds)
        with work.profiled(""):
            work.use = Use.of(reads, writes, between_two)
            work.inference = any(tensor.is_inference() for tensor in writes)
            in_use.wait_for_others(work.use)
        if self._begun is not None:
            self._begun.append(work)
        return work

    # ------------------------------------------------------------------------------------------------------ operations

    def _exchange(self, sends: Mapping[int, Pieces], receives: Mapping[int, Pieces], work: MusterWork) -> MusterWork:
        """Exchange host tensors, by rank in the group; they are kept alive until ``work`` is complete."""
        if self._mesh is None:
            work.part_ended(None)
            return work

        def on_end(error: Exception | None, keep: object = (sends, receives)) -> None:
            work.part_ended(error)

        def views(by_number: Mapping[int, Pieces]) -> dict[int, list[memoryview]]:
            return {self._world[number]: [view(piece) for piece in pieces] for number, pieces in by_number.items()}

        buffers = views(sends), views(receives)
        work.begin()
        work.transfer = self._mesh.exchange(*buffers, on_end, work.mark)
        return work

    # -------------------------------------------------------------------------------------------------- point to point

    def send(self, tensors: Pieces, dst: int, tag: int = 0) -> MusterWork:
        tensor = self._check_pair("send", tensors, dst, tag)
        work = self._work(f"send {names(tensors)}", tensors, reads=tensors, between_two=True)
        host = on_host(tensor)
        data = view(host.clone() if host.data_ptr() == tensor.data_ptr() else host)
        work.use = Use((), ())  # what is sent has been copied
        return self._submit(dst, Outgoing, tag, work, lambda link, operation: link.send(operation, data))

    def recv(self, tensors: Pieces, src: int, tag: int = 0) -> MusterWork:
        tensor = self._check_pair("recv", tensors, src, tag)
        work = self._work(f"recv {names(tensors)}", tensors, writes=tensors, between_two=True)
        work.sender = src
        into = view(receive_buffer(tensor, work))

        def receive(link: Incoming, operation: int) -> Iterator[int]:
            size = yield from link.receive(operation, into)
            if size != len(into):
                raise ValueError(f"it sent {size} bytes with tag {tag} where {len(into)} belong")

        return self._submit(src, Incoming, tag, work, receive)

    def recv_anysource(self, tensors: Pieces, tag: int = 0) -> MusterWork:
        raise NotImplementedError(f"{BACKEND} receives from a rank that is named; give src")

    def _check_pair(self, operation: str, tensors: Pieces, number: int, tag: int) -> torch.Tensor:
        if not 0 <= tag < OPERATIONS:
            raise InvalidArgument(operation, f"tag {tag} is not from 0 to {OPERATIONS - 1}")
        if not 0 <= number < self._size or number == self._rank:
            raise InvalidArgument(operation, f"invalid rank: {number}, from {self._rank} of {self._size} members")
        return check_single(operation, tensors)

    def _submit(
        self, number: int, kind: Any, tag: int, work: MusterWork, job: Callable[[Any, int], Iterator[int]]
    ) -> MusterWork:
        assert self.pairs is not None  # a single member has no peer to name
        mark = zlib.crc32(str(work.result()[0].dtype).encode()) % MARKS
        work.begin()
        try:
            operation = tag * MARKS + mark
            self.pairs.submit(self._world[number], kind, lambda link: job(link, operation), work.part_ended)
        except ExchangeError as error:
            work.part_ended(error)
        return work

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all members are here; rank 0 names those that are late.

        Args:
            timeout: after which to give up; default: the group's.
            wait_all_ranks: whether to name all late members, not only the first.

        Raises:
            RuntimeError: a member is late.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        seconds = self._seconds if seconds is None else float(seconds)
        deadline = time.monotonic() + seconds
        if self._rank:
            return self._report_to_rank_zero(deadline)
        after = f"monitoredBarrier in {1000 * seconds:.0f} ms"
        if seconds <= 0 and self._peers:
            raise RuntimeError(f"{BACKEND}: Rank {self._world[0]} timed out in {after}")
        late = []
        for peer, work in [(peer, self.recv([_token()], peer, _BARRIER_TAG)) for peer in self._peers]:
            if not _ends_by(work, deadline):
                late.append(self._world[peer])
                if not wait_all_ranks:
                    break
        if late:
            late_ranks = ", ".join(map(str, late))
            machines = ", ".join(_names_of(late).values())
            raise RuntimeError(
                f"{BACKEND}: Rank{'s' * (len(late) > 1)} {late_ranks} failed to pass {after} ({machines})"
            )
        for peer in self._peers:
            self.send([_token()], peer, _BARRIER_TAG)

    def _report_to_rank_zero(self, deadline: float) -> None:
        self.send([_token()], 0, _BARRIER_TAG)
        if not _ends_by(self.recv([_token()], 0, _BARRIER_TAG), deadline):
            rank, rank_zero = self._world[self._rank], self._world[0]
            raise RuntimeError(
                f"{BACKEND}: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank {rank_zero}: its log says who is late"
            )


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def _ends_by(work: MusterWork, deadline: float) -> bool:
    """Whether an operation ends well before ``deadline`` of :func:`time.monotonic`."""
    try:
        return work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError:
        return False


_alive: weakref.WeakSet[GroupBase] = weakref.WeakSet()


@atexit.register
def leave() -> None:
    """End the groups that were not destroyed: a thread in the middle of arithmetic would abort the process."""
    for group in list(_alive):
        group.shutdown(1.0)


def _names_of(ranks: Iterable[int]) -> dict[int, str]:
    """Return the names of members for messages: their rank, and their machine where MUSTER_NAMES has it."""
    machines = os.environ.get("MUSTER_NAMES", "").split(",")
    return {rank: f"rank {rank}" + (f" ({machines[rank]})" if rank < len(machines) > 1 else "") for rank in ranks}
