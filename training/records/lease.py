"""Leases of folders that several machines may share: a small file that names the machine at work and is renewed.

Locks and process ids work on one machine only. In a home folder on the network, the process at work writes the time and
its machine into the lease every few seconds; a machine that dies stops renewing it.

Standard library only, Python >= 3.9: it goes to the machines with their agent.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

LEASE, LOCK_NAME = "lease", "run.lock"
"""Names of the file, and of that which the process at work locks."""
_RENEWED = 5.0
_VALID = 180.0
"""Seconds after which a lease that was not renewed has expired: clocks of machines may differ by a minute, and the view
of a file of another machine may be a minute old."""
_VALID_HERE = 30.0
"""The same on one computer, where clock and files are shared: a container that was started again."""
_SOMEBODY = "another machine"


def this_machine() -> str:
    """Return the identity of this machine: its host name, boot id and process-id namespace."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return "/".join((os.uname().nodename.replace("/", "-"), boot, namespace))


def holder(text: str, own_machine: str, now: float) -> str:
    """Return the name of the other machine that holds a lease; empty: none does, or this machine may.

    Args:
        text: content of its file: seconds since the epoch, and a machine.
        own_machine: as :func:`this_machine` returns it.
        now: seconds since the epoch.
    """
    moment, _, machine = text.strip().partition(" ")
    name, boot, namespace = [*machine.split("/"), "", ""][:3]
    here_name, here_boot, here_namespace = [*own_machine.split("/"), "", ""][:3]
    if boot and here_boot:
        is_ours = (boot, namespace) == (here_boot, here_namespace) or (name == here_name and boot != here_boot)
    else:
        is_ours = name == here_name
    if is_ours:
        return ""
    valid = _VALID_HERE if boot and boot == here_boot else _VALID
    try:
        is_over = now - float(moment) > valid
    except ValueError:  # it cannot be known
        is_over = False
    return "" if is_over else name or _SOMEBODY


def held_elsewhere(folder: Path) -> str:
    """Return the name of another machine that works in a folder; empty: none does."""
    try:
        text = (folder / LEASE).read_text(errors="replace")
    except OSError:
        return ""
    return holder(text, this_machine(), time.time())


class Lease:
    """A folder held by this process, until it is released or the process ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder.resolve() / LEASE
        self._line = this_machine()
        self._over = threading.Event()
        self.renew(os.O_CREAT)
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def release(self) -> None:
        """Let the folder go. Idempotent."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _keep(self) -> None:
        while not self._over.wait(_RENEWED):
            self.renew()

    def renew(self, flags: int = 0) -> None:
        """Overwrite the old bytes, which needs no space on a full disk; readers see the old time or the new one.

        A removed file is not created again: its folder may be about to be removed.
        """
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_WRONLY | flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.pwrite(descriptor, f"{int(time.time()):012d} {self._line}\n".encode(), 0)
            finally:
                os.close(descriptor)
