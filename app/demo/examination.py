"""Scripted findings on the machines, one of which is mended by its fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from app.demo.machines import GB, ScriptedMachine, Trouble
from app.demo.pace import Pace
from app.wizard.services import Tell
from app.wizard.state import CheckRow, FindingRow, MachineRow, Status

LOOKING = 1.6
MENDING = 2.4
WRONG_TORCH, RIGHT_TORCH = "2.4.1", "2.8.0"


class Examination:
    """Looks at scripted machines; remembers what was mended."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._mended: set[str] = set()

    def look(self, machines: Sequence[tuple[MachineRow, ScriptedMachine]]) -> list[CheckRow]:
        """Look at all machines side by side."""
        self._pace.work(LOOKING)
        return [self._row(row, machine) for row, machine in machines]

    def mend(self, machines: Sequence[tuple[MachineRow, ScriptedMachine]], check: str, tell: Tell) -> None:
        """Mend what is safe to mend: the packages of a machine."""
        for _, machine in machines:
            if check in ("", "torch") and self._wrong(machine):
                for part in range(4):
                    tell(f"{machine.name}: packages from the lock file, {part * 71} of 213 MB")
                    self._pace.work(MENDING / 4)
                self._mended.add(machine.name)
                tell(f"{machine.name}: environment ready, torch {RIGHT_TORCH}")

    def _wrong(self, machine: ScriptedMachine) -> bool:
        return machine.trouble is Trouble.PASSWORD and machine.name not in self._mended

    def _row(self, row: MachineRow, machine: ScriptedMachine) -> CheckRow:
        findings = tuple(self._findings(machine))
        worst = next((f for f in findings if f.status is Status.FAILED), None)
        worst = worst or next((f for f in findings if f.status is Status.WARNING), None)
        return CheckRow(
            key=row.key,
            name=row.name,
            status=worst.status if worst else Status.OK,
            words="" if worst else "ready",
            cause=f"{worst.name}: {worst.seen}" if worst else "",
            fix=worst.fix if worst else "",
            findings=findings,
            fixable=any(finding.safe for finding in findings),
        )

    def _findings(self, machine: ScriptedMachine) -> Iterator[FindingRow]:
        yield _fine("system", machine.os)
        yield _fine("python", "3.12.7", "3.10 or newer")
        yield self._torch(machine)
        yield _fine("device", f"{machine.device}: a right product of two matrices")
        yield _fine("memory", f"{machine.memory * 7 // 10 // GB} of {machine.memory // GB} GB free")
        yield _fine("disk", "184 GB free", "2 GB")
        yield _fine("clock", "+0.1 s", "at most 5 s off")
        yield _power(machine)
        yield _fine("data", "the same on all machines")
        yield _fine("ways", "reaches all others, and they reach it")

    def _torch(self, machine: ScriptedMachine) -> FindingRow:
        if not self._wrong(machine):
            return _fine("torch", RIGHT_TORCH, "one version on all machines")
        return FindingRow(
            "torch",
            "torch",
            Status.FAILED,
            words="another version",
            cause=f"torch {WRONG_TORCH} where the others have {RIGHT_TORCH}",
            fix="an environment from the lock file, 213 MB, in our cache folder there",
            seen=WRONG_TORCH,
            needed=f"{RIGHT_TORCH}, as on all machines",
            safe=True,
        )


def _fine(check: str, seen: str, needed: str = "") -> FindingRow:
    return FindingRow(check, check, Status.OK, seen=seen, needed=needed)


def _power(machine: ScriptedMachine) -> FindingRow:
    if machine.on_mains:
        return _fine("power", "on mains")
    cause, fix = "runs on battery, 64 %", "plug it in"
    return FindingRow("power", "power", Status.WARNING, "battery", cause, fix, seen=cause, needed="mains")
