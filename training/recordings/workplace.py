"""The folder that is being filled: held by one process, and the same source every time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from profiles.errors import BadInput
from training.run_files import explain, write_whole

_ELSEWHERE = "choose another folder with --out"
FORMS = {"flac": ("flac", "FLAC", "PCM_16"), "opus": ("opus", "OGG", "OPUS"), "wav": ("wav", "WAV", "PCM_16")}
"""Ending, container and coding by the name of the option."""


@dataclass(frozen=True)
class Origin:
    """What a folder is made from; another run with the same goes on with it."""

    source: str
    kind: str
    form: str


class Workplace:
    """Paths inside the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.audio = folder / "audio"
        self.own = folder / ".prepare"
        self.journal = self.own / "journal.jsonl"
        self.partial = self.own / "partial"

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder whole."""
        write_whole(self.folder / name, text.encode(), 0o644)

    def file_of(self, identity: str, key: str, form: str) -> Path:
        """Return where the sound of a recording lies: its name can be read, and holds nothing that a path means."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(identity).stem).strip("-.")[:48]
        return self.audio / f"{readable}{'-' if readable else ''}{key[:12]}.{FORMS[form][0]}"


@contextlib.contextmanager
def open_workplace(folder: Path, origin: Origin) -> Iterator[Workplace]:
    """Hold a folder: a new or empty one, or one that was prepared from the same source before.

    Raises:
        BadInput: it holds something else, another process works on it, or it cannot be written.
    """
    place = Workplace(folder)
    try:
        _refuse_foreign(place)
        for path in (place.own, place.audio):
            path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.own / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            hint = "wait until it has ended, or stop it with Ctrl-C"
            raise BadInput(f"{folder}: another process is preparing recordings there", hint) from error
        try:
            _keep_to_origin(place, origin)
            shutil.rmtree(place.partial, ignore_errors=True)  # left by a process that was killed: the lock is ours
            place.partial.mkdir()
            yield place
        finally:
            shutil.rmtree(place.partial, ignore_errors=True)
            lock.release()
    except OSError as error:
        message, _ = explain(error, folder)
        raise BadInput(message, _ELSEWHERE) from error


def _refuse_foreign(place: Workplace) -> None:
    if place.folder.is_dir() and not place.own.is_dir() and os.listdir(place.folder):
        raise BadInput(f"{place.folder}: holds something that 'prepare' has not made", _ELSEWHERE)


def _keep_to_origin(place: Workplace, origin: Origin) -> None:
    path = place.own / "origin.json"
    wanted = asdict(origin)
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        write_whole(path, json.dumps(wanted).encode())
        return
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: damaged", _ELSEWHERE) from error
    if found != wanted:
        known = found if isinstance(found, dict) else {}
        was = " ".join(str(known.get(name, "?")) for name in ("source", "kind", "form"))
        raise BadInput(f"{place.folder}: was prepared from another source or in another form: {was}", _ELSEWHERE)
