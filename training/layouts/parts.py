"""One model folder from those that the stages of a model have saved: files are copied in pieces, no part is loaded.

Every stage saves what it holds as if it were a whole model. The tensors of all ``model.safetensors`` (or of adapters)
become one file of that name; everything else is the same in all folders, and the first one's is taken.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from training.layouts.carrier import Carrier, gather_among

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_SUFFIX = ".safetensors"
_PIECE = 1 << 22


class _StoredTensor(NamedTuple):
    """Where the bytes of a tensor are."""

    file: Path
    start: int
    size: int
    entry: Mapping[str, Any]
    """Element type and shape, as the header has them."""


def collect_parts(carrier: Carrier, folders: Sequence[Path]) -> None:
    """Send the tensors that every stage has saved to the first one, which writes them into the same folders there.

    Args:
        folders: of the stages, each filled by its own.

    Raises:
        ExchangeError: a device is lost.
        RunFailed: a device sends something else than files of tensors.
        OSError: they cannot be read, or written.
    """
    sizes = {file.name: file.stat().st_size for file in sorted(folders[carrier.stage].glob(f"*{_SUFFIX}"))}
    announcements = gather_among(carrier, json.dumps(sizes).encode())
    if carrier.stage:
        for name in sizes:
            _send_file(carrier, folders[carrier.stage] / name)
        return
    for stage in range(1, carrier.stages):
        folders[stage].mkdir(parents=True, exist_ok=True)
        for name, size in _announced(carrier, stage, announcements[stage]).items():
            _receive_file(carrier, stage, folders[stage] / name, size)


def _announced(carrier: Carrier, stage: int, announcement: bytes) -> dict[str, int]:
    """Return the sizes of a stage's files by name."""
    with contextlib.suppress(ValueError):
        sizes = json.loads(announcement)
        if isinstance(sizes, dict) and all(map(_is_file, sizes.items())):
            return sizes
    raise carrier.refused(stage, "something else", "the names of its files")


def _is_file(entry: tuple[str, object]) -> bool:
    name, size = entry
    return name.endswith(_SUFFIX) and Path(name).name == name and type(size) is int and size >= 0


def _send_file(carrier: Carrier, file: Path) -> None:
    with file.open("rb") as source:
        while piece := source.read(_PIECE):
            carrier.send(0, torch.frombuffer(bytearray(piece), dtype=torch.uint8)).wait()


def _receive_file(carrier: Carrier, stage: int, file: Path, size: int) -> None:
    with file.open("wb") as target:
        for start in range(0, size, _PIECE):
            target.write(carrier.receive(stage, min(_PIECE, size - start)).numpy().data)


def join_parts(parts: Sequence[Path], folder: Path) -> None:
    """Make a model folder of the stages' folders, whose files may be moved.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {file.name for part in parts for file in part.glob(f"*{_SUFFIX}")}
    for name in sorted(names):
        join_files([part / name for part in parts if (part / name).is_file()], folder / name)
    for file in parts[0].iterdir():
        if file.name not in names:
            shutil.move(file, folder / file.name)


def join_files(files: Sequence[Path], target: Path) -> None:
    """Write the tensors of several safetensors files into one; of those that several have, the first is taken."""
    tensors: dict[str, _StoredTensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header, start = _read_header(file)
        metadata |= header.pop(_METADATA, {})
        for name, entry in header.items():
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
        piece = source.read(min(_PIECE, left))
        if not piece:
            raise OSError(f"{tensor.file} is shorter than its header says")
        left -= len(piece)
        yield piece
