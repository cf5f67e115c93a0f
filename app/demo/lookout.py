"""Scripted discovery: machines appear one after the other, and one that sleeps wakes up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

from app.demo.machines import GB, ScriptedMachine, Trouble
from app.demo.pace import Pace
from app.wizard.services import Sight
from app.wizard.state import MachineRow, Machines, PathRow, Presence, Status
from profiles.errors import BadInput

USER = "me"
APPEAR_EVERY = 0.7
WAKES_AFTER = 9.0
SEARCHED = ("scripted: no network is looked at", "_ssh._tcp and _muster._tcp", "~/.ssh/config")


def machine_row(machine: ScriptedMachine, here: bool = False, awake: bool = True) -> MachineRow:
    """Return a machine of the script as the Machines screen shows it."""
    wired = PathRow(f"{machine.address}:22", "wifi" if machine.wifi else "wired", machine.interface, awake)
    direct = PathRow(f"169.254.12.{machine.address.rpartition('.')[2]}:22", "link-local", "bridge0", awake)
    row = MachineRow(
        key=machine.fingerprint,
        name=machine.name,
        status=Status.OK if awake else Status.FAILED,
        words="online" if awake else "offline",
        cause="" if awake else "it was here, and does not answer: asleep, or switched off",
        fix="" if awake else "wake it up; its row turns green by itself",
        address=machine.address,
        user=USER,
        here=here,
        chip=machine.chip,
        memory=f"{machine.memory // GB} GB",
        system=machine.os,
        found_by=("this computer",) if here else ("Bonjour",) if machine.system == "darwin" else ("ssh config",),
        paths=(wired, direct) if machine.system == "darwin" and not here else (wired,),
        fingerprint=machine.fingerprint,
    )
    return row


class Lookout:
    """Tells ``see`` of the scripted machines as they appear, from a thread of its own, until it is closed."""

    def __init__(self, machines: Sequence[ScriptedMachine], pace: Pace, see: Callable[[Sight], None]) -> None:
        self._machines = machines
        self._pace = pace
        self._see = see
        self._began = pace.passed
        self._typed: list[str] = []
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._look, name="scripted-lookout", daemon=True)
        self._thread.start()

    def add(self, text: str) -> None:
        """Look for a typed machine: one of the script by its name or address, or one that is not there.

        Raises:
            BadInput: it is no address.
        """
        host = text.strip().rpartition("@")[2]
        if not host or any(character.isspace() for character in host):
            raise BadInput(f"'{text}' is no address", "type user@host, as after ssh")
        self._typed.append(text.strip())
        self._changed.set()

    def remove(self, text: str) -> None:
        with contextlib.suppress(ValueError):
            self._typed.remove(text)
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def sight(self) -> Sight:
        """Return what is seen by now."""
        seconds = self._pace.passed - self._began
        rows = [self._row(place, machine, seconds) for place, machine in enumerate(self._machines)]
        seen = [row for row in rows if row is not None]
        known = {name for machine in self._machines for name in (machine.name, machine.address)}
        typed = [_nobody(text) for text in self._typed if text.rpartition("@")[2].partition(":")[0] not in known]
        presence = tuple(Presence(machine.name, True) for machine in self._machines)
        return Sight(Machines((*seen, *typed), SEARCHED, seconds), {"demo": presence})

    def _row(self, place: int, machine: ScriptedMachine, seconds: float) -> MachineRow | None:
        if seconds < APPEAR_EVERY * place:
            return None
        awake = machine.trouble is not Trouble.ASLEEP or seconds > WAKES_AFTER
        return machine_row(machine, here=place == 0, awake=awake)

    def _look(self) -> None:
        while not self._closed and not self._pace.closed:
            self._see(self.sight())
            self._changed.wait(max(0.02, min(1.0, APPEAR_EVERY / self._pace.speed)))
            self._changed.clear()


def _nobody(text: str) -> MachineRow:
    user, _, host = text.rpartition("@")
    return MachineRow(
        key=f"typed:{text}",
        name=host,
        status=Status.FAILED,
        words="unknown",
        cause="the script has no machine of this name",
        fix="without --demo it would be looked up and tried",
        address=host,
        user=user or USER,
        found_by=("typed",),
    )
