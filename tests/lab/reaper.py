"""Removal of labs whose owner was killed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab import network, processes
from tests.lab.spec import LabUnavailable

BASE = Path("/var/tmp/muster-lab")
_SLOTS = 200
_UNCLAIMED = 60.0
"""Seconds after which a folder without an owner counts as abandoned."""


@dataclass(frozen=True)
class Owner:
    """The process that built a lab."""

    pid: int
    birth: str

    @property
    def alive(self) -> bool:
        return bool(self.birth) and processes.birth(self.pid) == self.birth


def claim_slot() -> tuple[int, Path]:
    """Claim a free lab number, which determines the bridge's name and the addresses.

    Raises:
        LabUnavailable: all numbers are in use.
    """
    with alone():
        for slot in range(_SLOTS):
            folder = BASE / str(slot)
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            owner = {"pid": os.getpid(), "birth": processes.birth(os.getpid())}
            (folder / "owner.json").write_text(json.dumps(owner))
            return slot, folder
    raise LabUnavailable(f"all {_SLOTS} labs are in use; see: .venv/bin/python -m tests.lab list")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the lock for claiming and removing labs, so that a freed number is not removed again when it is reused."""
    BASE.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (BASE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def labs() -> dict[int, Owner | None]:
    """Return the owners of the labs on this machine by number; ``None`` if the owner is not known (yet)."""
    found = sorted(int(path.name) for path in BASE.iterdir() if path.name.isdigit()) if BASE.is_dir() else []
    return {slot: _owner(BASE / str(slot)) for slot in found}


def _owner(folder: Path) -> Owner | None:
    try:
        return Owner(**json.loads((folder / "owner.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def reap() -> list[int]:
    """Remove every lab whose owner is dead, and return their numbers.

    Hosts die with the owner; those still exiting are waited for.
    """
    with alone():
        gone = [slot for slot, owner in labs().items() if _abandoned(slot, owner)]
        for slot in gone:
            remove(slot)
    return gone


def _abandoned(slot: int, owner: Owner | None) -> bool:
    if owner is not None:
        return not owner.alive
    try:
        return time.time() - (BASE / str(slot)).stat().st_mtime > _UNCLAIMED
    except OSError:
        return False


def remove(slot: int) -> None:
    """Remove a lab's processes, network devices, cgroups and files."""
    folder = BASE / str(slot)
    for pid in _hosts_still_running(folder):
        processes.kill_now(pid)
    network.ip("link", "del", f"muster{slot}", check=False)
    for cable in Path("/sys/class/net").glob(f"mu{slot}h*"):
        network.unplug(cable.name)
    if network.CPU_CGROUP.is_dir():
        for quota in network.CPU_CGROUP.glob(f"muster-lab-{slot}-*"):
            network.remove_quota(quota)
    shutil.rmtree(folder, ignore_errors=True)


def _hosts_still_running(folder: Path) -> list[int]:
    """Return the PIDs of the hosts' process 1, recognised by the path of their plan on the command line."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            line = processes.command_line(pid)
        except OSError:
            continue
        if "init.py" in line and f"{folder}/" in line and not line.startswith(("unshare", "sh ")):
            found.append(pid)
    return found
