"""The bytes of a safetensors file in writing order, so that they can be hashed on the way, and come from a copy or from
the tensors themselves.

A file is the length of its header, the header (JSON: type, shape and offsets of each tensor), and the tensors one after
another (https://github.com/huggingface/safetensors, "Format"), the widest types first, so that each is aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from profiles.errors import RunFailed
from training.exchange.staging import is_asynchronous, pinned, wait_for_device

PIECE = 1 << 26
"""Bytes of one piece of memory: torch pins whole powers of two."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.complex64: "C64",
}  # fmt: skip


class TensorFile:
    """The content of a file of these tensors. Weights with two names are in it twice, and views are separate tensors.

    Raises:
        RunFailed: a file cannot hold one of these types.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
        self._tensors = [tensors[name].detach() for name in names]
        self.header = _header(names, self._tensors)
        self.body_bytes = sum(tensor.nbytes for tensor in self._tensors)

    def flat_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors as flat bytes, each on its device."""
        for tensor in self._tensors:
            contiguous = tensor if tensor.is_contiguous() else tensor.to("cpu").contiguous()
            yield contiguous.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the file piece by piece, from the present values of the tensors."""
        yield memoryview(self.header)
        for tensor in self.flat_tensors():
            yield tensor.to("cpu").numpy().data


def _header(names: Sequence[str], tensors: Sequence[Tensor]) -> bytes:
    entries, end = dict[str, object](), 0
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in DTYPES:
            raise RunFailed(f"{name} is of {tensor.dtype}: no snapshot can hold it", "keep it in another type")
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class HostCopy:
    """Host memory for copies of tensors: allocated with the first copy, and reused for all others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: list[Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(piece.numel() for piece in self._memory)

    def release(self) -> None:
        self._memory = []

    def take(self, file: TensorFile) -> list[memoryview]:
        """Copy the tensors and return the pieces of the file, which stay as they are until the next copy."""
        memory, at, by_itself = self._memory_for(file.body_bytes), 0, is_asynchronous(self._device)
        for tensor in file.flat_tensors():
            left_in_piece = PIECE - at % PIECE
            for source in (tensor[:left_in_piece], *torch.split(tensor[left_in_piece:], PIECE)):
                if source.numel():
                    piece, begin = divmod(at, PIECE)
                    memory[piece][begin : begin + source.numel()].copy_(source, non_blocking=by_itself)
                    at += source.numel()
        wait_for_device(self._device)
        bodies = [memory[i // PIECE].numpy()[: file.body_bytes - i].data for i in range(0, file.body_bytes, PIECE)]
        return [memoryview(file.header), *bodies]

    def _memory_for(self, size: int) -> list[Tensor]:
        for index, start in enumerate(range(0, size, PIECE)):
            length = min(PIECE, size - start)
            if index == len(self._memory) or self._memory[index].numel() < length:
                self._memory[index : index + 1] = [self._new(length)]
        return self._memory

    def _new(self, size: int) -> Tensor:
        if is_asynchronous(self._device):
            return pinned(size, torch.uint8)
        return torch.empty(size, dtype=torch.uint8, device="cpu")
