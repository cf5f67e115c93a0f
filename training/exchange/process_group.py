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
MUSTER_RELAY             ``host:port`` where two meet of whom neither can dial the other; without it: nowhere
MUSTER_NAMES             the members' machines by rank, with commas between them, for messages
=======================  ==========================================================================

Tensors that are not contiguous memory of the CPU are copied there and back. Sums are added in rank order, so all
members hold the same bits.
"""

# mypy: disable-error-code="override,assignment"
# torch declares each collective in two forms and calls the one that is here.

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import training.exchange.mps  # noqa: F401 - gives torch.mps what it lacks
from training.exchange.group_base import GroupBase
from training.exchange.link import PeerLost
from training.exchange.listener import Identity, Listener
from training.exchange.mesh import SMALL, Mesh
from training.exchange.tensor_operations import Pieces, Reducer, TensorReduction, names, on_host, room_for, view
from training.exchange.work import BACKEND, MusterWork


class MusterGroup(GroupBase):
    """One process group. Its members are numbered from 0, whatever their ranks in the world are."""

    def allreduce(self, tensors: Pieces, opts: Any = None) -> MusterWork:
        hosts = [on_host(tensor) for tensor in tensors]
        operation, asynchronous = getattr(opts, "reduceOp", dist.ReduceOp.SUM), getattr(opts, "asyncOp", True)
        reducers = [Reducer(operation, self._size, host.dtype) for host in hosts]
        work = self._work(f"all_reduce {names(hosts, reducers)}", tensors, max(1, len(tensors)))
        for tensor, host in zip(tensors, hosts):
            work.copy_back(tensor, host)
        for host, reducer in zip(hosts, reducers):
            self._all_reduce(host.reshape(-1), reducer, work, not asynchronous)
        if not tensors:
            work.part_ended(None)
        return work

    def _all_reduce(self, values: torch.Tensor, reducer: Reducer, work: MusterWork, now: bool) -> None:
        if self._mesh is None:
            work.part_ended(None)
        elif values.numel() * values.element_size() <= SMALL:
            self._all_reduce_small(self._mesh, values, reducer, work, now)
        else:
            self._mesh.reduce(TensorReduction(values, self._mesh, reducer), work.part_ended, work.mark)

    def _all_reduce_small(
        self, mesh: Mesh, values: torch.Tensor, reducer: Reducer, work: MusterWork, now: bool
    ) -> None:
        own = values.clone()
        rooms = {peer: torch.empty_like(own) for peer in self._peers}

        def reduce() -> None:
            terms = [own if number == self._rank else rooms[number] for number in range(self._size)]
            reducer.reduce(terms, 0, values)

        views = {self._world[peer]: view(room) for peer, room in rooms.items()}
        if now:  # in this thread; whoever wants to go on meanwhile must not wait for the others here
            try:
                now = mesh.exchange_now(view(own), views, work.mark)
            except PeerLost as error:
                work.part_ended(mesh.lost or error)
                return
        if now:
            reduce()
            work.part_ended(None)
            return

        def over(error: Exception | None) -> None:
            if error is None:
                reduce()
            work.part_ended(error)

        receives = {peer: [view] for peer, view in views.items()}
        mesh.exchange({peer: [view(own)] for peer in views}, receives, over, work.mark)

    def reduce(self, tensors: Pieces, opts: Any = None) -> MusterWork:
        root, hosts = opts.rootRank, [on_host(tensor) for tensor in tensors]
        reducers = [Reducer(opts.reduceOp, self._size, host.dtype) for host in hosts]
        work = self._work(f"reduce to {root} {names(hosts, reducers)}", tensors)
        if self._rank != root:
            return self._exchange({root: hosts}, {}, work)
        rooms = {peer: [torch.empty_like(host) for host in hosts] for peer in self._peers}

        def reduce() -> None:
            for number, (tensor, host, reducer) in enumerate(zip(tensors, hosts, reducers)):
                terms = [host if peer == self._rank else rooms[peer][number] for peer in range(self._size)]
                reducer.reduce(terms, self._rank, host)
                tensor.detach().copy_(host)

        return self._exchange({}, rooms, work.then(reduce))

    def broadcast(self, tensors: Pieces, opts: Any = None) -> MusterWork:
        root = opts.rootRank if opts is not None else 0
        work = self._work(f"broadcast from {root} {names(tensors)}", tensors)
        if self._rank == root:
            hosts = [on_host(tensor) for tensor in tensors]
            return self._exchange(dict.fromkeys(self._peers, hosts), {}, work)
        return self._exchange({}, {root: [room_for(tensor, work) for tensor in tensors]}, work)

    def allgather(self, outputs: list[Pieces], inputs: Pieces, opts: Any = None) -> MusterWork:
        return self._all_gather(list(zip(outputs, inputs)), outputs)

    def allgather_coalesced(self, outputs: list[Pieces], inputs: Pieces, opts: Any = None) -> MusterWork:
        """Other than those of :meth:`allgather`, ``outputs`` has a list for each member."""
        return self._all_gather(list(zip(map(list, zip(*outputs)), inputs)), outputs)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MusterWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Pieces, inputs: Pieces, opts: Any = None) -> MusterWork:
        pairs = [(self._parts(out, one), one.detach().reshape(-1)) for out, one in zip(outputs, inputs)]
        return self._all_gather(pairs, outputs)

    def _all_gather(self, pairs: Sequence[tuple[Pieces, torch.Tensor]], result: Any) -> MusterWork:
        work = self._work(f"all_gather {names([one for _, one in pairs])}", result)
        sends = [on_host(one) for _, one in pairs]
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for outputs, one in pairs:
            outputs[self._rank].detach().copy_(one.detach())
            for peer in self._peers:
                receives[peer].append(room_for(outputs[peer], work))
        return self._exchange(dict.fromkeys(self._peers, sends), receives, work)

    def reduce_scatter(self, outputs: Pieces, inputs: list[Pieces], opts: Any = None) -> MusterWork:
        return self._reduce_scatter(list(zip(outputs, inputs)), opts.reduceOp, outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MusterWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Pieces, inputs: Pieces, opts: Any = None) -> MusterWork:
        pairs = [(out, self._parts(one, out)) for out, one in zip(outputs, inputs)]
        return self._reduce_scatter(pairs, opts.reduceOp, outputs)

    def _reduce_scatter(self, pairs: Sequence[tuple[torch.Tensor, Pieces]], operation: Any, result: Any) -> MusterWork:
        firsts = [pieces[0] for _, pieces in pairs]
        reducers = [Reducer(operation, self._size, first.dtype) for first in firsts]
        work = self._work(f"reduce_scatter {names(firsts, reducers)}", result)
        sends: dict[int, Pieces] = {peer: [] for peer in self._peers}
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for (output, pieces), reducer in zip(pairs, reducers):
            own = on_host(pieces[self._rank])
            rooms = {peer: torch.empty(own.shape, dtype=own.dtype) for peer in self._peers}
            for peer, room in rooms.items():
                sends[peer].append(on_host(pieces[peer]))
                receives[peer].append(room)

            def reduce(output: torch.Tensor, own: torch.Tensor, rooms: dict[int, Any], reducer: Reducer) -> None:
                terms = [own if number == self._rank else rooms[number] for number in range(self._size)]
                total = torch.empty_like(own)
                reducer.reduce(terms, 0, total)
                output.detach().copy_(total.view(output.shape))

            work.then(functools.partial(reduce, output, own, rooms, reducer))
        return self._exchange(sends, receives, work)

    def alltoall_base(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> MusterWork:
        outputs, inputs = self._rows(output, output_sizes), self._rows(input, input_sizes)
        return self._all_to_all(outputs, inputs, [output])

    def alltoall(self, outputs: Pieces, inputs: Pieces, opts: Any = None) -> MusterWork:
        return self._all_to_all(outputs, inputs, outputs)

    def _all_to_all(self, outputs: Pieces, inputs: Pieces, result: Any) -> MusterWork:
        work = self._work(f"all_to_all {names(inputs[:1])}", result)
        if any(one.dtype != inputs[0].dtype for one in (*inputs, *outputs)):
            raise ValueError(f"{BACKEND}: all_to_all of several types")
        receives = {peer: [room_for(outputs[peer], work)] for peer in self._peers}
        outputs[self._rank].detach().copy_(inputs[self._rank].detach())
        sends = {peer: [on_host(inputs[peer])] for peer in self._peers}
        return self._exchange(sends, receives, work)

    def gather(self, outputs: list[Pieces], inputs: Pieces, opts: Any = None) -> MusterWork:
        root, work = opts.rootRank, self._work(f"gather to {opts.rootRank} {names(inputs)}", outputs)
        if self._rank != root:
            return self._exchange({root: [on_host(one) for one in inputs]}, {}, work)
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for rooms, one in zip(outputs, inputs):
            rooms[root].detach().copy_(one.detach())
            for peer in self._peers:
                receives[peer].append(room_for(rooms[peer], work))
        return self._exchange({}, receives, work)

    def scatter(self, outputs: Pieces, inputs: list[Pieces], opts: Any = None) -> MusterWork:
        root, work = opts.rootRank, self._work(f"scatter from {opts.rootRank} {names(outputs)}", outputs)
        if self._rank == root:
            outputs[0].detach().copy_(inputs[0][root].detach())
            return self._exchange({peer: [on_host(inputs[0][peer])] for peer in self._peers}, {}, work)
        return self._exchange({}, {root: [room_for(outputs[0], work)]}, work)

    def barrier(self, opts: Any = None) -> MusterWork:
        empty = {peer: [torch.empty(0, dtype=torch.uint8)] for peer in self._peers}
        seconds = max(0.0, opts.timeout.total_seconds()) if opts is not None else 0.0
        return self._exchange(empty, empty, self._work("barrier", [], seconds=seconds))

    # further names of the same collectives
    allreduce_coalesced = allreduce
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _parts(self, whole: torch.Tensor, part: torch.Tensor) -> Pieces:
        if whole.numel() != self._size * part.numel() or whole.dtype != part.dtype:
            told = f"{whole.numel()} numbers of {whole.dtype} are not {self._size} times {part.numel()} of {part.dtype}"
            raise ValueError(f"{BACKEND}: {told}")
        return list(whole.detach().view(self._size, -1) if whole.numel() else [part.detach().view(-1)] * self._size)

    def _rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Pieces:
        if sizes:
            return list(torch.split(tensor.detach(), list(sizes)))
        if tensor.shape[0] % self._size:
            raise ValueError(f"{BACKEND}: {tensor.shape[0]} rows for {self._size} members; say how many each gets")
        return list(torch.split(tensor.detach(), [tensor.shape[0] // self._size] * self._size))


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
