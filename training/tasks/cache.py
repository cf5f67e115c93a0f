"""Content-addressed disk cache, shared by all processes of this machine.

An entry is a folder named by a hash of its inputs. It appears atomically: it is built in a temporary folder and renamed
under a file lock, so of several concurrent processes one builds it and the others wait. Its seal records the sizes and
checksums of its files; a damaged entry is rebuilt.
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
from training.records.run_files import add_file, explain_full_disk

logger = logging.getLogger("muster.data")

_SEAL = "seal.json"
BLOCK = 1 << 24
_BLOCKS = 16
"""Blocks of a file that are checksummed, evenly spread over larger files, so that opening an entry stays quick."""


def cache_root(setting: str) -> Path:
    """Return the cache folder: ``setting``, or the user's cache folder on this operating system."""
    return Path(setting).expanduser() if setting else Path(platformdirs.user_cache_dir("muster", appauthor=False))


def get_or_build(
    root: Path,
    key: str,
    build: Callable[[Path], None],
    waiting: Callable[[], None] = lambda: None,
    is_sound: Callable[[Path], bool] | None = None,
) -> Path:
    """Return the folder of entry ``key``; ``build(folder)`` fills it if it is missing or damaged.

    Args:
        waiting: called once if another process is building the same entry.
        is_sound: validity check of an entry that is modified later; all others are sealed.

    Raises:
        BadInput: the cache folder cannot be written, or its disk is full.
    """
    entry = root / key
    check = is_sound or _is_sealed
    if check(entry):
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _acquire_lock(root / f"{key}.lock", waiting):
            if not check(entry):
                if entry.exists():
                    logger.warning("%s in the cache is damaged or of an earlier version; it is computed again", entry)
                _build_entry(entry, build, is_sealed=is_sound is None)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason, cure = explain_full_disk(error.errno, root)
            raise BadInput(f"cache folder {root}: {reason}", f"{cure}, or choose another with cache_dir") from error
        reason = error.strerror or str(error)
        raise BadInput(f"cache folder {root}: {reason}", "choose a folder you can write with cache_dir") from error
    return entry


def digest(texts: Iterable[str]) -> str:
    """Return a hash of texts, to be used as a key."""
    return hashlib.blake2b("\n".join(texts).encode("utf-8", "replace"), digest_size=16).hexdigest()


def key_of_files(root: Path, files: Sequence[Path]) -> str:
    """Return a hash of the contents of ``files``; they are read again only if their size or mtime has changed.

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
    """Return a hash of ``contents()``, which is expensive and called only for ``stamps`` that were never seen before.

    Raises:
        BadInput: the cache folder cannot be written.
    """

    def find_key(folder: Path) -> None:
        (folder / "key").write_text(digest(contents()))

    return (get_or_build(root / "stamps", digest(stamps), find_key, waiting) / "key").read_text()


def _acquire_lock(path: Path, waiting: Callable[[], None]) -> AbstractContextManager[object]:
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        waiting()
        return lock.acquire()  # no timeout: the operating system releases the lock of a process that dies


def _build_entry(entry: Path, build: Callable[[Path], None], is_sealed: bool) -> None:
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
    """Whether the files of an entry are unchanged since it was built."""
    try:
        sums: dict[str, list[int]] = json.loads((entry / _SEAL).read_text(encoding="utf-8"))
        return all(_sum_of(entry / name) == list(expected) for name, expected in sums.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _sum_of(file: Path) -> list[int]:
    """Return the size of a file and a checksum of its blocks."""
    size, checksum = file.stat().st_size, 0
    last_block = max(0, size - 1) // BLOCK
    with file.open("rb") as stream:
        for block in sorted({last_block * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
            stream.seek(block * BLOCK)
            checksum = zlib.crc32(stream.read(BLOCK), checksum)
    return [size, checksum]
