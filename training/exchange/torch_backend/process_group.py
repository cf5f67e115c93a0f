"""The mesh as a ``torch.distributed`` process group: backend ``muster``, for tensors of any device.

Importing this module registers it::

    import torch.distributed as dist
    import training.exchange.torch_backend.process_group

    dist.init_process_group("muster")

DDP, FSDP2, tensor and pipeline parallelism and whatever else speaks ``torch.distributed`` then runs over encrypted
connections between any machines, Linux and macOS in one group. The environment configures this process:

=======================  ==========================================================================
MUSTER_CERTIFICATES      folder with this member's certificates; without it: in clear, loopback only
MUSTER_RUN_ID            run that the certificates are of
MUSTER_LISTEN            literal address to listen on, announced to the others (``127.0.0.1``)
MUSTER_RELAY             ``host:port`` of the relay for pairs that cannot dial one another; without it: none
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import training.exchange.torch_backend.mps  # noqa: F401 - gives torch.mps what it lacks
from training.exchange.links.listener import Identity, Listener
from training.exchange.mean.mesh import SMALL, Mesh
from training.exchange.mean.transfer import PendingTransfer
from training.exchange.torch_backend.arguments import (
    InvalidArgument,
    check_alike,
    check_dense,
    check_gathered,
    check_gathered_coalesced,
    check_of_members,
    check_root,
    check_root_tensor,
    check_scattered,
    check_single,
    check_writable,
    flattened,
    options_of,
    tensor_list,
    tensor_lists,
)
from training.exchange.torch_backend.group_base import GroupBase
from training.exchange.torch_backend.monitored import give_monitored_barrier
from training.exchange.torch_backend.tensor_operations import (
    Pieces,
    Reducer,
    TensorReduction,
    names,
    on_host,
    receive_buffer,
    view,
    without_overlap,
)
from training.exchange.torch_backend.untraced import untraced
from training.exchange.torch_backend.work import BACKEND, MusterWork


@untraced
class MusterGroup(GroupBase):
    """One process group. Members are numbered from 0, whatever their ranks in the world are."""

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> MusterWork:
        opts, tensors = options_of(dist.AllreduceOptions, args, kwargs), tensor_list(tensors)
        if not tensors:
            raise InvalidArgument("all_reduce", "requires non-empty tensor list")
        check_alike("all_reduce", tensors, tensors[0])
        if len(tensors) > 1:
            raise NotImplementedError(f"{BACKEND}: all_reduce over several tensors of a member; add them up before")
        if tensors[0].layout == torch.sparse_coo:
            return self._all_reduce_sparse(tensors[0], opts.reduceOp)
        return self.allreduce_coalesced(tensors, opts)

    def _all_reduce_sparse(self, tensor: torch.Tensor, operation: Any) -> MusterWork:
        """Gather the entries of all members and add them up; this blocks until the sum is complete."""
        if operation != dist.ReduceOp.SUM:
            raise InvalidArgument("all_reduce", "unsupported reduction operation: sparse tensors are summed alone")
        entries = tensor.detach().coalesce()
        counts = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self._size)]
        self.allgather([counts], [torch.tensor([entries._nnz()], device="cpu")]).wait()
        components = entries.indices().t().contiguous(), entries.values().contiguous()
        gathered = [[part.new_empty((int(count), *part.shape[1:])) for count in counts] for part in components]

        def reduce_piece() -> None:
            indices, values = (torch.cat(pieces) for pieces in gathered)
            with torch.no_grad():
                tensor.copy_(torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce())

        work = self._all_gather(list(zip(gathered, components)), [tensor], reduce_piece)
        work.wait_for_end()  # the tensor's memory is replaced: a second operation could not be ordered after it
        return work

    def allreduce_coalesced(self, tensors: Pieces, *args: Any, **kwargs: Any) -> MusterWork:
        opts = options_of(dist.AllreduceCoalescedOptions, args, kwargs)
        if not tensors:
            raise InvalidArgument("all_reduce_coalesced", "requires non-empty tensor list")
        check_dense(tensors)
        reducers = [Reducer(opts.reduceOp, self._size, tensor.dtype) for tensor in tensors]
        name = f"all_reduce {names(tensors, reducers)}"
        work = self._work(name, tensors, writes=tensors, part_count=len(tensors))
        hosts = without_overlap([on_host(tensor) for tensor in tensors])
        for tensor, host in zip(tensors, hosts):
            work.copy_back(tensor, host)
        work.begin()
        for host, reducer in zip(hosts, reducers):
            self._all_reduce(host.reshape(-1), reducer, work, not opts.asyncOp)
        return work

    def _all_reduce(self, values: torch.Tensor, reducer: Reducer, work: MusterWork, now: bool) -> None:
        """Start it; ``now``: carry it out in this thread. An asynchronous caller must not wait for other members."""
        mesh = self._mesh
        if mesh is None:
            return work.part_ended(None)
        if values.numel() * values.element_size() <= SMALL:
            transfer = self._all_reduce_small(mesh, values, reducer, work, not now)
        else:
            transfer = mesh.reduce(TensorReduction(values, mesh, reducer), work.part_ended, work.mark, not now)
        if now:
            transfer.drive()

    def _all_reduce_small(
        self, mesh: Mesh, values: torch.Tensor, reducer: Reducer, work: MusterWork, start: bool
    ) -> PendingTransfer:
        contribution = values.clone()
        buffers = {peer: torch.empty_like(contribution) for peer in self._peers}

        def reduce() -> None:
            terms = [contribution if number == self._rank else buffers[number] for number in range(self._size)]
            reducer.reduce(terms, 0, values)

        work.deliver_first(reduce)
        receives = {self._world[peer]: [view(buffer)] for peer, buffer in buffers.items()}
        sends = {peer: [view(contribution)] for peer in receives}
        return mesh.exchange(sends, receives, work.part_ended, work.mark, start)

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> MusterWork:
        opts, tensors = options_of(dist.ReduceOptions, args, kwargs), tensor_list(tensors)
        root, tensor = opts.rootRank, check_single("reduce", tensors)
        check_root("reduce", root, self._size)
        check_root_tensor("reduce", opts.rootTensor, tensors)
        check_dense(tensors)
        check_writable("reduce", tensors)  # on all members, so that none waits for one that refuses
        reducer = Reducer(opts.reduceOp, self._size, tensor.dtype)
        is_root = self._rank == root
        name = f"reduce to {root} {names(tensors, [reducer])}"
        work = self._work(name, tensors, reads=tensors, writes=tensors if is_root else ())
        host = on_host(tensor)
        if not is_root:
            return self._exchange({root: [host]}, {}, work)
        buffers = {peer: [torch.empty_like(host)] for peer in self._peers}

        def reduce() -> None:
            terms = [host if peer == self._rank else buffers[peer][0] for peer in range(self._size)]
            reducer.reduce(terms, self._rank, host)
            tensor.detach().copy_(host)

        return self._exchange({}, buffers, work.deliver(reduce))

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> MusterWork:
        opts, tensors = options_of(dist.BroadcastOptions, args, kwargs), tensor_list(tensors)
        root = opts.rootRank
        check_root("broadcast", root, self._size)
        check_root_tensor("broadcast", opts.rootTensor, tensors)
        check_alike("broadcast", tensors, tensors[0])
        check_dense(tensors)
        check_writable("broadcast", tensors)
        source = tensors[opts.rootTensor]
        copies = [tensor for tensor in tensors if tensor is not source]
        is_root = self._rank == root
        work = self._work(
            f"broadcast from {root} {names([source])}", tensors, reads=[source], writes=copies if is_root else tensors
        )
        host = on_host(source) if is_root else receive_buffer(source, work)
        for tensor in copies:
            work.deliver(functools.partial(tensor.detach().copy_, source))
        if is_root:
            return self._exchange({peer: [host] for peer in self._peers}, {}, work)
        return self._exchange({}, {root: [host]}, work)

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> MusterWork:
        outputs, inputs = tensor_lists(outputs), tensor_list(inputs)
        check_gathered("all_gather", outputs, inputs, self._rank, self._size)
        return self._all_gather(list(zip(outputs, inputs)), flattened(outputs))

    def allgather_coalesced(self, outputs: list[Pieces], inputs: Pieces, *args: Any, **kwargs: Any) -> MusterWork:
        """Unlike those of :meth:`allgather`, ``outputs`` has a list for each member."""
        check_gathered_coalesced("all_gather_coalesced", outputs, inputs, self._size)
        return self._all_gather(list(zip(map(list, zip(*outputs)), inputs)), flattened(outputs))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> MusterWork:
        return self.allgather_into_tensor_coalesced([output], [input])

    def allgather_into_tensor_coalesced(self, outputs: Pieces, inputs: Pieces, *args: Any, **kwargs: Any) -> MusterWork:
        pairs = [(self._split(out, one), one.detach().reshape(-1)) for out, one in zip(outputs, inputs)]
        return self._all_gather(pairs, outputs)

    def _all_gather(
        self,
        pairs: Sequence[tuple[Pieces, torch.Tensor]],
        result: Any,
        finish: Callable[[], object] = lambda: None,
    ) -> MusterWork:
        inputs, outputs = [one for _, one in pairs], [room for rooms, _ in pairs for room in rooms]
        work = self._work(f"all_gather {names(inputs)}", result, reads=inputs, writes=outputs)
        sends = [on_host(tensor) for tensor in inputs]
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for buffers, tensor in pairs:
            buffers[self._rank].detach().copy_(tensor.detach())
            for peer in self._peers:
                receives[peer].append(receive_buffer(buffers[peer], work))
        sends = without_overlap(sends, [buffer for buffers in receives.values() for buffer in buffers])
        return self._exchange(dict.fromkeys(self._peers, sends), receives, work.deliver(finish))

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> MusterWork:
        opts = options_of(dist.ReduceScatterOptions, args, kwargs)
        outputs, inputs = tensor_list(outputs), tensor_lists(inputs)
        check_scattered("reduce_scatter", outputs, inputs, self._rank, self._size)
        return self._reduce_scatter(list(zip(outputs, inputs)), opts.reduceOp, outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> MusterWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], *args, **kwargs)

    def reduce_scatter_tensor_coalesced(self, outputs: Pieces, inputs: Pieces, *args: Any, **kwargs: Any) -> MusterWork:
        opts = options_of(dist.ReduceScatterOptions, args, kwargs)
        pairs = [(out, self._split(one, out)) for out, one in zip(outputs, inputs)]
        return self._reduce_scatter(pairs, opts.reduceOp, outputs)

    def _reduce_scatter(self, pairs: Sequence[tuple[torch.Tensor, Pieces]], operation: Any, result: Any) -> MusterWork:
        firsts, outputs = [pieces[0] for _, pieces in pairs], [output for output, _ in pairs]
        reducers = [Reducer(operation, self._size, first.dtype) for first in firsts]
        name = f"reduce_scatter {names(firsts, reducers)}"
        work = self._work(name, result, reads=[piece for _, pieces in pairs for piece in pieces], writes=outputs)
        sends: dict[int, Pieces] = {peer: [] for peer in self._peers}
        receives: dict[int, Pieces] = {peer: [] for peer in self._peers}
        for (output, pieces), reducer in zip(pairs, reducers):
            own_piece = on_host(pieces[self._rank])
            buffers = {peer: torch.empty_like(own_piece) for peer in self._peers}
            for peer, buffer in buffers.items():
                sends[peer].append(on_host(pieces[peer]))
                receives[peer].append(buffer)

            def reduce(
                output: torch.Tensor, own_piece: torch.Tensor, buffers: dict[int, Any], reducer: Reducer
            ) -> None:
                terms = [own_piece if number == self._rank else buffers[number] for number in range(self._size)]
                total = torch.empty_like(own_piece)
                reducer.reduce(terms, 0, total)
                output.detach().copy_(total.view(output.shape))

            work.deliver(functools.partial(reduce, output, own_piece, buffers, reducer))
        return self._exchange(sends, receives, work)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any,
        input_split_sizes: Any,
        *args: Any,
        **kwargs: Any,
    ) -> MusterWork:
        outputs, inputs = self._rows(output, output_split_sizes), self._rows(input, input_split_sizes)
        return self._all_to_all(outputs, inputs, [output])

    def alltoall(self, outputs: Pieces, inputs: Pieces, *args: Any, **kwargs: Any) -> MusterWork:
        for tensors in (outputs, inputs):
            if len(tensors) != self._size:
                raise InvalidArgument("all_to_all", f"{len(tensors)} tensors for {self._size} members")
        return self._all_to_all(outputs, inputs, outputs)

    def _all_to_all(self, outputs: Pieces, inputs: Pieces, result: Any) -> MusterWork:
        check_alike("all_to_all", [*inputs, *outputs], inputs[0], sizes=False)
        if outputs[self._rank].numel() != inputs[self._rank].numel():
            raise InvalidArgument("all_to_all", "what this member keeps has another size than its room")
        work = self._work(f"all_to_all {names(inputs[:1])}", result, reads=inputs, writes=outputs)
        hosts = without_overlap([on_host(tensor) for tensor in inputs], outputs)
        receives = {peer: [receive_buffer(outputs[peer], work)] for peer in self._peers}
        outputs[self._rank].detach().copy_(hosts[self._rank].view(outputs[self._rank].shape))
        return self._exchange({peer: [hosts[peer]] for peer in self._peers}, receives, work)

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> MusterWork:
        opts = options_of(dist.GatherOptions, args, kwargs)
        outputs, inputs, root = tensor_lists(outputs), tensor_list(inputs), opts.rootRank
        check_root("gather", root, self._size)
        tensor, is_root = check_single("gather", inputs, "input "), self._rank == root
        if is_root:
            check_of_members("gather", outputs, tensor, self._size, "output")
        elif outputs:
            raise InvalidArgument("gather", "requires empty output on non-root")
        buffers = outputs[0] if is_root else []
        work = self._work(f"gather to {root} {names(inputs)}", buffers, reads=inputs, writes=buffers)
        if not is_root:
            return self._exchange({root: [on_host(tensor)]}, {}, work)
        buffers[root].detach().copy_(tensor.detach())
        return self._exchange({}, {peer: [receive_buffer(buffers[peer], work)] for peer in self._peers}, work)

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> MusterWork:
        opts = options_of(dist.ScatterOptions, args, kwargs)
        outputs, inputs, root = tensor_list(outputs), tensor_lists(inputs), opts.rootRank
        check_root("scatter", root, self._size)
        tensor, is_root = check_single("scatter", outputs, "output "), self._rank == root
        if is_root:
            check_of_members("scatter", inputs, tensor, self._size, "input")
        elif inputs:
            raise InvalidArgument("scatter", "requires empty input on non-root")
        pieces = inputs[0] if is_root else []
        work = self._work(f"scatter from {root} {names(outputs)}", outputs, reads=pieces, writes=outputs)
        if not is_root:
            return self._exchange({}, {root: [receive_buffer(tensor, work)]}, work)
        hosts = without_overlap([on_host(part) for part in pieces], outputs)
        tensor.detach().copy_(hosts[root].view(tensor.shape))
        return self._exchange({peer: [hosts[peer]] for peer in self._peers}, {}, work)

    def barrier(self, *args: Any, **kwargs: Any) -> MusterWork:
        opts = options_of(dist.BarrierOptions, args, kwargs)
        empty = {peer: [torch.empty(0, dtype=torch.uint8, device="cpu")] for peer in self._peers}
        seconds = max(0.0, opts.timeout.total_seconds())
        return self._exchange(empty, empty, self._work("barrier", [], seconds=seconds))

    # aliases
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _split(self, tensor: torch.Tensor, piece: torch.Tensor) -> Pieces:
        if tensor.numel() != self._size * piece.numel() or tensor.dtype != piece.dtype:
            expected = f"{self._size} times {piece.numel()} of {piece.dtype}"
            raise ValueError(f"{BACKEND}: {tensor.numel()} numbers of {tensor.dtype} are not {expected}")
        if not tensor.numel():
            return [piece.detach().view(-1)] * self._size
        try:
            return list(tensor.detach().view(self._size, -1))
        except RuntimeError as error:
            problem = f"the {list(tensor.shape)} tensor of all members is not contiguous"
            raise ValueError(f"{BACKEND}: {problem}; pass tensor.contiguous()") from error

    def _rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Pieces:
        if not tensor.dim():
            raise ValueError(f"{BACKEND}: all_to_all_single divides rows, and a 0-dim tensor has none; reshape it")
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


give_monitored_barrier(dist)
dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda", "mps"])
