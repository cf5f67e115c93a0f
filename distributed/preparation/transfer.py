"""Transfers files to and from a remote machine.

To it: files that are missing there by content hash, as one compressed stream that can be interrupted and resumed.

From it: a folder of a worker, announced, checked, then received byte for byte. A machine is authenticated, but its data
is not trusted: it sends one line that names every file with its size, and then exactly these bytes. Nothing is
unpacked, so nothing takes more memory or disk than was received.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from distributed.agent.requests import GetFiles, ListMissing, PutFiles
from distributed.machine.compression import STRETCH, AdaptiveGzip
from distributed.machine.link import MachineLink, document
from distributed.ssh.errors import (
    CommandTimeout,
    ConnectTimeout,
    Dropped,
    NoRoute,
    PortClosed,
    RemoteFileError,
    SshError,
)
from distributed.ssh.process import Process
from profiles.errors import BadInput
from profiles.quantities import bytes_text
from training.records.run_files import sha256
from training.tasks.outputs.predictions import FOLDER

Progress = Callable[[int, int], None]
"""Called with the bytes sent so far and the total, in terms of the uncompressed files."""
STALL_TIMEOUT = 60.0
"""Seconds without progress on the remote side after which a broken transfer is given up."""
_PIECE = 1 << 18
PROGRESS_INTERVAL = 0.5
"""Seconds between two progress reports."""
_COMPRESSED = frozenset({".flac", ".gz", ".m4a", ".mp3", ".ogg", ".opus", ".whl", ".zip"})
"""Suffixes of files that do not get smaller."""
_TRANSIENT = (Dropped, CommandTimeout, ConnectTimeout, NoRoute, PortClosed)
"""Errors after which another attempt may succeed."""


@dataclass(frozen=True)
class Tree:
    """A folder to create, described by content hashes."""

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


class MissingFiles(BaseModel):
    """Files that a machine lacks."""

    model_config = ConfigDict(frozen=True)

    trees: tuple[str, ...]
    blobs: tuple[str, ...]
    begun: dict[str, NonNegativeInt]
    """Bytes that have arrived of each partial blob."""

    def missing_bytes(self, sources: Mapping[str, Path]) -> int:
        """Return the bytes still to be sent.

        Raises:
            BadInput: a file is gone.
        """
        try:
            return sum(sources[blob].stat().st_size - self.begun.get(blob, 0) for blob in self.blobs)
        except OSError as error:
            raise _unreadable(error) from None


def ask_missing(link: MachineLink, trees: Sequence[str], blobs: Sequence[str]) -> MissingFiles:
    """Ask a machine which of these files it lacks; records the machine's folder on the link.

    Raises:
        SshError: it cannot be asked.
    """
    answer = link.ask(ListMissing(trees, blobs))
    with contextlib.suppress(ValidationError):
        missing = MissingFiles.model_validate(answer)
        if set(missing.blobs) <= set(blobs):
            link.root = str(answer.get("root", link.root))
            return missing
    raise SshError(link.name, "it did not report which files it lacks", "try again")


def files_there(link: MachineLink, trees: Collection[Tree]) -> frozenset[str]:
    """Return which files of folders a machine has, by SHA-256; they are not sent to it again.

    Raises:
        SshError: it cannot be asked.
    """
    missing = ask_missing(link, [tree.name for tree in trees], sorted(sources_of(trees)))
    whole = sources_of(tree for tree in trees if tree.name not in missing.trees)
    return frozenset(whole) | (frozenset(sources_of(trees)) - frozenset(missing.blobs))


def _ignore_progress(done: int, total: int) -> None:
    """Report no progress."""


def send_trees(
    link: MachineLink, trees: Collection[Tree], progress: Progress = _ignore_progress, timeout: float = STALL_TIMEOUT
) -> int:
    """Send folders to a machine, to ``trees/NAME`` of Muster's folder; return how many files were missing there.

    A broken connection is made again, and the transfer resumes.

    Args:
        timeout: seconds without progress on the remote side after which the transfer is given up.

    Raises:
        SshError: the machine cannot receive them.
        BadInput: a file of this machine cannot be read, or has changed meanwhile.
    """
    missing_trees = set(ask_missing(link, [tree.name for tree in trees], []).trees)
    lacking = [tree for tree in trees if tree.name in missing_trees]
    if not lacking:
        return 0
    sources, last_progress = sources_of(lacking), time.monotonic()

    def ask() -> MissingFiles:
        """Ask what is missing, repeatedly until it succeeds, unless there has been no progress for too long."""
        while True:
            try:
                return ask_missing(link, [], sorted(sources))
            except _TRANSIENT:
                if time.monotonic() - last_progress > timeout:
                    raise
                time.sleep(1.0)

    def send(missing: MissingFiles) -> None:
        present_bytes = total - missing.missing_bytes(sources)
        request = PutFiles({tree.name: dict(tree.files) for tree in lacking}, missing.begun)
        blobs = {blob: sources[blob] for blob in missing.blobs}
        _send(link, request, blobs, lambda done: progress(present_bytes + done, total))

    missing = ask()
    total = fewest_left = missing.missing_bytes(sources)
    count, fruitless = len(missing.blobs), 0
    while True:
        try:
            send(missing)
            return count
        except _TRANSIENT:
            missing = ask()
            if (now_left := missing.missing_bytes(sources)) < fewest_left:
                fewest_left, last_progress, fruitless = now_left, time.monotonic(), 0
                continue
            fruitless += 1
            if fruitless > 1 and time.monotonic() - last_progress > timeout:
                raise
            time.sleep(_PAUSE)


def _send(link: MachineLink, request: PutFiles, blobs: Mapping[str, Path], tell: Callable[[int], None]) -> None:
    failures: list[OSError] = []

    def stream() -> Iterator[bytes]:
        try:
            yield from packed(blobs, request.begun, tell)
        except OSError as error:  # raised in a reader thread, so it is passed to the caller
            failures.append(error)

    try:
        link.ask(request, stream(), timeout=None)
    except RemoteFileError as error:
        _refuse_changed(blobs, error.message)
        raise
    finally:
        for failure in failures:
            raise _unreadable(failure) from None


def _unreadable(error: OSError) -> BadInput:
    return BadInput(f"{error.filename or 'a file'}: {error.strerror or error}", "start again when it can be read")


def _refuse_changed(blobs: Mapping[str, Path], problem: str) -> None:
    """Raise BadInput if the file that a machine speaks of is no longer what it was when it was hashed."""
    for blob, path in blobs.items():
        if blob in problem and path.is_file() and sha256(path) != blob:
            raise BadInput(f"{path} has changed while it was sent", "start again when nothing writes to it")


def packed(blobs: Mapping[str, Path], begun: Mapping[str, int], tell: Callable[[int], None]) -> Iterator[bytes]:
    """Yield a gzipped tar of the blobs, each from the first missing byte, compressed where that makes it quicker; files
    that are compressed are not compressed again if there are no others.

    Raises:
        OSError: a file cannot be read, or has changed.
    """
    done, due = 0, time.monotonic() + PROGRESS_INTERVAL
    zipped = AdaptiveGzip(is_compressed=all(path.suffix in _COMPRESSED for path in blobs.values()))
    for blob, path in blobs.items():
        with open(path, "rb") as content:
            size = os.fstat(content.fileno()).st_size - begun.get(blob, 0)
            entry = tarfile.TarInfo(blob)
            entry.size = max(size, 0)
            if size >= STRETCH:
                yield from zipped.next_file()
            yield from zipped.write(entry.tobuf())
            content.seek(begun.get(blob, 0))
            while size > 0:
                piece = content.read(min(_PIECE, size))
                if not piece:
                    raise OSError(None, "it became shorter while it was sent", str(path))
                size -= len(piece)
                done += len(piece)
                yield from zipped.write(piece)
                if time.monotonic() > due:
                    due = time.monotonic() + PROGRESS_INTERVAL
                    tell(done)
            yield from zipped.write(bytes(-entry.size % tarfile.BLOCKSIZE))
    yield from zipped.write(bytes(2 * tarfile.BLOCKSIZE))
    yield from zipped.end()
    tell(done)


MOST_FILES = 1000
LONGEST_PATH = 500
LONGEST_LIST = 1 << 18
"""Maximum bytes of the line that names the files."""
_PAUSE = 0.5
_SILENCE = 30.0
_SLOWEST = 1 << 14
"""Bytes per second: a slower transfer is aborted."""
_RESERVE = 1 << 28
"""Bytes of this machine's disk to leave free; on a small disk a tenth of the free space."""


def fetch_model(
    link: MachineLink,
    run_id: str,
    rank: str,
    run_dir: Path,
    timeout: float,
    await_choice: Callable[[], bool],
    name: str = "model",
) -> None:
    """Fetch the model that a worker saved and its predictions, if it has them; retry until ``timeout``.

    Args:
        name: another folder to fetch instead of the model.
        timeout: seconds in which failed attempts are repeated.
        await_choice: called if the worker has a model; waits until it is known whether that becomes the run's.

    Raises:
        SshError: it could not be fetched.
    """
    end = time.monotonic() + timeout

    def is_wanted() -> bool:
        nonlocal end
        answer = await_choice()
        end = time.monotonic() + timeout  # it may have waited long for another worker's model
        return answer

    while True:
        try:
            has_arrived = fetch_folder(link, run_id, rank, name, run_dir / name, is_wanted)
            break
        except (SshError, TimeoutError) as error:
            if time.monotonic() > end:
                hint = f"it is still there: {link.root}/runs/{run_id}/{rank}/{name}"
                label = "its model" if name == "model" else f"its folder {name}"
                reason = error.message_for(link.name) if isinstance(error, SshError) else error
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
    """Copy a folder of a worker to ``target``, atomically; return whether it existed and ``is_wanted``.

    Args:
        clock: monotonic clock for the transfer's deadline.

    Raises:
        SshError: the connection was lost, the data is not a folder of plain files, or the disk here is too full.
        OSError: it cannot be written here.
    """
    with (
        contextlib.closing(link.stream(GetFiles(run_id, rank, name))) as process,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as temporary,
    ):
        capacity = usable_space(shutil.disk_usage(temporary).free)
        files = announced(link.name, process.read_line(_SILENCE), name, capacity)
        if files and not is_wanted():
            return False
        _receive(process, files, Path(temporary), link.name, clock)
        if not files:
            return False
        (Path(temporary) / name).rename(target)
    return True


def usable_space(free: int) -> int:
    """Return how many of a disk's free bytes a model may take."""
    return free - min(_RESERVE, free // 10)


def announced(machine: str, line: bytes, name: str, capacity: int) -> dict[str, int]:
    """Return the announced size of every file by path; all paths are inside the folder ``name``.

    Args:
        line: ``{"files": {path: bytes}}``.
        capacity: maximum total size in bytes.

    Raises:
        SshError: the line is invalid, or the files are too large.
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
        problem = f"its model has {bytes_text(total)}, and there is room for {bytes_text(capacity)}"
        raise SshError(machine, problem, "free some space on this machine")
    return sizes


def _is_inside(path: str, name: str) -> bool:
    """Whether a path is inside the folder ``name`` on every operating system."""
    parts, folder = path.split("/"), name.split("/")
    is_plain = path.isprintable() and "\\" not in path and ":" not in path and len(path.encode()) <= LONGEST_PATH
    rest = parts[len(folder) :]
    return is_plain and parts[: len(folder)] == folder and bool(rest) and not {"", ".", ".."} & set(rest)


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
