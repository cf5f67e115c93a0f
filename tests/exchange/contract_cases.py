"""What torch, and what is built on it, asks of a process group: what a member finds, with any backend."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.checkpoint as dcp
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def values(rank: int) -> torch.Tensor:
    return torch.arange(4.0) + rank


def folder(name: str) -> str:
    return f"{os.path.dirname(os.environ['MUSTER_CERTIFICATES'])}/{name}-{dist.get_backend()}"


def bound_to_a_device(rank: int, world: int) -> Any:
    """As nanochat, torchtitan and FSDP2's example name their GPU, which is pretended here."""
    backend, path = dist.get_backend(), folder("bound")
    dist.destroy_process_group()
    device = torch.device("cuda", rank)
    with (
        mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("cuda")),
        mock.patch("torch.accelerator.device_count", return_value=world),
    ):
        store = dist.FileStore(path, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, device_id=device)
    total = values(rank)
    dist.all_reduce(total)
    return total.tolist()


def devices(rank: int, world: int) -> Any:
    group = c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    asked = ("name", "supports_splitting", "supports_coalescing", "supports_time_estimate", "supports_shrinking")
    return c10d._get_pg_default_device().type, torch.device("cpu") in group._device_types, [
        hasattr(backend, name) for name in asked
    ]  # fmt: skip


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def weights_from_rank_0(rank: int, world: int) -> Any:
    model, optimizer = trained()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer), options=options)
    weights = {name: value * (1 + rank) for name, value in model.state_dict().items()}
    set_model_state_dict(model, weights, options=options)
    return [one.tolist() for one in model.parameters()]


def saved_meanwhile(rank: int, world: int) -> Any:
    model, _ = trained()
    weights = {"model": model.state_dict()}
    saving: Any = dcp.async_save(weights, checkpoint_id=folder("checkpoint"))
    saving.result(60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights = {"model": model.state_dict()}
    dcp.load(weights, checkpoint_id=folder("checkpoint"))
    return [one.tolist() for one in weights["model"].values()]


def callbacks(rank: int, world: int) -> Any:
    """That of an operation that is complete is called at once; torchft relies on it."""
    work = dist.all_reduce(values(rank), async_op=True)
    work.wait()
    seen: list[int] = []
    after = work.get_future().then(lambda future: seen.append(threading.get_ident()) or future.value()[0] / 2)
    return seen == [threading.get_ident()], after.wait().tolist()


def held_by_futures(rank: int, world: int) -> Any:
    group, opts = c10d._get_default_group(), dist.GatherOptions()
    opts.rootRank = 1
    rooms = [[torch.empty(4) for _ in range(world)] for _ in range(2)]
    works = [
        group.allgather([rooms[0]], [values(rank)]),
        group.gather([rooms[1]] if rank == 1 else [], [values(rank)], opts),
        group.allreduce(values(rank)),
    ]
    return [[tensor.tolist() for tensor in work.get_future().wait()] for work in works]


def overloads(rank: int, world: int) -> Any:
    """Tensors that stand alone, and options one by one."""
    group = c10d._get_default_group()
    total, largest, sent, at_root = values(rank), values(rank), values(rank), values(rank)
    rooms, gathered, part = [torch.empty(4) for _ in range(world)], [torch.empty(4) for _ in range(world)], values(9)
    scattered, exchanged = torch.empty(4), torch.empty(4)
    group.allreduce(total).wait()
    group.allreduce(largest, dist.ReduceOp.MAX).wait()
    group.broadcast(sent, root=1).wait()
    group.reduce(at_root, 1, dist.ReduceOp.SUM, timedelta(seconds=30)).wait()
    group.allgather(rooms, values(rank)).wait()
    group.gather(gathered if rank == 0 else [], values(rank), root=0).wait()
    group.scatter(part, [values(10), values(20)] if rank == 0 else [], root=0).wait()
    group.reduce_scatter(scattered, [values(rank), values(rank + 5)]).wait()
    group.alltoall_base(exchanged, values(rank), [], []).wait()
    group.barrier(timeout=timedelta(seconds=30)).wait()
    found = [total, largest, sent, part, scattered, exchanged, *rooms, *(gathered if rank == 0 else [])]
    return [one.tolist() for one in found], at_root.tolist() if rank == 1 else []


def functional(rank: int, world: int) -> Any:
    group = dist.group.WORLD
    found = [
        fc.all_reduce(values(rank), "sum", group),
        fc.all_gather_tensor(values(rank), 0, group),
        fc.reduce_scatter_tensor(values(rank), "avg", 0, group),
        fc.all_to_all_single(values(rank), [2, 2], [2, 2], group),
        fc.permute_tensor(values(rank), [1, 0], group),
    ]
    return [one.tolist() for one in found]


def sparse(rank: int, world: int) -> Any:
    """Other entries and numbers of them on each member, none on one; and an embedding's gradients."""
    found = []
    for entries in ([[0, 2], [2]][rank], [[], [1]][rank]):
        total = torch.sparse_coo_tensor([entries], torch.ones(len(entries), 2) * (rank + 1), (4, 2))
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        found.append([total.to_dense().tolist(), work.get_future().value()[0].to_dense().tolist()])
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
    model(torch.tensor([rank, 3])).square().sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None and gradient.is_sparse
    return found, gradient.to_dense().tolist()


def one_tensor_twice_in_a_call(rank: int, world: int) -> Any:
    total = values(rank)
    dist.all_reduce_coalesced([total, total])
    return total.tolist()


def a_root_tensor(rank: int, world: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 1
    pair = [values(rank), values(rank + 10)]
    c10d._get_default_group().broadcast(pair, options).wait()
    return [one.tolist() for one in pair]


def in_the_profile(rank: int, world: int) -> Any:
    with torch.profiler.profile() as profile:
        dist.all_reduce(values(rank))
    return any("all_reduce" in event.name for event in profile.events())


def passed_together(rank: int, world: int) -> Any:
    c10d._get_default_group().monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
    c10d._get_default_group().monitored_barrier()
    return True


def late(rank: int, world: int) -> Any:
    """The last one does not come to a barrier that says so."""
    found = []
    for every in (False, True):
        group: Any = dist.new_group()
        group.monitored_barrier()  # which connects them: that may take a while
        for member in reversed(range(world - 1)):  # rank 0 last: those that come are there before it looks for them
            if rank == member:
                wait = timedelta(seconds=0.1 if rank else 0.5)
                found.append(error_of(lambda: group.monitored_barrier(wait, wait_all_ranks=every)))  # noqa: B023
            dist.barrier()
    return [[part for part in ("failed to pass monitoredBarrier", "successfully reached", "2") if part in one]
            for one in found]  # fmt: skip


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def options(kind: Any, root: int, tensor: int = 0) -> Any:
    made = kind()
    made.rootRank = root
    if hasattr(made, "rootTensor"):
        made.rootTensor = tensor
    return made


REFUSED: dict[str, Callable[[Any, int, int], Any]] = {
    "invalid root rank: -1": lambda g, rank, world: g.broadcast([values(0)], options(dist.BroadcastOptions, -1)),
    "invalid root rank: 2": lambda g, rank, world: g.broadcast([values(0)], options(dist.BroadcastOptions, world)),
    "invalid root tensor: -1": lambda g, rank, world: g.broadcast(
        [values(0)], options(dist.BroadcastOptions, rank, -1)
    ),
    "invalid root tensor: 0": lambda g, rank, world: g.broadcast([], options(dist.BroadcastOptions, rank)),
    "invalid tensor type": lambda g, rank, world: g.broadcast([values(0), values(0).int()]),
    "invalid tensor size": lambda g, rank, world: g.broadcast([values(0), torch.ones(3)]),
    "requires non-empty tensor list": lambda g, rank, world: g.allreduce([]),
    "requires non-empty tensor list ": lambda g, rank, world: g.allreduce_coalesced([]),
    "invalid tensor type ": lambda g, rank, world: g.allreduce([values(0), values(0).int()]),
    "invalid tensor size ": lambda g, rank, world: g.allreduce([values(0), torch.ones(3)]),
    "invalid root rank: 2 ": lambda g, rank, world: g.reduce([values(0)], options(dist.ReduceOptions, world)),
    "invalid root tensor: 1": lambda g, rank, world: g.reduce([values(0)], options(dist.ReduceOptions, rank, 1)),
    "requires a single-element tensor list": lambda g, rank, world: g.reduce(
        [values(0)] * 2, options(dist.ReduceOptions, rank)
    ),
    "requires non-empty input tensor list": lambda g, rank, world: g.allgather([], []),
    "requires input/output tensor lists to have the same length": lambda g, rank, world: g.allgather([], [values(0)]),
    "invalid output tensor list": lambda g, rank, world: g.allgather([[values(0)] * (world - 1)], [values(0)]),
    "invalid tensor type  ": lambda g, rank, world: g.allgather([[values(0).int()] * world], [values(0)]),
    "invalid tensor size  ": lambda g, rank, world: g.allgather([[torch.ones(3)] * world], [values(0)]),
    "output lists should be equal to world size": lambda g, rank, world: dist.all_gather_coalesced(
        [[values(0)]] * (world + 1), [values(0)], g
    ),
    "invalid size of output tensor at index 0": lambda g, rank, world: dist.all_gather_coalesced(
        [[torch.ones(0)]] * world, [values(0)], g
    ),
    "invalid root rank: 7": lambda g, rank, world: g.gather([], [values(0)], options(dist.GatherOptions, 7)),
    "requires a single-element input tensor list": lambda g, rank, world: g.gather(
        [], [], options(dist.GatherOptions, 0)
    ),
    "requires a single-element output list": lambda g, rank, world: g.gather(
        [], [values(0)], options(dist.GatherOptions, rank)
    ),
    "Incorrect output list size 1. Output list size should be 2": lambda g, rank, world: g.gather(
        [[values(0)]], [values(0)], options(dist.GatherOptions, rank)
    ),
    "requires empty output on non-root": lambda g, rank, world: g.gather(
        [[values(0)] * world], [values(0)], options(dist.GatherOptions, 1 - rank)
    ),
    "requires a single-element output tensor list": lambda g, rank, world: g.scatter(
        [], [], options(dist.ScatterOptions, 0)
    ),
    "requires a single-element input list": lambda g, rank, world: g.scatter(
        [values(0)], [], options(dist.ScatterOptions, rank)
    ),
    "Incorrect input list size 3. Input list size should be 2": lambda g, rank, world: g.scatter(
        [values(0)], [[values(0)] * 3], options(dist.ScatterOptions, rank)
    ),
    "requires empty input on non-root": lambda g, rank, world: g.scatter(
        [values(0)], [[values(0)] * world], options(dist.ScatterOptions, 1 - rank)
    ),
}
"""Calls that no backend can carry out, by the words that all have for it."""


def refused(rank: int, world: int) -> Any:
    group = c10d._get_default_group()
    errors = {words: error_of(functools.partial(call, group, rank, world)) for words, call in REFUSED.items()}
    found = [words for words, error in errors.items() if words.strip() not in error]
    total, wrong_shape = values(rank), [values(rank).view(2, 2) for _ in range(world)]
    if not error_of(lambda: group.allgather([wrong_shape], [total])):  # found late, as it is copied
        found.append("another shape")
    dist.all_reduce(total)
    return found, total.tolist()


def one_after_the_other(rank: int, world: int) -> list[bool]:
    """Two members' operations on the same memory, begun before the first one has ended: what is as if it had."""
    right = []
    for size in (4, 50_000):
        half, numbers = size // 2, torch.arange(float(size))
        total, reduced = torch.full((size,), rank + 1.0), torch.full((size,), rank + 1.0)
        part, rooms = numbers + rank, [torch.empty(size) for _ in range(world)]
        works = [dist.all_reduce(total, async_op=True) for _ in range(3)]
        works += [dist.all_reduce(part[:half], async_op=True), dist.all_reduce(part[1:], async_op=True)]
        works += [dist.all_reduce(reduced, async_op=True), dist.all_gather(rooms, reduced, async_op=True)]
        works.append(dist.reduce(reduced[::2], 0, async_op=True))
        for work in works:
            work.wait()
        twice = torch.where(numbers < half, 4 * numbers + 2, 2 * numbers + 1)
        twice[0] = 1
        right += [bool((total == 12).all()), torch.equal(part, twice), bool((torch.stack(rooms) == 3).all())]
        right.append(bool((reduced[::2] == (6 if rank == 0 else 3)).all()) and bool((reduced[1::2] == 3).all()))
        exchanged = numbers + 100 * rank
        dist.all_to_all_single(exchanged, exchanged)
        mine = numbers[:half] + rank * half
        right.append(torch.equal(exchanged, torch.cat([mine, mine + 100])))
    return right
