"""A folder of a far machine's worker, brought here: announced, checked, then received byte for byte.

A machine of a run is known and still not believed: what it sends is one line that names every file with its size, and
then exactly these bytes. Nothing is unpacked, so that nothing takes more memory or disk than has come over the line.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from distributed.machine.link import FILES, Link, document
from distributed.ssh.errors import SshError
from distributed.ssh.process import Process
from training.tasks.predictions import FOLDER

MOST_FILES = 1000
LONGEST_PATH = 500
LONGEST_LIST = 1 << 18
"""Bytes of the line that names the files."""
_PAUSE = 0.5
_SILENCE = 30.0
_SLOWEST = 1 << 14
"""Bytes a second: a machine that sends less is not waited for to the end."""
_RESERVE = 1 << 28
"""Bytes of this machine's disk that are not filled; of a small one a tenth of what is free."""


def fetch_model(
    link: Link, run_id: str, rank: str, run_dir: Path, patience: float, delivers: Callable[[], bool]
) -> None:
    """Bring the model that a worker saved and what it wrote in the evaluations, if it has them; try again while the
    machine can be reached.

    Args:
        patience: seconds for trying again.
        delivers: asked of a worker that has a model; waits until it is known whether this one's is the run's.

    Raises:
        SshError: it cannot be had.
    """
    end = time.monotonic() + patience
    while True:
        try:
            there = fetch_folder(link, run_id, rank, "model", run_dir / "model", delivers)
            break
        except (SshError, TimeoutError) as error:
            if time.monotonic() > end:
                hint = f"it is still there: {link.root}/runs/{run_id}/{rank}/model"
                raise SshError(link.name, f"its model could not be fetched ({error})", hint) from None
            time.sleep(_PAUSE)
    if there and not (run_dir / FOLDER).exists():  # the model is here without it
        with contextlib.suppress(SshError, TimeoutError, OSError):
            fetch_folder(link, run_id, rank, FOLDER, run_dir / FOLDER)


def fetch_folder(
    link: Link, run_id: str, rank: str, name: str, target: Path, wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Copy a folder of a worker to ``target``, whole or not at all; return whether there was one that is ``wanted``.

    Raises:
        SshError: the connection was lost, what came is not a folder of plain files, or there is no room for it here.
        OSError: it cannot be written here.
    """
    with (
        contextlib.closing(link.stream(FILES, "fetch", run_id, rank, name)) as process,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary,
    ):
        room = room_in(shutil.disk_usage(temporary).free)
        files = announced(link.name, process.read_line(_SILENCE), name, room)
        if files and not wanted():
            return False
        _receive(process, files, Path(temporary), link.name)
        if not files:
            return False
        (Path(temporary) / name).rename(target)
    return True


def room_in(free: int) -> int:
    """Return how many bytes of the free ones of a disk a model may take."""
    return free - min(_RESERVE, free // 10)


def announced(machine: str, line: bytes, name: str, room: int) -> dict[str, int]:
    """Return the size of every file by its path, which is inside the folder ``name``.

    Args:
        line: ``{"files": {path: bytes}}``.
        room: bytes that all of them may have.

    Raises:
        SshError: it is something else, or too much.
    """
    if len(line) > LONGEST_LIST:
        raise SshError(machine, "its list of files is too long", "check its run folder")
    sizes = document(machine, line).get("files")
    if not isinstance(sizes, dict) or len(sizes) > MOST_FILES:
        raise SshError(machine, f"it names no files, or more than {MOST_FILES}", "check its run folder")
    for path, size in sizes.items():
        if not _is_inside(path, name):
            raise SshError(machine, f"it sends a file outside its folder: {path!a:.200}")
        if type(size) is not int or size < 0:
            raise SshError(machine, f"it sends a file without a size: {path!a:.200}")
    if any(str(parent) in sizes for path in sizes for parent in PurePosixPath(path).parents):
        raise SshError(machine, "it sends a file that is a folder too")
    if (total := sum(sizes.values())) > room:
        problem = f"its model has {total / 1e6:,.1f} MB, and there is room for {room / 1e6:,.1f} MB"
        raise SshError(machine, problem, "free some space on this machine")
    return sizes


def _is_inside(path: str, name: str) -> bool:
    """Whether a path names a file below the folder ``name`` on every system."""
    first, *rest = path.split("/")
    plain = path.isprintable() and "\\" not in path and ":" not in path and len(path.encode()) <= LONGEST_PATH
    return plain and first == name and bool(rest) and not {"", ".", ".."} & set(rest)


def _receive(process: Process, files: dict[str, int], folder: Path, machine: str) -> None:
    end = time.monotonic() + _SILENCE + sum(files.values()) / _SLOWEST
    data = b""
    for path, size in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "xb") as out:
            while size:
                if time.monotonic() > end:
                    raise SshError(machine, "it sends its files too slowly", "check its connection")
                data = data or process.read(_SILENCE)
                if not data:
                    raise SshError(machine, f"{path} ends too early", "is its disk full?")
                out.write(data[:size])
                size, data = size - len(data[:size]), data[size:]
    if data or process.read(_SILENCE):
        raise SshError(machine, "it sends more than it named", "check its run folder")
