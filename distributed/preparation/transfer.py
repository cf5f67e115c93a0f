"""Files to a far machine and from it.

To it: what is missing there by content hash, as one compressed stream that may break and go on.

From it: a folder of a worker, announced, checked, then received byte for byte. A machine of a run is known and still
not believed: what it sends is one line that names every file with its size, and then exactly these bytes. Nothing is
unpacked, so that nothing takes more memory or disk than has come over the line.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from distributed.machine.link import FILES, MachineLink, document
from distributed.ssh.errors import CommandTimeout, ConnectTimeout, Dropped, NoRoute, PortClosed, SshError
from distributed.ssh.process import Process
from profiles.errors import BadInput
from training.run_files import explain
from training.tasks.predictions import FOLDER

Progress = Callable[[int, int], None]
"""Takes bytes that were sent and bytes that are to be sent, of the files' own size."""
PATIENCE = 60.0
"""Seconds without a byte more on the far side after which a broken transfer is given up."""
_PIECE = 1 << 18
TELL = 0.5
"""Seconds between two words about progress."""
_BREAKS = (Dropped, CommandTimeout, ConnectTimeout, NoRoute, PortClosed)
"""What may be over when one tries again."""


@dataclass(frozen=True)
class Tree:
    """A folder to be, as content hashes."""

    files: Mapping[str, str]
    """SHA-256 of the content by relative path."""
    sources: Mapping[str, Path]
    """Local file by SHA-256."""

    @property
    def name(self) -> str:
        """Hash of the whole tree."""
        return hashlib.sha256(json.dumps(dict(self.files), sort_keys=True).encode()).hexdigest()


def sources_of(trees: Iterable[Tree]) -> dict[str, Path]:
    """Return the files of trees, each once, by SHA-256."""
    return {blob: path for tree in trees for blob, path in tree.sources.items()}


class Lack(BaseModel):
    """What a machine lacks."""

    model_config = ConfigDict(frozen=True)

    trees: tuple[str, ...]
    blobs: tuple[str, ...]
    begun: dict[str, NonNegativeInt]
    """Bytes of a blob that have arrived."""

    def left(self, sources: Mapping[str, Path]) -> int:
        """Bytes still to be sent."""
        return sum(sources[blob].stat().st_size - self.begun.get(blob, 0) for blob in self.blobs)


def ask_missing(link: MachineLink, trees: Sequence[str], blobs: Sequence[str], *, prepared: bool = True) -> Lack:
    """Ask a machine which of these files it lacks; notes the machine's folder on the link.

    Args:
        prepared: the agent's programs are there; else the one that is asked travels in the command.

    Raises:
        SshError: it cannot be asked.
    """
    question = json.dumps({"trees": list(trees), "blobs": list(blobs)}).encode()
    done = link.ask("missing", input=question) if prepared else link.ask_unprepared("missing", input=question)
    answer = document(link.name, done.stdout)
    with contextlib.suppress(ValidationError):
        lack = Lack.model_validate(answer)
        if set(lack.blobs) <= set(blobs):
            link.root = str(answer.get("root", link.root))
            return lack
    raise SshError(link.name, "it did not report which files it lacks", "try again")


def _untold(done: int, total: int) -> None:
    """Tell nobody."""


def send_trees(
    link: MachineLink, trees: Collection[Tree], progress: Progress = _untold, timeout: float = PATIENCE
) -> int:
    """Bring folders to a machine, to ``trees/NAME`` of Muster's folder; return how many files were missing there.

    A connection that breaks is made again, and what has arrived stays.

    Args:
        patience: seconds without a byte more on the far side after which it is given up.

    Raises:
        SshError: the machine cannot take them.
        BadInput: a file of this machine cannot be read.
    """
    missing_trees = set(ask_missing(link, [tree.name for tree in trees], []).trees)
    lacking = [tree for tree in trees if tree.name in missing_trees]
    if not lacking:
        return 0
    sources, last_progress = sources_of(lacking), time.monotonic()

    def ask() -> Lack:
        """Ask what is missing, as often as it takes, unless nothing has arrived there for too long."""
        while True:
            try:
                return ask_missing(link, [], sorted(sources))
            except _BREAKS:
                if time.monotonic() - last_progress > timeout:
                    raise
                time.sleep(1.0)

    def send(lack: Lack) -> None:
        present_bytes = total - lack.left(sources)
        header = {"trees": {tree.name: dict(tree.files) for tree in lacking}, "begun": dict(lack.begun)}
        blobs = {blob: sources[blob] for blob in lack.blobs}
        failures: list[OSError] = []

        def stream() -> Iterator[bytes]:
            try:
                yield from packed(header, blobs, lack.begun, lambda done: progress(present_bytes + done, total))
            except OSError as error:  # whoever reads this is a thread that cannot say it
                failures.append(error)

        try:
            link.ask("sync", input=stream(), timeout=None)
        finally:
            for failure in failures:
                raise BadInput(*explain(failure, Path(failure.filename or "a file"))) from None

    lack = ask()
    total = fewest_left = lack.left(sources)
    count = len(lack.blobs)
    while True:
        try:
            send(lack)
            return count
        except _BREAKS:
            lack = ask()
            if lack.left(sources) < fewest_left:
                fewest_left, last_progress = lack.left(sources), time.monotonic()


def packed(
    header: Mapping[str, Any], blobs: Mapping[str, Path], begun: Mapping[str, int], tell: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield a line of JSON and a gzipped tar of the blobs, each from where it was left off.

    Raises:
        OSError: a file cannot be read, or is not what it was.
    """
    yield json.dumps(header).encode() + b"\n"
    buffer, done, due = io.BytesIO(), 0, time.monotonic() + TELL
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=1) as zipped:
        for blob, path in blobs.items():
            with open(path, "rb") as content:
                size = os.fstat(content.fileno()).st_size - begun.get(blob, 0)
                entry = tarfile.TarInfo(blob)
                entry.size = max(size, 0)
                zipped.write(entry.tobuf())
                content.seek(begun.get(blob, 0))
                while size > 0:
                    piece = content.read(min(_PIECE, size))
                    if not piece:
                        raise OSError(None, "it became shorter while it was sent")
                    size -= len(piece)
                    done += len(piece)
                    zipped.write(piece)
                    yield _drained(buffer)
                    if time.monotonic() > due:
                        due = time.monotonic() + TELL
                        tell(done)
                zipped.write(bytes(-entry.size % tarfile.BLOCKSIZE))
        zipped.write(bytes(2 * tarfile.BLOCKSIZE))
    yield _drained(buffer)
    tell(done)


def _drained(buffer: io.BytesIO) -> bytes:
    data = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return data


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
    link: MachineLink,
    run_id: str,
    rank: str,
    run_dir: Path,
    patience: float,
    delivers: Callable[[], bool],
    name: str = "model",
) -> None:
    """Bring the model that a worker saved and what it wrote in the evaluations, if it has them; try again while the
    machine can be reached.

    Args:
        name: another folder to bring instead of the model.
        patience: seconds for trying again.
        delivers: asked of a worker that has a model; waits until it is known whether this one's is the run's.

    Raises:
        SshError: it cannot be had.
    """
    end = time.monotonic() + patience

    def wanted() -> bool:
        nonlocal end
        answer = delivers()
        end = time.monotonic() + patience  # it may have waited for another one's model for long
        return answer

    while True:
        try:
            has_arrived = fetch_folder(link, run_id, rank, name, run_dir / name, wanted)
            break
        except (SshError, TimeoutError) as error:
            if time.monotonic() > end:
                hint = f"it is still there: {link.root}/runs/{run_id}/{rank}/{name}"
                label = "its model" if name == "model" else f"its folder {name}"
                reason = error.beside(link.name) if isinstance(error, SshError) else error
                raise SshError(link.name, f"{label} could not be fetched ({reason})", hint) from None
            time.sleep(_PAUSE)
    if has_arrived and not (run_dir / FOLDER).exists():  # the model is here without it
        with contextlib.suppress(SshError, TimeoutError, OSError):
            fetch_folder(link, run_id, rank, FOLDER, run_dir / FOLDER)


def fetch_folder(
    link: MachineLink,
    run_id: str,
    rank: str,
    name: str,
    target: Path,
    is_wanted: Callable[[], bool] = lambda: True,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Copy a folder of a worker to ``target``, whole or not at all; return whether there was one that is ``wanted``.

    Args:
        clock: gives the seconds within which all must have come.

    Raises:
        SshError: the connection was lost, what came is not a folder of plain files, or there is no room for it here.
        OSError: it cannot be written here.
    """
    with (
        contextlib.closing(link.stream(FILES, "fetch", run_id, rank, name)) as process,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary,
    ):
        capacity = room_in(shutil.disk_usage(temporary).free)
        files = announced(link.name, process.read_line(_SILENCE), name, capacity)
        if files and not is_wanted():
            return False
        _receive(process, files, Path(temporary), link.name, clock)
        if not files:
            return False
        (Path(temporary) / name).rename(target)
    return True


def room_in(free: int) -> int:
    """Return how many bytes of the free ones of a disk a model may take."""
    return free - min(_RESERVE, free // 10)


def announced(machine: str, line: bytes, name: str, capacity: int) -> dict[str, int]:
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
    if (total := sum(sizes.values())) > capacity:
        problem = f"its model has {total / 1e6:,.1f} MB, and there is room for {capacity / 1e6:,.1f} MB"
        raise SshError(machine, problem, "free some space on this machine")
    return sizes


def _is_inside(path: str, name: str) -> bool:
    """Whether a path names a file below the folder ``name`` on every system."""
    top, *rest = path.split("/")
    is_plain = path.isprintable() and "\\" not in path and ":" not in path and len(path.encode()) <= LONGEST_PATH
    return is_plain and top == name and bool(rest) and not {"", ".", ".."} & set(rest)


def _receive(process: Process, files: dict[str, int], folder: Path, machine: str, clock: Callable[[], float]) -> None:
    end = clock() + _SILENCE + sum(files.values()) / _SLOWEST
    data = b""
    for path, size in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "xb") as file:
            while size:
                if clock() > end:
                    raise SshError(machine, "it sends its files too slowly", "check its connection")
                data = data or process.read(_SILENCE)
                if not data:
                    raise SshError(machine, f"{path} ended too early", "is its disk full?")
                file.write(data[:size])
                size, data = size - len(data[:size]), data[size:]
    if data or process.read(_SILENCE):
        raise SshError(machine, "it sends more than it announced", "check its run folder")
