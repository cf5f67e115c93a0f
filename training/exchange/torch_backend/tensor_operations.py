"""Tensors in the form the mesh takes: contiguous CPU memory, reduced in rank order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from training.exchange.links.sealing import MAX_FRAME
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.reduction import Reduction
from training.exchange.staging import to_host
from training.exchange.torch_backend.memory_order import any_in_common, overlap, span
from training.exchange.torch_backend.work import BACKEND, MusterWork

Pieces = list[torch.Tensor]

_PIECE = 256 << 10
"""Minimum bytes of a piece: each costs processor time."""


def view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor."""
    if not tensor.numel():
        return memoryview(bytearray())
    data: Any = np.asarray(_Memory(tensor.detach()))  # numpy's stubs for 3.10 know no Buffer
    return memoryview(data)


class _Memory:
    """The bytes of a tensor for numpy, which keeps this object alive. ``Tensor.numpy`` would make its storage
    non-resizable, and FSDP resizes its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        size = tensor.numel() * tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (tensor.data_ptr(), False),
        }


def on_host(tensor: torch.Tensor, filled: bool = True) -> torch.Tensor:
    """Return a contiguous CPU tensor with the contents, or an uninitialised one; ``tensor`` itself if it is one."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    if not filled:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return to_host([tensor], tensor.dtype).view(tensor.shape)


def receive_buffer(tensor: torch.Tensor, work: MusterWork) -> torch.Tensor:
    """Return a host buffer for the contents that ``tensor`` will have when ``work`` is complete."""
    buffer = on_host(tensor, filled=False)
    work.copy_back(tensor, buffer)
    return buffer


def without_overlap(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> Pieces:
    """Return the tensors, none of which shares memory with another or with ``others``: copies if need be."""
    spans, used = [span(tensor) for tensor in tensors], [span(other) for other in others]
    if not overlap(spans, used) and not any_in_common(spans):
        return list(tensors)
    return [tensor.clone() for tensor in tensors]


_OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


@functools.cache
def _works(name: str, dtype: torch.dtype) -> bool:
    probe = torch.ones(1, dtype=dtype, device="cpu")
    try:
        _OPERATORS[name](probe, probe, out=probe)
        if name == "AVG":
            probe.div_(1)
    except (RuntimeError, NotImplementedError):
        return False
    return True


class Reducer:
    """The arithmetic of one ``ReduceOp``, in rank order.

    Args:
        dtype: of the tensors, if it is to be checked.

    Raises:
        NotImplementedError: the operation needs a factor (PREMUL_SUM), or is undefined for ``dtype``. All members
            detect that before anything is sent.
    """

    def __init__(self, operation: Any, members: int, dtype: torch.dtype = torch.float32) -> None:
        self.name = next(
            (name for name in dist.ReduceOp.RedOpType.__members__ if operation == getattr(dist.ReduceOp, name)), ""
        )
        if self.name not in _OPERATORS or not _works(self.name, dtype):
            raise NotImplementedError(f"{BACKEND} has no reduction {self.name} of {dtype}")
        self._function = _OPERATORS[self.name]
        self._divisor = members if self.name == "AVG" else 0

    def reduce(self, terms: Sequence[torch.Tensor], own_index: int, out: torch.Tensor) -> None:
        """Reduce ``terms`` into ``out``; if that is the memory of ``terms[own_index]``, the others may be
        overwritten."""
        if len(terms) == 1:
            out.copy_(terms[0])
        result = terms[0]
        for number, term in enumerate(terms[1:], 1):
            into = out if number >= own_index else terms[0]
            result = self._function(result, term, out=into)
        if self._divisor:
            out.div_(self._divisor)


def names(tensors: Sequence[torch.Tensor], reducers: Sequence[Reducer] = ()) -> str:
    """Describe what is exchanged, equally on all members: types, and shapes and operations where numbers are
    reduced."""
    kinds = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    for number, (tensor, reducer) in enumerate(zip(tensors, reducers)):
        kinds[number] += f" {reducer.name} {[size for size in tensor.shape if size != 1]}"
    return ", ".join(kinds)


class TensorReduction(Reduction):
    """An in-place all-reduce of a flat tensor, by equal shards."""

    def __init__(self, values: torch.Tensor, mesh: Mesh, reducer: Reducer) -> None:
        members, rank = mesh.members, mesh.rank
        self._values = values
        self._members = members
        self._rank = rank
        self._reducer = reducer
        shard = -(-values.numel() // len(members))
        shard = -(-shard // 64) * 64
        piece = min(MAX_FRAME, max(_PIECE, shard * values.element_size() // 4))
        self._step = piece // values.element_size()
        self._bounds = {
            member: (min(number * shard, values.numel()), min((number + 1) * shard, values.numel()))
            for number, member in enumerate(members)
        }
        self.pieces = {member: -(-(stop - start) // self._step) for member, (start, stop) in self._bounds.items()}
        start, stop = self._bounds[rank]
        self._buffers = {peer: mesh.buffer_pool.take((stop - start) * values.element_size()) for peer in mesh.peers}

    def _piece(self, owner: int, piece: int) -> tuple[int, int]:
        start, stop = self._bounds[owner]
        return start + piece * self._step, min(start + (piece + 1) * self._step, stop)

    def contribution(self, owner: int, piece: int) -> Sequence[memoryview]:
        return (self.outcome_buffer(owner, piece),)

    def contribution_buffer(self, rank: int, piece: int) -> memoryview:
        start, stop = self._piece(self._rank, piece)
        width = self._values.element_size()
        begin = piece * self._step * width
        return self._buffers[rank][begin : begin + (stop - start) * width]

    def reduce_piece(self, piece: int, sizes: Mapping[int, int]) -> memoryview:
        start, stop = self._piece(self._rank, piece)
        own_piece = self._values[start:stop]
        if any(size != own_piece.numel() * own_piece.element_size() for size in sizes.values()):
            raise ValueError("members reduce tensors of different sizes")
        terms = [
            own_piece
            if member == self._rank
            else torch.frombuffer(self.contribution_buffer(member, piece), dtype=own_piece.dtype)
            for member in self._members
        ]
        with torch.inference_mode(self._values.is_inference()):
            self._reducer.reduce(terms, self._members.index(self._rank), own_piece)
        return view(own_piece)

    def outcome_buffer(self, owner: int, piece: int) -> memoryview:
        start, stop = self._piece(owner, piece)
        return view(self._values[start:stop])
