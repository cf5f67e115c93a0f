"""Files of a model's weights (safetensors), joined and divided: tensors are copied in pieces, none is loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
PIECE = 1 << 22
"""Bytes that are copied at once."""


class _StoredTensor(NamedTuple):
    """Where the bytes of a tensor are."""

    file: Path
    start: int
    size: int
    entry: Mapping[str, Any]
    """Element type and shape, as the header has them."""


def join_files(files: Sequence[Path], target: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> None:
    """Write the tensors of several safetensors files into one; of those that several have, the first is taken.

    Args:
        is_wanted: whether a tensor is, by its name.

    Raises:
        OSError: a file cannot be read, or written.
    """
    tensors: dict[str, _StoredTensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header, start = _read_header(file)
        metadata |= header.pop(_METADATA, {})
        for name, entry in header.items():
            if not is_wanted(name):
                continue
            begin, end = entry["data_offsets"]
            tensors.setdefault(name, _StoredTensor(file, start + begin, end - begin, entry))
    for alias, name in metadata.items():
        if alias in tensors and name in tensors:  # one tensor under two names, as tied weights of two stages are
            del tensors[alias]
    # wide elements first, as safetensors' own files have them: so all are aligned
    ordered = sorted(tensors.items(), key=lambda item: (-_width(item[1]), item[0]))
    with target.open("wb") as output:
        header_bytes = _header(ordered, metadata)
        output.write(_LENGTH.pack(len(header_bytes)) + header_bytes)
        for _, tensor in ordered:
            with tensor.file.open("rb") as source:
                output.writelines(_pieces(source, tensor))


def tensor_names(file: Path) -> list[str]:
    """Return the names in a safetensors file.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return [name for name in _read_header(file)[0] if name != _METADATA]


def _read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its tensors begin."""
    with file.open("rb") as stream:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        return json.loads(stream.read(length)), _LENGTH.size + length


def _width(tensor: _StoredTensor) -> int:
    """Return the bits of an element: the digits in the name of its type."""
    return int("".join(filter(str.isdigit, tensor.entry["dtype"].partition("_")[0])) or 8)


def _header(tensors: Sequence[tuple[str, _StoredTensor]], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors:
        header[name] = {**tensor.entry, "data_offsets": [offset, offset + tensor.size]}
        offset += tensor.size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text.ljust(-(-len(text) // 8) * 8)


def _pieces(source: BinaryIO, tensor: _StoredTensor) -> Iterator[bytes]:
    source.seek(tensor.start)
    left = tensor.size
    while left:
        piece = source.read(min(PIECE, left))
        if not piece:
            raise OSError(f"{tensor.file} is shorter than its header says")
        left -= len(piece)
        yield piece
