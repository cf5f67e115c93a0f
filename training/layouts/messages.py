"""What travels between stages: a header of fixed size that says which tensors follow, and their bytes. No pickles.

Shapes may differ from micro-batch to micro-batch. A header is checked field by field before memory is taken for what it
announces.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from profiles.errors import BadInput
from training.layouts.orders import Kind, Work

Tensors = tuple[torch.Tensor, ...]

MAGIC = b"MPL1"
"""Begins every header."""
_KINDS: tuple[Kind, ...] = ("forward", "backward")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_TENSORS, _MAX_DIMENSIONS = 4, 4
_MAX_BYTES = 1 << 32
"""Largest tensor that is received."""
_HEAD = struct.Struct("<4sBBI")
"""Magic, kind of work, number of tensors, micro-batch."""
_TENSOR = struct.Struct(f"<BBBB{_MAX_DIMENSIONS}I")
"""Element type, element type on the wire, whether a gradient is wanted, number of dimensions, sizes."""
HEADER_BYTES = _HEAD.size + _MAX_TENSORS * _TENSOR.size


@dataclass(frozen=True)
class TensorHeader:
    """A tensor that follows its header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wire: torch.dtype
    """Element type of the bytes that travel."""
    needs_gradient: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, wire: torch.dtype | None) -> TensorHeader:
        """Describe ``tensor``; ``wire``: element type on the way, ``None``: its own."""
        return cls(tuple(tensor.shape), tensor.dtype, wire or tensor.dtype, tensor.requires_grad)

    @property
    def size(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * self.wire.itemsize

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes that travel, in the memory of the host."""
        return as_bytes(tensor.detach().to("cpu", self.wire))

    def decode(self, data: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor of received bytes; it requires a gradient where the sender wants one."""
        tensor = data.view(self.wire).view(self.shape).to(device, self.dtype)
        return tensor.requires_grad_(self.needs_gradient)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's memory as flat uint8, copied only where it has gaps."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def pack_header(work: Work, headers: Sequence[TensorHeader]) -> torch.Tensor:
    """Return a header of :data:`HEADER_BYTES`.

    Raises:
        BadInput: more or other tensors than a header can describe.
    """
    if len(headers) > _MAX_TENSORS or any(len(h.shape) > _MAX_DIMENSIONS or h.dtype not in _DTYPES for h in headers):
        raise BadInput(
            f"a stage gives {', '.join(f'{h.dtype} {list(h.shape)}' for h in headers)} to the next one; at most "
            f"{_MAX_TENSORS} tensors of floating-point numbers, of {_MAX_DIMENSIONS} dimensions, can travel",
            "set layout = replicate",
        )
    data = _HEAD.pack(MAGIC, _KINDS.index(work.kind), len(headers), work.micro_batch)
    for header in headers:
        sizes = (*header.shape, *[0] * (_MAX_DIMENSIONS - len(header.shape)))
        dtypes = _DTYPES.index(header.dtype), _DTYPES.index(header.wire)
        data += _TENSOR.pack(*dtypes, header.needs_gradient, len(header.shape), *sizes)
    return torch.frombuffer(bytearray(data.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def parse_header(data: torch.Tensor, expected: Work) -> list[TensorHeader]:
    """Return the tensors that follow a header.

    Raises:
        ValueError: it is no header of ``expected``; the message continues "it sent ...".
    """
    header = data.numpy().tobytes()
    magic, kind, count, micro_batch = _HEAD.unpack_from(header)
    if magic != MAGIC or kind >= len(_KINDS) or count > _MAX_TENSORS:
        raise ValueError("no message of a pipeline")
    if (work := Work(_KINDS[kind], micro_batch)) != expected:
        raise ValueError(f"the {work.kind} of micro-batch {work.micro_batch + 1}")
    return [_parse_tensor(_TENSOR.unpack_from(header, _HEAD.size + index * _TENSOR.size)) for index in range(count)]


def _parse_tensor(fields: tuple[int, ...]) -> TensorHeader:
    dtype, wire, needs_gradient, dimensions, *sizes = fields
    if max(dtype, wire) >= len(_DTYPES) or dimensions > _MAX_DIMENSIONS or needs_gradient > 1:
        raise ValueError("a tensor of unknown type or shape")
    header = TensorHeader(tuple(sizes[:dimensions]), _DTYPES[dtype], _DTYPES[wire], bool(needs_gradient))
    if not 0 < header.size <= _MAX_BYTES:
        raise ValueError(f"a tensor of {header.size} bytes")
    return header
