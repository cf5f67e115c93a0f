"""Tensors as the mesh takes them: contiguous memory of the CPU, reduced in rank order; and the operations on them as
``torch.distributed`` sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from training.exchange.mesh import Mesh
from training.exchange.reduction import Reduction
from training.exchange.sealing import MAX_FRAME

BACKEND = "muster"

Pieces = list[torch.Tensor]

_PIECE = 64 << 10
"""Bytes of a piece where the vector is short; in a long one frames are longer, of which each costs processor time."""


def view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    data: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()  # numpy's stubs for 3.10 know no Buffer
    return memoryview(data)


def on_host(tensor: torch.Tensor, filled: bool = True) -> torch.Tensor:
    """Return a contiguous CPU tensor with the contents, or only with room for them; ``tensor`` itself if it is one."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return tensor.to("cpu").contiguous() if filled else torch.empty(tensor.shape, dtype=tensor.dtype)


_OPERATORS: tuple[tuple[Any, Callable[..., torch.Tensor]], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.BAND, torch.bitwise_and),
    (dist.ReduceOp.BOR, torch.bitwise_or),
    (dist.ReduceOp.BXOR, torch.bitwise_xor),
)


class Reducer:
    """The arithmetic of one ``ReduceOp``, in rank order.

    Raises:
        NotImplementedError: the operation needs a factor (PREMUL_SUM).
    """

    def __init__(self, operation: Any, members: int) -> None:
        found = [function for known, function in _OPERATORS if operation == known]
        if not found:
            raise NotImplementedError(f"{BACKEND} has no reduction {operation}")
        self._function = found[0]
        self._divisor = members if operation == dist.ReduceOp.AVG else 0

    def reduce(self, terms: Sequence[torch.Tensor], own: int, out: torch.Tensor) -> None:
        """Reduce ``terms`` into ``out``; where that is the memory of ``terms[own]``, the others may be overwritten."""
        if len(terms) == 1:
            out.copy_(terms[0])
        result = terms[0]
        for number, term in enumerate(terms[1:], 1):
            into = out if number >= own else terms[0]
            result = self._function(result, term, out=into)
        if self._divisor:
            out.div_(self._divisor)


class TensorReduction(Reduction):
    """An all-reduce of a flat tensor in place, by equal shares."""

    def __init__(self, values: torch.Tensor, mesh: Mesh, reducer: Reducer) -> None:
        members, rank = mesh.members, mesh.rank
        self._values = values
        self._members = members
        self._rank = rank
        self._pool = mesh.rooms
        self._reducer = reducer
        share = -(-values.numel() // len(members))
        share = -(-share // 64) * 64
        piece = min(MAX_FRAME, max(_PIECE, share * values.element_size() // 16))
        self._step = piece // values.element_size()
        self._bounds = {
            member: (min(number * share, values.numel()), min((number + 1) * share, values.numel()))
            for number, member in enumerate(members)
        }
        self.pieces = {member: -(-(stop - start) // self._step) for member, (start, stop) in self._bounds.items()}
        start, stop = self._bounds[rank]
        self._rooms = {peer: self._pool.take((stop - start) * values.element_size()) for peer in mesh.peers}

    def _piece(self, owner: int, piece: int) -> tuple[int, int]:
        start, stop = self._bounds[owner]
        return start + piece * self._step, min(start + (piece + 1) * self._step, stop)

    def contribution(self, owner: int, piece: int) -> memoryview:
        start, stop = self._piece(owner, piece)
        return view(self._values[start:stop])

    def room(self, rank: int, piece: int) -> memoryview:
        start, stop = self._piece(self._rank, piece)
        width = self._values.element_size()
        begin = piece * self._step * width
        return memoryview(self._rooms[rank])[begin : begin + (stop - start) * width]

    def add_up(self, piece: int, sizes: Mapping[int, int]) -> memoryview:
        start, stop = self._piece(self._rank, piece)
        own = self._values[start:stop]
        if any(size != own.numel() * own.element_size() for size in sizes.values()):
            raise ValueError("members reduce tensors of different sizes")
        terms = [
            own if member == self._rank else torch.frombuffer(self.room(member, piece), dtype=own.dtype)
            for member in self._members
        ]
        self._reducer.reduce(terms, self._members.index(self._rank), own)
        return view(own)

    outcome_room = contribution

    def end(self) -> None:
        self._pool.give_back(list(self._rooms.values()), 4 * len(self._members))


class MusterWork(dist.Work):
    """Complete when its parts are; then results are copied to where they belong."""

    def __init__(self, result: Any, parts: int = 1) -> None:
        super().__init__()
        self._result = result
        self._left = parts
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._deliveries: list[Callable[[], object]] = []
        self._future: Future[Any] = Future()

    def then(self, delivery: Callable[[], object]) -> MusterWork:
        """Have ``delivery`` done when all parts are complete."""
        self._deliveries.append(delivery)
        return self

    def copy_back(self, target: torch.Tensor, host: torch.Tensor) -> MusterWork:
        """Copy ``host`` to ``target`` in the end, if it is other memory."""
        if host.device != target.device or host.data_ptr() != target.data_ptr():
            self.then(lambda: target.detach().copy_(host))
        return self

    def part_ended(self, error: Exception | None) -> None:
        """One part is complete."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            try:
                for delivery in self._deliveries:
                    delivery()
            except Exception as failure:  # noqa: BLE001 - whoever waits must get it
                self._error = failure
        self._deliveries.clear()
        self._ended.set()
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._ended.wait(timeout.total_seconds() or None):
            raise RuntimeError(f"{BACKEND}: no result after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise RuntimeError(f"{BACKEND}: {self._error}") from self._error
        return True

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()
