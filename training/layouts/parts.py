"""One model folder from those that the stages of a model have saved: files are copied in pieces, no part is loaded.

Every stage saves what it holds as if it were a whole model. The tensors of all ``model.safetensors`` (or of adapters)
become one file of that name; everything else is the same in all folders, and the first one's is taken.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from training.layouts.carrier import Carrier, gather_among
from training.model.model_files import PIECE, join_files

_SUFFIX = ".safetensors"


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
        while piece := source.read(PIECE):
            carrier.send(0, torch.frombuffer(bytearray(piece), dtype=torch.uint8)).wait()


def _receive_file(carrier: Carrier, stage: int, file: Path, size: int) -> None:
    with file.open("wb") as target:
        for start in range(0, size, PIECE):
            target.write(carrier.receive(stage, min(PIECE, size - start)).numpy().data)


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
