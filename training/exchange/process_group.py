"""The mesh as a ``torch.distributed`` process group: backend ``muster``, for tensors of any device.

Importing this module registers it::

    import torch.distributed as dist
    import training.exchange.process_group

    dist.init_process_group("muster")

DDP, FSDP2, tensor and pipeline parallelism and whatever else speaks ``torch.distributed`` then runs over encrypted
connections between any machines, Linux and macOS in one group. The environment says who this process is:

=======================  ==========================================================================
MUSTER_CERTIFICATES      folder with this member's certificates; without it: in clear, loopback only
MUSTER_RUN_ID            run that the certificates are of
MUSTER_LISTEN            literal address to listen on, and the others' way here (``127.0.0.1``)
=======================  ==========================================================================

Tensors that are not contiguous memory of the CPU are copied there and back. Sums are added in rank order, so all
members hold the same bits.
"""

# mypy: disable-error-code="override,assignment"
# torch declares each collective in two forms and calls the one that is here.

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from training.exchange.link import Connection, Incoming, Outgoing, PeerLost
from training.exchange.listener import Address, Identity, Listener
from training.exchange.mesh import SMALL, Mesh
from training.exchange.tensor_operations import BACKEND, MusterWork, Pieces, Reducer, TensorReduction, on_host, view


class MusterGroup(dist.ProcessGroup):
    """One process group. Its members are numbered from 0, whatever their ranks in the world are.

    Raises:
        ExchangeError: somebody is missing, or cannot be reached; the message says who.
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
        self._here = {world: number for number, world in enumerate(self._world)}
        self._listener = listener
        self._mesh: Mesh | None = None
        self._pairs: dict[tuple[int, bool], Incoming | Outgoing] = {}
        self._pairs_lock = threading.Lock()
        self._addresses: dict[int, list[Address]] = {}
        self._peers = [number for number in range(size) if number != rank]
        if size > 1:
            self._channel = self._meet(store)
            self._mesh = Mesh.form(listener, self._channel, self._addresses, None, self._seconds)

    def _meet(self, store: Store) -> str:
        """Learn where the others listen; return the name of this group, which is drawn anew each time."""
        if self._rank == 0:
            store.set("channel", secrets.token_hex(8))
        store.set(f"listener/{self._rank}", json.dumps(self._listener.address))
        for number, world in enumerate(self._world):
            host, port = json.loads(store.get(f"listener/{number}"))
            self._addresses[world] = [(host, port)]
        return bytes(store.get("channel")).decode()

    # ------------------------------------------------------------------------------------- what torch asks of a group

    def getBackendName(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    # Without a backend in C++ the base class knows no name, and functional collectives ask for one.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def abort(self) -> None:
        if self._mesh is not None:
            self._mesh.break_off(PeerLost(self._world[self._rank], f"rank {self._rank}", "the group was aborted"))
        self.shutdown()

    def shutdown(self) -> None:
        if self._mesh is not None:
            self._mesh.close()
        for link in self._pairs.values():
            link.close(1.0)

    # ---------------------------------------------------------------------------------------------------- collectives

    def allreduce(self, tensors: Pieces, opts: Any = None) -> MusterWork:
        reducer = Reducer(getattr(opts, "reduceOp", dist.ReduceOp.SUM), self._size)
        work = MusterWork(tensors, len(tensors))
        for tensor in tensors:
            host = on_host(tensor)
            work.copy_back(tensor, host)
            self._all_reduce(host.reshape(-1), reducer, work)
        return work

    def allreduce_coalesced(self, tensors: Pieces, opts: Any = None) -> MusterWork:
        return self.allreduce(tensors, opts)

    def _all_reduce(self, values: torch.Tensor, reducer: Reducer, work: MusterWork) -> None:
        if self._mesh is None or not values.numel():
            work.part_ended(None)
        elif values.numel() * values.element_size() <= SMALL:
            self._all_reduce_small(self._mesh, values, reducer, work)
        else:
            self._mesh.reduce(TensorReduction(values, self._mesh, reducer), work.part_ended)

    def _all_reduce_small(self, mesh: Mesh, values: torch.Tensor, reducer: Reducer, work: MusterWork) -> None:
        own = values.clone()
        rooms = {peer: torch.empty_like(own) for peer in self._peers}

        def reduce() -> None:
            terms = [own if number == self._rank else rooms[number] for number in range(self._size)]
            reducer.reduce(terms, 0, values)

        views = {self._world[peer]: view(room) for peer, room in rooms.items()}
        try:
            done = mesh.exchange_now(view(own), views)
        except PeerLost as error:
            work.part_ended(error)
            return
        if done:
            reduce()
            work.part_ended(None)
            return

        def over(error: Exception | None) -> None:
            if error is None:
                reduce()
            work.part_ended(error)

        mesh.exchange({peer: [view(own)] for peer in views}, {peer: [view] for peer, view in views.items()}, over)

    def reduce(self, tensors: Pieces, opts: Any = None) -> MusterWork:
        root, reducer = opts.rootRank, Reducer(opts.reduceOp, self._size)
        work, hosts = MusterWork(tensors), [on_host(tensor) for tensor in tensors]
        if self._rank != root:
            return self._exchange({root: hosts}, {}, work)
        rooms = {peer: [torch.empty_like(host) for host in hosts] for peer in self._peers}

        def reduce() -> None:
            for number, (tensor, host) in enumerate(zip(tensors, hosts)):
                terms = [host if peer == self._rank else rooms[peer][number] for peer in range(self._size)]
                reducer.reduce(terms, self._rank, host)
                tensor.detach().copy_(host)

        return self._exchange({}, rooms, work.then(reduce))

    def broadcast(self, tensors: Pieces, opts: Any = None) -> MusterWork:
        root = opts.rootRank if opts is not None else 0
        work = MusterWork(tensors)
        if self._rank == root:
            hosts = [on_host(tensor) for tensor in tensors]
            return self._exchange(dict.fromkeys(self._peers, hosts), {}, work)
        hosts = [on_host(tensor, filled=False) for tensor in tensors]
        for tensor, host in zip(tensors, hosts):
            work.copy_back(tensor, host)
        return self._exchange({}, {root: hosts}, work)

    def allgather(self, outputs: list[Pieces], inputs: Pieces, opts: Any = None) -> MusterWork:
        return self._all_gather(list(zip(outputs, inputs)), outputs)

    def allgather_coalesced(self, outputs: list[Pieces], inputs: Pieces, opts: Any = None) -> MusterWork:
        return self._all_gather(list(zip(outputs, inputs)), outputs)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MusterWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Pieces, inputs: Pieces, opts: Any = None) -> MusterWork:
        pairs = [(self._parts(out), one.detach().reshape(-1)) for out, one in zip(outputs, inputs) if one.numel()]
        return self._all_gather(pairs, outputs)

    def _all_gather(self, pairs: Sequence[tuple[Pieces, torch.Tensor]], result: Any) -> MusterWork:
        work = MusterWork(result)
        sends = [on_host(one) for _, one in pairs]
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for outputs, one in pairs:
            outputs[self._rank].detach().copy_(one.detach())
            for peer in self._peers:
                room = on_host(outputs[peer], filled=False)
                receives[peer].append(room)
                work.copy_back(outputs[peer], room)
        return self._exchange(dict.fromkeys(self._peers, sends), receives, work)

    def reduce_scatter(self, outputs: Pieces, inputs: list[Pieces], opts: Any = None) -> MusterWork:
        return self._reduce_scatter(list(zip(outputs, inputs)), opts.reduceOp, outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MusterWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Pieces, inputs: Pieces, opts: Any = None) -> MusterWork:
        pairs = [(out, self._parts(one)) for out, one in zip(outputs, inputs)]
        return self._reduce_scatter(pairs, opts.reduceOp, outputs)

    def _reduce_scatter(self, pairs: Sequence[tuple[torch.Tensor, Pieces]], operation: Any, result: Any) -> MusterWork:
        work, reducer = MusterWork(result), Reducer(operation, self._size)
        sends: dict[int, Pieces] = {peer: [] for peer in self._peers}
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for output, pieces in pairs:
            own = on_host(pieces[self._rank])
            rooms = {peer: torch.empty(own.shape, dtype=own.dtype) for peer in self._peers}
            for peer, room in rooms.items():
                sends[peer].append(on_host(pieces[peer]))
                receives[peer].append(room)

            def reduce(output: torch.Tensor = output, own: torch.Tensor = own, rooms: dict[int, Any] = rooms) -> None:
                terms = [own if number == self._rank else rooms[number] for number in range(self._size)]
                total = torch.empty_like(own)
                reducer.reduce(terms, 0, total)
                output.detach().view(-1).copy_(total.view(-1))

            work.then(reduce)
        return self._exchange(sends, receives, work)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> MusterWork:
        outputs = list(
            torch.split(output.detach(), list(output_sizes)) if output_sizes else output.detach().chunk(self._size)
        )
        inputs = list(
            torch.split(input.detach(), list(input_sizes)) if input_sizes else input.detach().chunk(self._size)
        )
        return self._all_to_all(outputs, inputs, [output])

    def alltoall(self, outputs: Pieces, inputs: Pieces, opts: Any = None) -> MusterWork:
        return self._all_to_all(outputs, inputs, outputs)

    def _all_to_all(self, outputs: Pieces, inputs: Pieces, result: Any) -> MusterWork:
        work = MusterWork(result)
        rooms = {peer: on_host(outputs[peer], filled=False) for peer in self._peers}
        for peer, room in rooms.items():
            work.copy_back(outputs[peer], room)
        outputs[self._rank].detach().copy_(inputs[self._rank].detach())
        sends = {peer: [on_host(inputs[peer])] for peer in self._peers}
        return self._exchange(sends, {peer: [room] for peer, room in rooms.items()}, work)

    def gather(self, outputs: list[Pieces], inputs: Pieces, opts: Any = None) -> MusterWork:
        root, work = opts.rootRank, MusterWork(outputs)
        if self._rank != root:
            return self._exchange({root: [on_host(one) for one in inputs]}, {}, work)
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for rooms, one in zip(outputs, inputs):
            rooms[root].detach().copy_(one.detach())
            for peer in self._peers:
                room = on_host(rooms[peer], filled=False)
                receives[peer].append(room)
                work.copy_back(rooms[peer], room)
        return self._exchange({}, receives, work)

    def scatter(self, outputs: Pieces, inputs: list[Pieces], opts: Any = None) -> MusterWork:
        root, work = opts.rootRank, MusterWork(outputs)
        if self._rank == root:
            outputs[0].detach().copy_(inputs[0][root].detach())
            return self._exchange({peer: [on_host(inputs[0][peer])] for peer in self._peers}, {}, work)
        room = on_host(outputs[0], filled=False)
        return self._exchange({}, {root: [room]}, work.copy_back(outputs[0], room))

    def barrier(self, opts: Any = None) -> MusterWork:
        empty = {peer: [torch.empty(0, dtype=torch.uint8)] for peer in self._peers}
        return self._exchange(empty, empty, MusterWork([]))

    # torch's newer names of the same collectives
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _parts(self, tensor: torch.Tensor) -> Pieces:
        return list(tensor.detach().view(-1).chunk(self._size))

    def _exchange(self, sends: Mapping[int, Pieces], receives: Mapping[int, Pieces], work: MusterWork) -> MusterWork:
        """Exchange host tensors, by number in the group; they live until ``work`` is complete."""
        if self._mesh is None:
            work.part_ended(None)
            return work

        def over(error: Exception | None, keep: object = (sends, receives)) -> None:
            work.part_ended(error)

        def views(by_number: Mapping[int, Pieces]) -> dict[int, list[memoryview]]:
            return {self._world[number]: [view(one) for one in pieces] for number, pieces in by_number.items()}

        self._mesh.exchange(views(sends), views(receives), over)
        return work

    # -------------------------------------------------------------------------------------------------- point to point

    def send(self, tensors: Pieces, dst: int, tag: int = 0) -> MusterWork:
        work, host = MusterWork(tensors), on_host(tensors[0])
        host = host.clone() if host.data_ptr() == tensors[0].data_ptr() else host
        link = self._pair(dst, Outgoing)
        link.submit(lambda link: link.send(tag, view(host)), work.part_ended)
        return work

    def recv(self, tensors: Pieces, src: int, tag: int = 0) -> MusterWork:
        room = on_host(tensors[0], filled=False)
        work = MusterWork(tensors).copy_back(tensors[0], room)

        into = view(room)

        def receive(link: Incoming) -> None:
            size = link.receive(tag, into)
            if size != len(into):
                raise ValueError(f"it sent {size} bytes with tag {tag} where {len(into)} belong")

        self._pair(src, Incoming).submit(receive, work.part_ended)
        return work

    def _pair(self, number: int, kind: Any) -> Any:
        """Return the link for messages to or from one member, apart from the collectives'; made when it is needed."""
        world, sends = self._world[number], kind is Outgoing
        with self._pairs_lock:
            if (world, sends) not in self._pairs:
                connect = functools.partial(self._connect, world, sends)
                assert self._mesh is not None
                self._pairs[world, sends] = kind(connect, world, self._mesh.names, self._mesh.break_off)
            return self._pairs[world, sends]

    def _connect(self, world: int, sends: bool) -> Connection:
        deadline = time.monotonic() + self._seconds
        return self._listener.meet(f"{self._channel}/pairs", world, sends, self._addresses[world], deadline)


@functools.cache
def _listener(rank: int) -> Listener:
    folder = os.environ.get("MUSTER_CERTIFICATES")
    identity = Identity(os.environ.get("MUSTER_RUN_ID", ""), rank, Path(folder) if folder else None)
    return Listener(os.environ.get("MUSTER_LISTEN", "127.0.0.1"), identity)


def _create(options: Any, _backend_options: Any = None) -> MusterGroup:
    world = list(options.global_ranks_in_group)
    rank = options.group_rank
    listener = _listener(world[rank] if world else rank)
    return MusterGroup(options.store, rank, options.group_size, options.timeout, world, listener)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda", "mps"])
