"""Files to a far machine: what is missing there by content hash, as one compressed stream that may break and go on."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from distributed.machine.link import Link, document
from distributed.ssh.errors import CommandTimeout, ConnectTimeout, Dropped, NoRoute, PortClosed, SshError
from profiles.errors import BadInput
from training.run_files import explain

Progress = Callable[[int, int], None]
"""Takes bytes that were sent and bytes that are to be sent, of the files' own size."""
PATIENCE = 60.0
"""Seconds without a byte more on the far side after which a broken transfer is given up."""
_PIECE = 1 << 18
_TELL = 0.5
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


class Lack(BaseModel):
    """What a machine has not."""

    model_config = ConfigDict(frozen=True)

    trees: tuple[str, ...]
    blobs: tuple[str, ...]
    begun: dict[str, NonNegativeInt]
    """Bytes of a blob that have arrived."""

    @classmethod
    def parse(cls, machine: str, answer: Mapping[str, Any], asked: Collection[str]) -> Lack:
        """Read a machine's answer to the question which of the blobs ``asked`` it has not.

        Raises:
            SshError: it is something else.
        """
        with contextlib.suppress(ValidationError):
            found = cls.model_validate(answer)
            if set(found.blobs) <= set(asked):
                return found
        raise SshError(machine, "it did not report which files it lacks", "try again")

    def left(self, sources: Mapping[str, Path]) -> int:
        """Bytes still to be sent."""
        return sum(sources[blob].stat().st_size - self.begun.get(blob, 0) for blob in self.blobs)


def ask_missing(link: Link, trees: Sequence[str], blobs: Sequence[str], *, prepared: bool = True) -> Lack:
    """Ask what is not there; notes the machine's folder on the link.

    Args:
        prepared: the agent's programs are there; else the one that is asked travels in the command.

    Raises:
        SshError: it cannot be asked.
    """
    question = json.dumps({"trees": list(trees), "blobs": list(blobs)}).encode()
    done = link.ask("missing", input=question) if prepared else link.ask_unprepared("missing", input=question)
    answer = document(link.name, done.stdout)
    lack = Lack.parse(link.name, answer, blobs)
    link.root = str(answer.get("root", link.root))
    return lack


def send_trees(link: Link, trees: Sequence[Tree], progress: Progress = lambda done, total: None) -> int:
    """Bring folders to a machine, to ``trees/NAME`` of Muster's folder; return how many files were missing there.

    A connection that breaks is made again, and what has arrived stays.

    Raises:
        SshError: the machine cannot take them.
        BadInput: a file of this machine cannot be read.
    """
    absent = set(ask_missing(link, [tree.name for tree in trees], []).trees)
    lacking = [tree for tree in trees if tree.name in absent]
    return _Sending(link, lacking, progress).to_the_end() if lacking else 0


class _Sending:
    """Some trees on their way to one machine."""

    def __init__(self, link: Link, trees: Sequence[Tree], progress: Progress) -> None:
        self._link = link
        self._trees = trees
        self._sources = {blob: path for tree in trees for blob, path in tree.sources.items()}
        self._progress = progress
        self._moved = time.monotonic()

    def to_the_end(self) -> int:
        lack = self._ask()
        total = least = lack.left(self._sources)
        count = len(lack.blobs)
        while True:
            try:
                self._send(lack, total)
                return count
            except _BREAKS:
                lack = self._ask()
                if lack.left(self._sources) < least:
                    least, self._moved = lack.left(self._sources), time.monotonic()

    def _ask(self) -> Lack:
        """Ask what is missing, as often as it takes.

        Raises:
            SshError: nothing has arrived there for too long.
        """
        while True:
            try:
                return ask_missing(self._link, [], sorted(self._sources))
            except _BREAKS:
                if time.monotonic() - self._moved > PATIENCE:
                    raise
                time.sleep(1.0)

    def _send(self, lack: Lack, total: int) -> None:
        there = total - lack.left(self._sources)
        header = {"trees": {tree.name: dict(tree.files) for tree in self._trees}, "begun": dict(lack.begun)}
        blobs = {blob: self._sources[blob] for blob in lack.blobs}
        pieces = packed(header, blobs, lack.begun, lambda done: self._progress(there + done, total))
        stream = Outgoing(pieces)
        try:
            self._link.ask("sync", input=cast(BinaryIO, stream), timeout=None)
        finally:
            stream.check()


def packed(
    header: Mapping[str, Any], blobs: Mapping[str, Path], begun: Mapping[str, int], tell: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield a line of JSON and a gzipped tar of the blobs, each from where it was left off.

    Raises:
        OSError: a file cannot be read, or is not what it was.
    """
    yield json.dumps(header).encode() + b"\n"
    buffer, done, due = io.BytesIO(), 0, time.monotonic() + _TELL
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
                        due = time.monotonic() + _TELL
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


class Outgoing:
    """A stream to read from. Its end may come early: :meth:`check` tells."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""
        self._failure: OSError | None = None
        self.sent = 0

    def read(self, size: int = -1) -> bytes:
        """Return at most ``size`` bytes, none at the end."""
        while not self._rest:
            try:
                self._rest = next(self._pieces)
            except StopIteration:
                return b""
            except OSError as error:  # whoever reads this is a thread that cannot say it
                self._failure = error
                return b""
        cut = len(self._rest) if size < 0 else size
        data, self._rest = self._rest[:cut], self._rest[cut:]
        self.sent += len(data)
        return data

    def check(self) -> None:
        """Raise ``BadInput`` if a file could not be read."""
        if self._failure is not None:
            raise BadInput(*explain(self._failure, Path(self._failure.filename or "a file"))) from None
