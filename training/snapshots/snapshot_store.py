"""Snapshots of one member: atomic, complete, and checked by hash.

::

    checkpoints/member-0/
        step-00000120/
            state.safetensors      every tensor by name (model/..., optimizer/..., strategy/..., rng/...)
            manifest.json          step, plan, JSON state, size and SHA-256 of the files, library versions
        .writing-00000160/         a snapshot being written; a leftover is swept by the next save, or the run's end
        .replaced-00000040/        one that is being removed; likewise
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from torch import Tensor

from profiles.errors import BadInput, RunFailed
from training.records.run_files import explain_full_disk, sha256, sync_folder
from training.snapshots.pieces import Cut
from training.snapshots.tensor_file import TensorFile

SNAPSHOT_VERSION = 1
_TENSORS = "state.safetensors"
_MANIFEST = "manifest.json"
_COMPLETE = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(writing|replaced)-\d+")


class DamagedSnapshot(RunFailed):
    """A snapshot is missing, incomplete, or not what was written."""


@dataclass(frozen=True)
class Snapshot:
    """Everything one member needs to go on as if it had never stopped."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any] = field(default_factory=dict)
    """JSON-able; floats come back bit for bit."""


class SnapshotStore:
    """The snapshots of one member.

    Args:
        directory: folder of this member's snapshots; made on the first save.
        keep: how many are kept.
        shared: whether other members write snapshots of the same steps. Members save one after another, so each keeps
            at least 2, and removes the oldest only as it begins the next: all but its newest one are on all disks then.
    """

    def __init__(self, directory: Path, keep: int, shared: bool = False) -> None:
        self.directory = directory
        self.keep = max(1 + shared, keep)
        self._shared = shared
        self.held: Collection[int] = ()
        """Steps that are kept, however many newer ones there are."""
        self.current: int | None = None
        """The step that was saved or loaded last. Folders of other steps may belong to an abandoned attempt."""
        self.abandoned: Sequence[SnapshotStore] = ()
        """Other parts of the same snapshots that nobody writes any more: they go with this store's."""

    def save(self, snapshot: Snapshot, plan_hash: str) -> tuple[Path, int]:
        """Write a snapshot from its tensors, see :meth:`write`."""
        return self.write(snapshot.step, TensorFile(snapshot.tensors).pieces(), snapshot.state, plan_hash)

    def write(
        self, step: int, pieces: Iterable[memoryview], state: Mapping[str, Any], plan_hash: str
    ) -> tuple[Path, int]:
        """Write a snapshot and return its folder and its bytes.

        It appears whole or not at all. Afterwards older ones beyond ``keep`` are removed, and so are those of later
        steps: they belong to an attempt that was abandoned when the run was resumed from an earlier step.

        Args:
            pieces: of the file of its tensors.
            state: JSON-able.

        Raises:
            RunFailed: the disk is full or read-only; nothing half-written is left.
        """
        writing = self.directory / f".writing-{step:08d}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self.sweep()
            self._drop(self._earlier(step)[self.keep :])
            size = _write(writing, step, pieces, state, plan_hash)
            folder = self._publish(writing, step)
            self._drop(old for old in self.steps() if old > step)
            self._drop(self._earlier(step)[self.keep - (not self._shared) :])
            for store in self.abandoned:
                store._drop(old for old in store.steps() if old not in self.steps())
        except OSError as error:
            reason, hint = _explain(error, self.directory)
            message = f"the snapshot of step {step} cannot be written to {self.directory}: {reason}"
            raise RunFailed(message, hint) from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        self.current = step
        return folder, size

    def manifest(self, step: int) -> bytes:
        """Return the manifest of the snapshot of ``step``, for :meth:`write_copy` on another machine.

        Raises:
            DamagedSnapshot: it cannot be read.
        """
        with _explaining(self._folder(step) / _MANIFEST) as path:
            return path.read_bytes()

    def content(self, step: int, size: int) -> Iterator[bytes]:
        """Yield the file of a snapshot's tensors in pieces of at most ``size`` bytes.

        Raises:
            DamagedSnapshot: it cannot be read.
        """
        with _explaining(self._folder(step) / _TENSORS) as path, path.open("rb") as stream:
            yield from iter(lambda: stream.read(size), b"")

    def write_copy(self, manifest: bytes, pieces: Iterable[bytes]) -> Path:
        """Write what :meth:`manifest` and :meth:`content` of another store gave; return the folder.

        Raises:
            DamagedSnapshot: the tensors are not those of the manifest; nothing is left.
            RunFailed: it cannot be written.
        """
        copy = announced_copy(manifest)
        views = (memoryview(piece) for piece in _checked(pieces, copy, self.directory))
        return self.write(copy.step, views, copy.body["state"], copy.body["plan_hash"])[0]

    def names(self, step: int) -> list[str]:
        """Return the names of the tensors in the snapshot of ``step``.

        Raises:
            DamagedSnapshot: they cannot be read.
        """
        with _opened(self._folder(step)) as file:
            return list(file.keys())

    def steps(self) -> list[int]:
        """Return the steps of the snapshots that look complete, newest first."""
        files = (_MANIFEST, _TENSORS)
        with contextlib.suppress(OSError):  # a disk that fails shows none
            steps = self._steps_on_disk()
            return [step for step in steps if all((self._folder(step) / file).is_file() for file in files)]
        return []

    def newest_in_words(self) -> str:
        """Return a sentence on the newest snapshot."""
        steps = self.steps()
        return f"the snapshot of step {steps[0]} is kept" if steps else "no snapshot was written yet"

    def verified_steps(self) -> tuple[list[int], list[str]]:
        """Check every snapshot by hash; return the sound ones, newest first, and a line about each damaged one."""
        sound, problems = list[int](), list[str]()
        try:
            steps = self._steps_on_disk()
        except OSError as error:
            return [], [f"{self.directory}: {error.strerror}"]
        for step in steps:
            try:
                _check(self._folder(step))
                sound.append(step)
            except DamagedSnapshot as error:
                problems.append(error.message)
        return sound, problems

    def _steps_on_disk(self) -> list[int]:
        """Return the steps that have a folder, newest first."""
        folders = self.directory.iterdir() if self.directory.is_dir() else ()
        names = (_COMPLETE.fullmatch(folder.name) for folder in folders)
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def foreign(self, steps: Iterable[int], plan_hash: str) -> dict[int, str]:
        """Return the steps whose sound snapshots were made with another plan, with a line about each.

        Raises:
            DamagedSnapshot: one cannot be read.
        """
        folders = {step: self._folder(step) for step in steps}
        others = {step: folder for step, folder in folders.items() if _read_manifest(folder)["plan_hash"] != plan_hash}
        return {step: f"{folder} was made with different settings" for step, folder in others.items()}

    def state(self, step: int) -> dict[str, Any]:
        """Return the JSON-able part of the snapshot of ``step``.

        Raises:
            DamagedSnapshot: it cannot be read.
        """
        return dict(_read_manifest(self._folder(step))["state"])

    def load(self, step: int, plan_hash: str, cut: Cut = lambda name, shape: ()) -> Snapshot:
        """Return the snapshot of ``step``, which :meth:`verified_steps` has checked, its tensors on the CPU.

        Args:
            cut: returns what is needed of a tensor; the rest is not read.

        Raises:
            DamagedSnapshot: missing, or not readable.
            BadInput: it was made with another plan.
        """
        folder = self._folder(step)
        manifest = _read_manifest(folder)
        if manifest["plan_hash"] != plan_hash:
            raise BadInput(f"{folder} was made with different settings", OTHER_SETTINGS)
        with _opened(folder) as file:
            pieces = {name: file.get_slice(name) for name in [*file.keys()]}
            cuts = {name: cut(name, piece.get_shape()) for name, piece in pieces.items()}
            tensors = {name: pieces[name][needed] for name, needed in cuts.items() if needed is not None}
        self.current = step
        return Snapshot(manifest["step"], tensors, manifest["state"])

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _publish(self, writing: Path, step: int) -> Path:
        folder, replaced = self._folder(step), self.directory / f".replaced-{step:08d}"
        if folder.exists():
            # Another course of the run was here; a folder that holds files cannot be replaced in one call.
            folder.rename(replaced)
        writing.rename(folder)
        sync_folder(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)
        return folder

    def _earlier(self, step: int) -> list[int]:
        return [old for old in self.steps() if old < step and old not in self.held]

    def _drop(self, steps: Iterable[int]) -> None:
        for step in steps:
            going = self.directory / f".replaced-{step:08d}"
            self._folder(step).rename(going)  # first, so that a kill leaves no half of a snapshot that looks damaged
            shutil.rmtree(going)

    def sweep(self) -> None:
        """Remove what a killed process has left half-written or half-removed.

        Raises:
            OSError: it cannot be removed.
        """
        for folder in self.directory.iterdir():
            if _LEFTOVER.fullmatch(folder.name):
                shutil.rmtree(folder)


_PASS_OVER = "resume from an earlier snapshot"
OTHER_SETTINGS = "resume with the settings the run began with"


def _write(folder: Path, step: int, pieces: Iterable[memoryview], state: Mapping[str, Any], plan_hash: str) -> int:
    """Write and fsync one snapshot; return its bytes."""
    folder.mkdir()
    size, digest = _write_hashed(folder / _TENSORS, pieces)
    body = {
        "version": SNAPSHOT_VERSION,
        "step": step,
        "plan_hash": plan_hash,
        "state": state,
        "files": {_TENSORS: {"bytes": size, "sha256": digest}},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }
    manifest = json.dumps({"sha256": _body_hash(body), **body}, indent=1).encode()
    size += _write_hashed(folder / _MANIFEST, [memoryview(manifest)])[0]
    sync_folder(folder)
    return size


def _write_hashed(path: Path, pieces: Iterable[memoryview]) -> tuple[int, str]:
    """Write and fsync a file; return its bytes and its SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as stream:
        for piece in pieces:
            digest.update(piece)
            size += len(piece)
            while len(piece):  # the system writes 2 GiB at once at most
                piece = piece[stream.write(piece) :]
        os.fsync(stream.fileno())
    return size, digest.hexdigest()


def _check(folder: Path) -> dict[str, Any]:
    """Return the manifest of a snapshot whose files are as they were written."""
    manifest = _read_manifest(folder)
    for name, expected in manifest["files"].items():
        file = folder / name
        try:
            size, digest = file.stat().st_size, sha256(file)
        except OSError as error:
            raise DamagedSnapshot(f"{file}: {error.strerror}", _PASS_OVER) from error
        if size != expected["bytes"]:
            raise DamagedSnapshot(f"{file} is damaged: {size} bytes, not {expected['bytes']}", _PASS_OVER)
        if digest != expected["sha256"]:
            raise DamagedSnapshot(f"{file} is damaged: its SHA-256 differs from the recorded one", _PASS_OVER)
    return manifest


class AnnouncedCopy(NamedTuple):
    """What a manifest says of a snapshot that arrives."""

    step: int
    size: int
    """Bytes of its tensors' file."""
    digest: str
    body: dict[str, Any]


def announced_copy(manifest: bytes) -> AnnouncedCopy:
    """Return what another machine's manifest announces.

    Raises:
        DamagedSnapshot: it is not a manifest.
    """
    body = _parse_manifest(manifest, "the manifest that arrived")
    try:
        file = body["files"][_TENSORS]
        return AnnouncedCopy(int(body["step"]), max(0, int(file["bytes"])), str(file["sha256"]), body)
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedSnapshot("the manifest that arrived is damaged: it names no tensors", _PASS_OVER) from error


def _checked(pieces: Iterable[bytes], expected: AnnouncedCopy, directory: Path) -> Iterator[bytes]:
    """Yield the pieces of a file; raise at the end if it is not the announced one."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
        yield piece
    if (size, digest.hexdigest()) != (expected.size, expected.digest):
        raise DamagedSnapshot(f"what arrived for {directory} is damaged: its SHA-256 differs", _PASS_OVER)


@contextlib.contextmanager
def _explaining(path: Path) -> Iterator[Path]:
    """Report that a file of a snapshot cannot be read."""
    try:
        yield path
    except OSError as error:
        raise DamagedSnapshot(f"{path}: {error.strerror}", _PASS_OVER) from error


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    """Open the tensors of a snapshot."""
    try:
        with safetensors.safe_open(folder / _TENSORS, "pt") as file:
            yield file
    except (OSError, safetensors.SafetensorError) as error:
        raise DamagedSnapshot(f"{folder / _TENSORS} cannot be read: {error}", _PASS_OVER) from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    with _explaining(folder / _MANIFEST) as path:
        return _parse_manifest(path.read_bytes(), str(path))


def _parse_manifest(data: bytes, name: str) -> dict[str, Any]:
    """Return the body of a manifest; ``name``: of its file, for messages."""
    try:
        body = json.loads(data)
        expected = body.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedSnapshot(f"{name} is damaged: not a manifest", _PASS_OVER) from error
    if _body_hash(body) != expected:
        raise DamagedSnapshot(f"{name} is damaged: its SHA-256 differs from the recorded one", _PASS_OVER)
    if body["version"] != SNAPSHOT_VERSION:
        version = body["version"]
        raise DamagedSnapshot(f"{name} has version {version}, this program reads {SNAPSHOT_VERSION}", _PASS_OVER)
    return dict(body)


def _body_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _explain(error: OSError, folder: Path) -> tuple[str, str]:
    """Return reason and hint."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason, cure = explain_full_disk(error.errno, folder)
        return reason, cure
    return error.strerror or str(error), "make the folder writable"
