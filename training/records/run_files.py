"""Files of a run folder: written atomically, locked by one process at a time, with explained failures."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from profiles.errors import BadInput, MusterError
from training.records.lease import LOCK_NAME, Lease, held_elsewhere

_LOCK_PATIENCE = 1.0
"""Seconds to wait for a lock: a reader that asks whether a run is alive holds it for an instant."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FEW_FILES, _SOME_SPACE = 64, 1 << 20
"""Free inodes below which a disk has run out of them, and free bytes above which it is not full."""
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_IN_THE_WAY = (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def explain(error: OSError, path: Path, option: str = "--output") -> tuple[str, str]:
    """Return message and hint for a failed file operation under ``path``, which ``option`` set; empty: no hint."""
    elsewhere = f"choose another place with {option}" if option else ""
    if error.errno in _FULL:
        reason, cure = explain_full_disk(error.errno, path)
        return f"{path}: {reason}", ", or ".join(filter(None, (cure, elsewhere)))
    if error.errno == errno.EROFS:
        return f"{path}: the file system is read-only", elsewhere
    if error.errno in _FORBIDDEN:
        return f"{path}: no permission to write there", elsewhere
    if error.errno in _IN_THE_WAY:
        return f"{error.filename or path}: a file has the name of a folder", ", or ".join(
            filter(None, ("move it", elsewhere))
        )
    return f"{path}: {error.strerror or error}", elsewhere


def explain_full_disk(number: int, path: Path) -> tuple[str, str]:
    """Return why nothing more can be written under ``path`` (disk space, quota or inodes), and the cure; ``number`` is
    the errno."""
    if number == errno.EDQUOT:
        return "your disk quota is used up", "free some of it (quota -s shows it; small files count, too)"
    folder = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), Path("/"))
    with contextlib.suppress(OSError):
        system = os.statvfs(folder)
        if system.f_files and system.f_favail < _FEW_FILES and system.f_bavail * system.f_frsize > _SOME_SPACE:
            return "the file system has no inodes left for more files", "remove many small files (df -i shows them)"
    return "the disk is full", "free some space"


@contextlib.contextmanager
def explain_errors(path: Path, option: str = "--output", kind: type[MusterError] = BadInput) -> Iterator[None]:
    """Turn the failure of a file operation under ``path``, which ``option`` set, into an error with a hint.

    Raises:
        MusterError: of ``kind``, in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise kind(*explain(error, path, option)) from error


def private_folder(path: Path) -> Path:
    """Make a folder for this user only, whatever the umask, or take the existing one; its parent exists.

    Raises:
        OSError: it cannot be made, or belongs to another user.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def private_file(path: str, flags: int) -> int:
    """Open a file, made for this user only: ``open(..., opener=private_file)``."""
    return os.open(path, flags, 0o600)


def write_atomically(path: Path, data: bytes, mode: int = 0o600, durable: bool = True) -> None:
    """Write a file so that readers see the old content or the new, never a part.

    Args:
        durable: wait until the disk has it, so that the same holds after a power failure; that takes milliseconds.

    Raises:
        OSError: nothing was changed and no temporary file is left.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder, so that a power failure brings none of earlier files back."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def add_file(digest: Any, path: Path) -> Any:
    """Return a hash (of ``hashlib``) to which the content of a file was added."""
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    return str(add_file(hashlib.sha256(), path).hexdigest())


def check_writable(folder: Path, option: str) -> None:
    """Make a folder and a temporary file in it, to find out before long work whether it is writable.

    Raises:
        BadInput: nothing can be written there.
    """
    with explain_errors(folder, option):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


@contextlib.contextmanager
def atomic_folder(parent: Path, name: str, option: str = "--output") -> Iterator[Path]:
    """Fill a temporary folder that becomes ``parent/name`` at the end; ``option`` set the parent.

    Raises:
        BadInput: the folder cannot be made; nothing is left behind, not even parents made for it.
    """
    created_parents = [folder for folder in (parent, *parent.parents) if not os.path.lexists(folder)]
    temporary: Path | None = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        temporary.chmod(0o755)
        yield temporary
        if os.path.lexists(parent / name):
            raise BadInput(f"{parent / name}: this run already exists", "start again for a new run id")
        temporary.rename(parent / name)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for folder in created_parents:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            raise BadInput(*explain(error, parent, option)) from error
        raise


class FolderLock:
    """Holds a folder for this process.

    The operating system drops the lock with its process, so the file that a killed process leaves behind locks nothing.
    A lease beside it tells machines that share the folder, whose locks may not know of one another.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._descriptor: int | None = None
        self._lease: Lease | None = None

    def acquire(self, inherited: int | None = None) -> None:
        """Take the lock.

        Args:
            inherited: descriptor of a lock that a killed process had.

        Raises:
            BadInput: another process has it, or another machine.
            OSError: the lock file cannot be written.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600) if inherited is None else inherited
        try:
            os.set_inheritable(descriptor, False)
            _lock_patiently(descriptor, self._path)
            if other_machine := held_elsewhere(self._path.parent):
                message = f"{self._path.parent.name}: {other_machine}, which shares this folder, is working on this run"
                raise BadInput(message, "stop it there; a machine that died is known as gone after 3 minutes")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._lease = descriptor, Lease(self._path.parent)

    def release(self) -> None:
        """Give the lock back. Idempotent."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also that of processes which have inherited it
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def descriptor(self) -> int:
        """The lock's descriptor."""
        assert self._descriptor is not None
        return self._descriptor

    @property
    def held(self) -> bool:
        """Whether this object has the lock."""
        return self._descriptor is not None


def _lock_patiently(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                process = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise BadInput(
                    f"{path.parent.name}: process {process} is working on this run",
                    "stop it with Ctrl-C, or wait until it has ended",
                ) from error
            time.sleep(0.02)


def is_live(folder: Path) -> bool:
    """Whether a living process holds ``folder``, on this machine or on another one that shares it."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return bool(held_elsewhere(folder))


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    return {package: version for package in packages if (version := _version(package)) is not None}


@functools.cache
def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def utc_now() -> str:
    """Return the time as ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def document(content: Any) -> bytes:
    """Return ``content`` as an indented JSON file."""
    return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def finite(value: Any) -> Any:
    """Replace what JSON cannot hold (NaN, infinities) by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
