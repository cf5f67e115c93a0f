"""Every collective against arithmetic of numpy in one process: what each member of each world must hold."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "bfloat16", "float16", "float32", "float64", "complex64")
LONG = (70_001,)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (3, 5), LONG)


@functools.cache
def numbers(rank: int, salt: int, more: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return normal numbers; all types and reductions of one shape begin with the same ones."""
    return torch.from_numpy(np.asarray(np.random.default_rng([rank, salt, more]).normal(0, 3, shape)))


def drawn(rank: int, shape: tuple[int, ...], name: str, salt: int = 0) -> torch.Tensor:
    """Return what ``rank`` begins with; any member can draw it."""
    whole = numbers(rank, salt, len(shape), shape).clone()
    if name == "complex64":
        return torch.complex(whole, numbers(rank, salt, 99, shape)).to(torch.complex64)
    return (whole > 0) if name == "bool" else whole.to(getattr(torch, name))


def with_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory that is not contiguous."""
    room = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    room[..., 0] = tensor
    return room[..., 0]


def reduced(terms: list[torch.Tensor], name: str) -> torch.Tensor:
    """Reduce in rank order, one rounding a step, as numpy does it; bfloat16, which it lacks, through fp32."""
    kind = terms[0].dtype
    arrays = [one.float().numpy() if kind == torch.bfloat16 else one.numpy() for one in terms]
    step: Callable[..., Any] = {"SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MAX": np.maximum,
                                "MIN": np.minimum, "BAND": np.bitwise_and, "BOR": np.bitwise_or,
                                "BXOR": np.bitwise_xor}[name]  # fmt: skip

    def rounded(array: Any) -> Any:
        tensor = torch.from_numpy(np.asarray(array)).to(kind)
        return tensor.float().numpy() if kind == torch.bfloat16 else tensor.numpy()

    total = functools.reduce(lambda a, b: rounded(step(a, b)), arrays)
    total = rounded(total / len(terms)) if name == "AVG" else total
    return torch.from_numpy(np.asarray(total)).to(kind)


def operations(name: str) -> tuple[str, ...]:
    """The reductions that mean something for a type."""
    if name == "complex64":
        return ("SUM",)  # numpy rounds a complex quotient otherwise
    if name in ("bool", "uint8", "int8", "int16", "int32", "int64"):
        return "SUM", "PRODUCT", "MAX", "MIN", "BAND", "BOR", "BXOR"
    return "SUM", "AVG", "PRODUCT", "MAX", "MIN"


class Findings(list[str]):
    def same(self, what: str, found: torch.Tensor, right: torch.Tensor) -> None:
        good = found.dtype == right.dtype and found.shape == right.shape
        if not good or not torch.equal(found, right.to(found.dtype)):
            self.append(f"{what}: {found.flatten()[:3].tolist()} for {right.flatten()[:3].tolist()}")


def reductions(rank: int, world: int) -> list[str]:
    wrong = Findings()
    for name in TYPES:
        for salt, shape in enumerate(SHAPES):
            for operation in operations(name) if salt in (3, 4) else ("SUM",):
                op = getattr(dist.ReduceOp, operation)
                terms = [drawn(other, shape, name, salt) for other in range(world)]
                right, what = reduced(terms, operation), f"{operation} {name} {shape}"
                for layout in (torch.clone, with_gaps):
                    value = layout(terms[rank])
                    dist.all_reduce(value, op)
                    wrong.same(f"all_reduce {what}", value, right)
                value = terms[rank].clone()
                dist.reduce(value, world - 1, op)
                if rank == world - 1:
                    wrong.same(f"reduce {what}", value, right)
                sizes = [other + 1 for other in range(world)] if shape else [1] * world
                pieces = [[drawn(here, (size,), name, 7) for size in sizes] for here in range(world)]
                if name != "complex64":
                    out = with_gaps(torch.zeros_like(pieces[rank][rank]))
                    dist.reduce_scatter(out, pieces[rank], op)
                    wrong.same(f"reduce_scatter {what}", out, reduced([row[rank] for row in pieces], operation))
                    out = torch.zeros(2, dtype=value.dtype)
                    rows = [drawn(here, (2 * world,), name, 8) for here in range(world)]
                    dist.reduce_scatter_tensor(out, rows[rank], op)
                    part = slice(2 * rank, 2 * rank + 2)
                    wrong.same(f"reduce_scatter_tensor {what}", out, reduced([row[part] for row in rows], operation))
    return wrong


def movements(rank: int, world: int) -> list[str]:
    wrong = Findings()
    for name in (*TYPES, "complex128"):
        for salt, shape in enumerate(SHAPES):
            if shape == LONG and name not in ("bool", "bfloat16", "complex128"):
                continue  # bytes are moved, of 1, 2 and 16 an element
            kind = "complex64" if name == "complex128" else name
            all_ = [drawn(other, shape, kind, salt).to(getattr(torch, name)) for other in range(world)]
            own, what = all_[rank], f"{name} {shape}"
            for layout in (torch.clone, with_gaps):
                value = layout(own)
                dist.broadcast(value, world - 1)
                wrong.same(f"broadcast {what}", value, all_[-1])
                rooms = [layout(torch.zeros_like(own)) for _ in range(world)]
                dist.all_gather(rooms, layout(own))
                for found, right in zip(rooms, all_):
                    wrong.same(f"all_gather {what}", found, right)
                rooms = [layout(torch.zeros_like(own)) for _ in range(world)]
                dist.gather(layout(own), rooms if rank == 0 else None, 0)
                for found, right in zip(rooms if rank == 0 else [], all_):
                    wrong.same(f"gather {what}", found, right)
                room = layout(torch.zeros_like(own))
                dist.scatter(room, [layout(one) for one in all_] if rank == 0 else None, 0)
                wrong.same(f"scatter {what}", room, own)
                room = layout(torch.zeros_like(own))
                works = [dist.isend(layout(own), (rank + 1) % world), dist.isend(own, (rank + 1) % world)]
                for _ in range(2):
                    dist.recv(room, (rank - 1) % world)
                    wrong.same(f"recv {what}", room, all_[rank - 1])
                for work in works:
                    work.wait()
            whole = torch.zeros((world, *shape), dtype=own.dtype)
            dist.all_gather_into_tensor(whole.flatten() if not shape else whole.flatten(0, 1), own)
            if own.numel():
                wrong.same(f"all_gather_into_tensor {what}", whole, torch.stack(all_))
        rows = [[drawn(here, ((here + there) % 3, 2), kind, there) for there in range(world)] for here in range(world)]
        out = [torch.zeros_like(row[rank]) for row in rows]
        dist.all_to_all(out, rows[rank])
        joined = torch.zeros_like(torch.cat(out))
        sizes = [len(row[rank]) for row in rows], [len(one) for one in rows[rank]]
        dist.all_to_all_single(joined, torch.cat(rows[rank]), *sizes)
        for found, row in zip(out, rows):
            wrong.same(f"all_to_all {name}", found, row[rank])
        wrong.same(f"all_to_all_single {name}", joined, torch.cat([row[rank] for row in rows]))
        uneven = [torch.zeros(here, dtype=own.dtype) for here in range(world)]
        dist.all_gather(uneven, torch.full((rank,), rank, dtype=own.dtype))
        for here, found in enumerate(uneven):
            wrong.same(f"all_gather of different sizes {name}", found, torch.full((here,), here, dtype=own.dtype))
    own = [[drawn(here, (number + 1,), "float32", number) for number in range(world)] for here in range(world)]
    together = [[torch.zeros_like(one) for one in row] for row in own]
    dist.all_gather_coalesced(together, own[rank])
    for here in range(world):
        wrong.same("all_gather_coalesced", torch.cat(together[here]), torch.cat(own[here]))
    right, left = (rank + 1) % world, (rank - 1) % world
    rooms = [torch.empty(3), torch.empty(3)]
    requests = [dist.isend(drawn(rank, (3,), "float32", tag), right, tag=tag) for tag in (1, 2)]
    requests += [dist.irecv(rooms[tag - 1], left, tag=tag) for tag in (2, 1)]
    for request in requests:
        request.wait()
    for tag in (1, 2):
        wrong.same(f"recv of tag {tag}", rooms[tag - 1], drawn(left, (3,), "float32", tag))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    box = [{"said": 1}] if rank == 0 else [None]
    dist.broadcast_object_list(box)
    if (objects, box) != ([{"rank": here} for here in range(world)], [{"said": 1}]):
        wrong.append(f"objects: {objects}, {box}")
    return wrong


def side_by_side(rank: int, world: int) -> list[str]:
    """Groups that overlap, with reductions under way in all of them, waited for in another order on each member."""
    wrong = Findings()
    sets = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
    groups = [dist.new_group(ranks) for ranks in sets]
    sizes = np.random.default_rng(1).integers(1, 90_000, 20).tolist()
    works = []
    for number, size in enumerate(sizes):
        ranks, group = sets[number % 4], groups[number % 4]
        if rank in ranks:
            terms = [drawn(other, (size,), "float32", number) for other in ranks]
            value = terms[ranks.index(rank)].clone()
            works.append((dist.all_reduce(value, group=group, async_op=True), value, reduced(terms, "SUM"), number))
    for place in np.random.default_rng(rank).permutation(len(works)).tolist():
        work, value, right, number = works[place]
        work.wait()
        wrong.same(f"reduction {number}", value, right)
    return wrong


def without_gradients(rank: int, world: int) -> list[str]:
    """Tensors of ``inference_mode``, which only code inside of it may change: results come from threads of links."""
    wrong = Findings()
    with torch.inference_mode():
        for name, shape in (("short", (5, 3)), ("long", (300, 400))):
            terms = [drawn(other, shape, "float32", 1) for other in range(world)]
            for kind, value in (("", terms[rank].clone()), (" of columns", terms[rank].t().contiguous().t())):
                dist.all_reduce(value, async_op=True).wait()
                wrong.same(f"{name} reduction{kind}", value, reduced(terms, "SUM"))
                dist.broadcast(value, 0)
            room = torch.zeros(shape).t().contiguous().t()
            dist.reduce_scatter(room, [terms[rank]] * world)
            wrong.same(f"{name} reduce_scatter", room, reduced(terms, "SUM"))
    return wrong


def with_a_default_device(rank: int, world: int) -> list[str]:
    """The script makes its tensors on another device unless it says otherwise, which what is sent must not follow."""
    wrong = Findings()
    terms = [drawn(other, (5, 3), "float32", 1) for other in range(world)]
    value, room = terms[rank].clone().t(), terms[rank].clone().t()
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (world,), check_invariants=True)
    with torch.device("meta"):
        dist.all_reduce(value)
        dist.broadcast(room, 0)
        dist.all_reduce(sparse)
        dist.barrier()
        dist.monitored_barrier()
    wrong.same("all_reduce", value.t(), reduced(terms, "SUM"))
    wrong.same("broadcast", room.t(), terms[0])
    wrong.same("sparse all_reduce", sparse.to_dense(), torch.ones(world))
    return wrong
