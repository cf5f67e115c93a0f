"""More of what stock PyTorch does over a group: what each member has in the end, with any backend."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Two branches, of which a batch may use one."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.left, self.right = nn.Linear(width, 3), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, right: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out: torch.Tensor = self.right(hidden) if right else self.left(hidden)
        return out


def batches(rank: int, count: int = 6) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))


def state(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def unused_parameters(rank: int, world: int) -> Any:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        model(batch, right=number % 3 == 0 or (rank == 1 and number % 2 == 0)).square().sum().backward()
        optimizer.step()
    return state(model)


def accumulated(rank: int, world: int) -> Any:
    model = DistributedDataParallel(Net(), find_unused_parameters=True, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for number, batch in enumerate(batches(rank)):
        if number % 2 == 0:
            with model.no_sync():
                model(batch).square().sum().backward()
        else:
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return state(model)


def trained(model: Any, rank: int) -> list[float]:
    """Return the losses of a model that has been made parallel."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for batch in batches(rank):
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def first_fsdp(rank: int, world: int) -> Any:
    """It resizes the storages that it has exchanged."""
    torch.manual_seed(0)
    return trained(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")), rank)


def compiled(rank: int, world: int) -> Any:
    """Its buffers are synchronised while the compiler looks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5))
    return trained(torch.compile(DistributedDataParallel(model), backend="eager"), rank)


def senders(rank: int, world: int) -> Any:
    """Who sent what has been received, by number in the group."""
    group, value = dist.new_group([1, 2]), torch.full((2,), float(rank))
    if rank == 1:
        dist.send(value, 2, group)
    if rank != 2:
        return []
    work = dist.irecv(value, 1, group)
    assert work is not None
    work.wait()
    return [*value.tolist(), work.source_rank(), work._source_rank()]  # type: ignore[attr-defined]


def patience(rank: int, world: int) -> Any:
    """A group's timeout, where scripts look for it and change it."""
    backend: Any = dist.new_group(timeout=timedelta(seconds=7))._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    before = backend.options._timeout.total_seconds()
    backend._set_default_timeout(timedelta(seconds=9))
    return [before, backend.options._timeout.total_seconds()]


def uneven_inputs(rank: int, world: int) -> Any:
    net = Net()
    net.right.requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for batch in batches(rank, 3 + 2 * rank):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    return state(model)


def hooks(rank: int, world: int) -> Any:
    """Compressed gradients; those of low rank are reduced by a callback of the reduction before."""
    found = []
    for hook in (default_hooks.fp16_compress_hook, powerSGD_hook.powerSGD_hook):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 3)))
        low: Any = powerSGD_hook.PowerSGDState(dist.group.WORLD, 1, 2, min_compression_rate=0.5)
        model.register_comm_hook(low if hook is powerSGD_hook.powerSGD_hook else None, hook)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for batch in batches(rank):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        found.append(state(model))
    return found


def offloaded(rank: int, world: int) -> Any:
    """FSDP2 with its parameters on the processor, sizes that do not divide, and a checkpoint over the group."""
    torch.manual_seed(0)
    model = Net(width=11)
    for part in model.children():
        fully_shard(part, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for batch in batches(rank):
        optimizer.zero_grad()
        (model(batch) + model(batch, right=True)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    trained = {name: one.full_tensor() for name, one in model.state_dict().items()}
    folder = f"{os.path.dirname(os.environ['MUSTER_CERTIFICATES'])}/{dist.get_backend()}"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    held = {"model": model.state_dict()}
    dcp.load(held, checkpoint_id=folder)
    same = [torch.equal(held["model"][name].full_tensor(), one) for name, one in trained.items()]
    return [all(same), [one.flatten().tolist() for one in trained.values()]]


def redistributed(rank: int, world: int) -> Any:
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(7.0 * 5).view(7, 5)
    found = []
    for before, after in itertools.permutations((Shard(0), Shard(1), Replicate()), 2):
        tensor = distribute_tensor(whole, mesh, [before]).redistribute(mesh, [after])
        found.append([tensor.to_local().flatten().tolist(), tensor.full_tensor().flatten().tolist()])
    for after in (Shard(0), Shard(1), Replicate()):
        partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()], run_check=False)
        found.append([partial.redistribute(mesh, [after]).to_local().flatten().tolist()])
    torch.manual_seed(0)
    model = parallelize_module(
        Net(width=11),
        mesh,
        {"first": ColwiseParallel(use_local_output=False), "left": RowwiseParallel(), "right": RowwiseParallel()},
    )
    out = model(next(batches(0)))
    out.square().sum().backward()
    weight: Any = model.first.weight.grad
    return [*found, out.flatten().tolist(), weight.full_tensor().flatten().tolist()]


def functional(rank: int, world: int) -> Any:
    """The functional forms, a compiled function, and a data loader whose workers are forked meanwhile."""
    x, group = torch.arange(float(world)) + rank, dist.group.WORLD
    found = [
        fc.all_reduce(x, "sum", group).tolist(),
        fc.all_gather_tensor(x, 0, group).tolist(),
        fc.reduce_scatter_tensor(x, "sum", 0, group).tolist(),
        fc.all_to_all_single(x, None, None, group).tolist(),
        fc.broadcast(x, 1, group).tolist(),
    ]

    @torch.compile(backend="eager")
    def twice(value: torch.Tensor) -> torch.Tensor:
        value = value * 2
        dist.all_reduce(value)
        return value + 1

    found.append(twice(x).tolist())
    rows = torch.utils.data.TensorDataset(torch.arange(32.0).view(16, 2) + rank)
    for (batch,) in torch.utils.data.DataLoader(rows, batch_size=4, num_workers=1):
        total = batch.sum()
        dist.all_reduce(total)
        found.append([float(total)])
    return found
