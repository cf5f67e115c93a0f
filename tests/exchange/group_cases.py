"""What goes wrong in a group, as one member sees it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.waiting import until
from training.exchange.links.link import Outgoing

LONG = 100_000
"""Elements that no kernel buffer of a link takes at once, nor one message."""


def told(call: Callable[[], Any]) -> str:
    """Return the error of a call, or an empty text."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


DISAGREE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "type": (
        lambda g: dist.all_reduce(torch.ones(4), group=g),
        lambda g: dist.all_reduce(torch.ones(4).int(), group=g),
    ),
    "type, long": (
        lambda g: dist.all_reduce(torch.ones(LONG), group=g),
        lambda g: dist.all_reduce(torch.ones(LONG).int(), group=g),
    ),
    "shape": (
        lambda g: dist.all_reduce(torch.ones(2, 3), group=g),
        lambda g: dist.all_reduce(torch.ones(3, 2), group=g),
    ),
    "size": (lambda g: dist.all_reduce(torch.ones(4), group=g), lambda g: dist.all_reduce(torch.ones(5), group=g)),
    "small and long": (
        lambda g: dist.all_reduce(torch.ones(4), group=g),
        lambda g: dist.all_reduce(torch.ones(LONG), group=g),
    ),
    "nothing": (lambda g: dist.all_reduce(torch.ones(0), group=g), lambda g: dist.all_reduce(torch.ones(5), group=g)),
    "operation": (
        lambda g: dist.all_reduce(torch.ones(4), group=g),
        lambda g: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, group=g),
    ),
    "collective": (
        lambda g: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=g),
        lambda g: dist.all_reduce(torch.ones(4), group=g),
    ),
    "type of a part": (
        lambda g: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * 2, group=g),
        lambda g: dist.reduce_scatter(torch.ones(2).int(), [torch.ones(2).int()] * 2, group=g),
    ),
    "size of a part": (
        lambda g: dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=g),
        lambda g: dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5), group=g),
    ),
    "rows": (
        lambda g: dist.all_to_all_single(torch.ones(3), torch.ones(4), [2, 1], [2, 2], group=g),
        lambda g: dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [2, 2], group=g),
    ),
    "type of a message": (
        lambda g: (dist.send(torch.ones(4), 1, group=g), dist.recv(torch.ones(1), 1, group=g)),
        lambda g: dist.recv(torch.ones(4).int(), 0, group=g),
    ),
    "size of a message": (
        lambda g: (dist.send(torch.ones(4), 1, group=g), dist.recv(torch.ones(1), 1, group=g)),
        lambda g: dist.recv(torch.ones(5), 0, group=g),
    ),
}


def disagree(rank: int, world: int) -> list[str]:
    """Two members, two different operations; a new group for each pair of them."""
    found = []
    for pair in DISAGREE.values():
        group: Any = dist.new_group()
        group.pairs.seconds = 10.0  # enough to connect a pair; with the group's own minute, a mistake would take long
        found.append(told(lambda: pair[rank](group)))  # noqa: B023 - called at once
        dist.destroy_process_group(group)
    return found


def refused(rank: int, world: int) -> list[str]:
    """What no group can do, told before anything is sent: the group goes on."""
    ints, sparse = torch.ones(3, dtype=torch.int64), torch.eye(2).to_sparse()
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(ints, dist.ReduceOp.AVG),
        lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.BOR),
        lambda: dist.reduce(torch.ones(LONG), 0, dist.ReduceOp.BXOR),
        lambda: dist.all_reduce(torch.ones(3), torch._C._distributed_c10d._make_nccl_premul_sum(2.0)),
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * world + 1)),
        lambda: dist.all_gather_into_tensor(torch.ones(3 * world), torch.ones(1)),
        lambda: dist.all_to_all_single(torch.ones(world + 1), torch.ones(world + 1)),
        lambda: dist.all_reduce(sparse, dist.ReduceOp.MAX),
        lambda: dist.broadcast(sparse, 0),
        lambda: dist.isend(torch.ones(1), (rank + 1) % world, tag=-1),
        lambda: dist.irecv(torch.ones(1), (rank + 1) % world, tag=1 << 20),
        lambda: dist.recv(torch.ones(1)),
    ]
    found = [told(call) for call in calls]
    one = torch.ones(2)
    dist.all_reduce(one)
    return [*found, "" if one.tolist() == [world, world] else "the group is out of step"]


def own_order(rank: int, world: int) -> float:
    """A small reduction is begun before a message, and waited for after it; elsewhere it is the other way round."""
    value, message = torch.full((2,), float(rank + 1)), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        dist.send(message, 1)
        work.wait()
    else:
        dist.recv(message, 0)
        dist.all_reduce(value)
    return float(value[0])


def own_groups(rank: int, world: int) -> list[Any]:
    """A callback may wait for a further operation; coalesced ones; groups made and destroyed; a store used again."""
    value = torch.full((3,), float(rank))

    def once_more(future: Any) -> Any:
        second = future.value()[0].clone()
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    found = [dist.all_reduce(value, async_op=True).get_future().then(once_more).wait().tolist()]
    one, other = torch.full((2,), float(rank)), torch.full((LONG,), float(rank))
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
        dist.all_reduce(one)
        dist.all_reduce(other)
    together.wait()
    with c10d._coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(one, 0)
    found += [one.tolist(), sorted(set(other.tolist()))]
    for _ in range(10):
        group = dist.new_group()
        dist.all_reduce(one, group=group)
        dist.destroy_process_group(group)
    found.append(one.tolist())
    store = torch._C._distributed_c10d.FileStore(os.path.dirname(os.environ["MUSTER_CERTIFICATES"]) + "/twice", world)
    dist.destroy_process_group()
    for _ in range(2):
        dist.init_process_group("muster", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
        dist.all_reduce(one)
        dist.destroy_process_group()
    dist.init_process_group("muster", store=store, rank=rank, world_size=world)
    return [*found, one.tolist()]


KINDS: dict[str, Callable[[Any, int, int], Any]] = {
    "small": lambda g, rank, world: dist.all_reduce(torch.ones(2), group=g),
    "small, later": lambda g, rank, world: dist.all_reduce(torch.ones(2), group=g, async_op=True).wait(),
    "long": lambda g, rank, world: dist.all_reduce(torch.ones(20 * LONG), group=g),
    "reduce": lambda g, rank, world: dist.reduce(torch.ones(20 * LONG), 0, group=g),
    "reduce_scatter": lambda g, rank, world: dist.reduce_scatter_tensor(
        torch.ones(LONG), torch.ones(world * LONG), group=g
    ),
    "all_gather": lambda g, rank, world: dist.all_gather_into_tensor(
        torch.ones(world * LONG), torch.ones(LONG), group=g
    ),
    "all_to_all": lambda g, rank, world: dist.all_to_all_single(
        torch.ones(world * LONG), torch.ones(world * LONG), group=g
    ),
    "broadcast": lambda g, rank, world: dist.broadcast(torch.ones(40 * LONG), 0, group=g),
    "scatter": lambda g, rank, world: dist.scatter(
        torch.ones(40 * LONG), [torch.ones(40 * LONG)] * world if rank == 0 else None, 0, group=g
    ),
    "barrier": lambda g, rank, world: dist.barrier(group=g),
    "recv": lambda g, rank, world: dist.recv(torch.ones(2), world - 1, group=g),
    "send": lambda g, rank, world: dist.send(torch.ones(40 * LONG), world - 1, group=g),
}


def stands_still(rank: int, world: int) -> list[str]:
    """The last member is there and takes part in nothing: the first must not wait for ever."""
    found = []
    for kind, call in KINDS.items():
        group: Any = dist.new_group()
        takes_part = threading.Thread(target=told, args=[functools.partial(call, group, rank, world)])
        is_between = 0 < rank < world - 1 and kind not in ("recv", "send")  # those are of the first and the last alone
        if is_between:
            takes_part.start()
            until(lambda: _has_sent(group) or not takes_part.is_alive())  # noqa: B023 - called at once
        dist.barrier()  # so the first need not wait for those between, and would name them for no other reason
        if rank == 0:
            group.pairs.seconds = 0.3
            found.append(told(lambda: call(group, rank, world)))  # noqa: B023
        dist.barrier()  # who gives up earlier ends its connections, and could be named by the first
        if is_between:
            group.pairs.seconds = 0.1
            takes_part.join()
        dist.destroy_process_group(group)
    return found


def _has_sent(group: Any) -> bool:
    """Whether an operation is under way, and something of all that it is to send is sent."""
    links = [link for link in group.pairs._links() if not link.idle]
    return bool(links) and all(link.bytes > link.bytes_before for link in links if isinstance(link, Outgoing))


def patience(rank: int, world: int) -> list[str]:
    """Waiting for a while ends nothing; a barrier has a time of its own."""
    found = []
    group = dist.new_group()
    value = torch.ones(LONG)
    if rank == 0:
        work = dist.all_reduce(value, async_op=True)
        found.append(told(lambda: work.wait(timedelta(seconds=0.1))))
    dist.barrier(group)
    if rank == 0:
        work.wait()
        found += [
            "" if value[0] == world else "another sum",
            told(lambda: dist.barrier(timeout=timedelta(seconds=0.1))),
        ]
    else:
        dist.all_reduce(value)
    dist.barrier(group)
    if rank:
        dist.barrier()
    return found


def dies(rank: int, world: int, kind: str) -> list[str]:
    """The last member ends in the middle of an operation; a child that it has forked lives on for a while."""
    if rank < world - 1:
        return [told(lambda: KINDS[kind](None, rank, world))]
    if os.fork() == 0:
        time.sleep(10)
        os._exit(0)
    os._exit(3)


def leaves(rank: int, world: int) -> None:
    """The interpreter ends while much is under way, and nobody has destroyed the group."""
    works = [dist.all_reduce(torch.ones(20 * LONG), async_op=True) for _ in range(5)]
    if rank == 0:
        works.append(dist.irecv(torch.ones(3), 1))
    works[0].get_future().then(lambda future: future.value()[0].sum())
    from training.exchange.torch_backend import group_base

    atexit._clear()  # what else is registered where tests run would end the process before its interpreter ends
    atexit.register(group_base.leave)
    ctypes.pythonapi.Py_Exit(7)
