"""Folder entries that are built once and then shared by every process of this machine.

An entry is a folder named by a hash of all it was made from. It appears whole or not at all: it is built beside its
place and renamed into it, under a file lock, so of several processes that ask at once one builds and the others wait.
Its seal holds the sizes of its files and checksums of their contents; what a disk or a crash has harmed since is built
anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from profiles.errors import BadInput
from training.run_files import add_file, why_full

logger = logging.getLogger("muster.data")

_SEAL = "seal.json"
BLOCK = 1 << 24
_BLOCKS = 16
"""Blocks of a file that are looked at; they are spread over it if it has more, so that opening it stays quick."""


def cache_root(setting: str) -> Path:
    """Return the cache folder: ``setting``, or the user's cache folder of this operating system."""
    return Path(setting).expanduser() if setting else Path(platformdirs.user_cache_dir("muster", appauthor=False))


def get_or_build(
    root: Path,
    key: str,
    build: Callable[[Path], None],
    waiting: Callable[[], None] = lambda: None,
    is_sound: Callable[[Path], bool] | None = None,
) -> Path:
    """Return the folder of entry ``key``; ``build(folder)`` fills it if it is not there yet, or damaged.

    Args:
        waiting: called once if another process is building the same entry.
        is_sound: for an entry that is written to later: whether it can be used. All others are sealed.

    Raises:
        BadInput: the cache folder cannot be written, or its disk is full.
    """
    entry = root / key
    check = is_sound or _is_sealed
    if check(entry):
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock", waiting):
            if not check(entry):
                if entry.exists():
                    logger.warning("%s in the cache is damaged or of an earlier version; it is computed again", entry)
                _build_aside(entry, build, is_sealed=is_sound is None)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, cure = why_full(error.errno, root)
            raise BadInput(f"cache folder {root}: {reason}", f"{cure}, or choose another with cache_dir") from error
        reason = error.strerror or str(error)
        raise BadInput(f"cache folder {root}: {reason}", "choose a folder you can write with cache_dir") from error
    return entry


def digest(parts: Iterable[str]) -> str:
    """Return a hash of texts, to name an entry by."""
    return hashlib.blake2b("\n".join(parts).encode("utf-8", "replace"), digest_size=16).hexdigest()


def key_of_files(root: Path, files: Sequence[Path]) -> str:
    """Return a hash of what ``files`` hold; they are read again only if their size or time has changed.

    Raises:
        BadInput: one of them cannot be read, or the cache folder cannot be written.
    """

    try:
        stamps = [f"{file} {(status := file.stat()).st_size} {status.st_mtime_ns}" for file in files]
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}", "name the folder of a saved model") from error
    hashes = (f"{file.name} {add_file(hashlib.blake2b(digest_size=16), file).hexdigest()}" for file in files)
    return key_of_contents(root, stamps, lambda: hashes)


def key_of_contents(
    root: Path, stamps: Sequence[str], contents: Callable[[], Iterable[str]], waiting: Callable[[], None] = lambda: None
) -> str:
    """Return a hash of ``contents()``, which takes long and is asked only where ``stamps`` were never seen before.

    Raises:
        BadInput: the cache folder cannot be written.
    """

    def find_key(folder: Path) -> None:
        (folder / "key").write_text(digest(contents()))

    return (get_or_build(root / "stamps", digest(stamps), find_key, waiting) / "key").read_text()


def _locked(path: Path, waiting: Callable[[], None]) -> AbstractContextManager[object]:
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        waiting()
        return lock.acquire()  # no deadline of ours: the operating system frees the lock of a process that dies


def _build_aside(entry: Path, build: Callable[[Path], None], is_sealed: bool) -> None:
    aside = entry.with_name(entry.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed: the lock is ours
    aside.mkdir()
    try:
        build(aside)
        if is_sealed:
            sums = {file.name: _sum_of(file) for file in aside.iterdir()}
            (aside / _SEAL).write_text(json.dumps(sums), encoding="utf-8")
        if entry.is_dir():
            shutil.rmtree(entry)
        os.replace(aside, entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_sealed(entry: Path) -> bool:
    """Whether the files of an entry are what they were when it was built."""
    try:
        sums: dict[str, list[int]] = json.loads((entry / _SEAL).read_text(encoding="utf-8"))
        return all(_sum_of(entry / name) == list(found) for name, found in sums.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _sum_of(file: Path) -> list[int]:
    """Return the size of a file and a checksum of its blocks."""
    size, found = file.stat().st_size, 0
    last = max(0, size - 1) // BLOCK
    with file.open("rb") as stream:
        for block in sorted({last * part // (_BLOCKS - 1) for part in range(_BLOCKS)}):
            stream.seek(block * BLOCK)
            found = zlib.crc32(stream.read(BLOCK), found)
    return [size, found]
