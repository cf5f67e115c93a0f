"""A world for the set-up without machines: what it answers is laid out by the test, what it was asked is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.wizard.services import JobAnswers, Request, Sight, Tell
from app.wizard.state import (
    AccessRow,
    CandidateRow,
    CheckRow,
    DataRow,
    FindingRow,
    FitRow,
    Home,
    Job,
    Launch,
    LinkRow,
    MachineRow,
    Machines,
    Need,
    OptionRow,
    Plan,
    Presence,
    ProfileRow,
    Status,
    Strategy,
)
from profiles.errors import BadInput, RunFailed

HERE = MachineRow("here", "desk", Status.OK, here=True, found_by=("this computer",))
ANNA = MachineRow("SHA256:anna", "anna", Status.OK, address="10.0.0.2", user="ada", fingerprint="SHA256:anna")
BERT = MachineRow("SHA256:bert", "bert", Status.OK, address="10.0.0.3", user="ada", fingerprint="SHA256:bert")
STAGES = ("reach", "host key", "login", "shell")


def let_in(machine: MachineRow) -> AccessRow:
    return AccessRow(machine.key, machine.name, Status.OK, "ok", stages=tuple((name, Status.OK) for name in STAGES))


def refused(machine: MachineRow, code: str = "port_closed", **changes: Any) -> AccessRow:
    row = AccessRow(machine.key, machine.name, Status.FAILED, cause=f"{code} there", fix="mend it", code=code)
    return replace(row, **changes)


CANDIDATES = (
    CandidateRow("0", "diloco mxfp4", Status.OK, index=0, over="hub desk", members=("desk", "anna"), step_seconds=0.1,
                 steps=600, samples=16, same_loss_seconds=70, speed_up=1.9, useful_speed_up=1.8, interval=50,
                 best_interval=50, periodic=True, recommended=True),
    CandidateRow("1", "allreduce fp16", Status.OK, index=1, over="hub desk", members=("desk", "anna"),
                 step_seconds=0.2),
    CandidateRow("2", "alone", Status.OK, index=2, over="desk", members=("desk",), step_seconds=0.3, alone=True),
)  # fmt: skip


class FakeWatch:
    def __init__(self, world: FakeServices) -> None:
        self._world = world
        self.closed = False

    def add(self, text: str) -> None:
        self._world.added.append(text)

    def remove(self, text: str) -> None:
        self._world.added.remove(text)

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeServices:
    """All goes well unless the test says otherwise."""

    machines: tuple[MachineRow, ...] = (HERE, ANNA, BERT)
    access: dict[str, AccessRow] = field(default_factory=dict)
    passwords: dict[str, str] = field(default_factory=dict)
    """By machine: what its server takes; afterwards it lets us in."""
    findings: dict[str, CheckRow] = field(default_factory=dict)
    saved: dict[str, tuple[MachineRow, ...]] = field(default_factory=dict)
    hold: dict[str, threading.Event] = field(default_factory=dict)
    """Methods that wait until their event is set."""
    launch_problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    forecasts: list[Request] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    see: Callable[[Sight], None] | None = None

    def _asked(self, name: str) -> None:
        self.asked.append(name)
        if name in self.hold:
            self.hold[name].wait(60)

    def home(self) -> Home:
        self._asked("home")
        return Home(profiles=(ProfileRow("demo", "demo"), *(ProfileRow(n, n, saved=True) for n in self.saved)))

    def doctor(self) -> Sequence[FindingRow]:
        self._asked("doctor")
        return (FindingRow("python", "python", Status.OK),)

    def watch(self, see: Callable[[Sight], None]) -> FakeWatch:
        self.see = see
        see(self.sight())
        return FakeWatch(self)

    def sight(self) -> Sight:
        presence = {name: tuple(Presence(row.name, True) for row in rows) for name, rows in self.saved.items()}
        return Sight(Machines(self.machines, ("nowhere",), 1.0), presence)

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        self._asked("saved_machines")
        return self.saved.get(profile, (HERE,))

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessRow:
        self._asked(f"access {machine.name}")
        row = self.access.get(machine.name, let_in(machine))
        if row.need is Need.TRUST and row.fingerprint in trusted:
            return let_in(machine)
        return row

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessRow:
        self._asked(f"install {machine.name}")
        if self.passwords.get(machine.name) != password:
            return replace(self.access[machine.name], cause="the password is wrong")
        del self.access[machine.name]
        return let_in(machine)

    def examine(self, machines: Sequence[MachineRow], job: JobAnswers) -> Sequence[CheckRow]:
        self._asked("examine")
        return [self.findings.get(row.name, CheckRow(row.key, row.name, Status.OK)) for row in machines]

    def repair(self, machines: Sequence[MachineRow], job: JobAnswers, check: str, tell: Tell) -> None:
        self._asked("repair")
        for row in machines:
            tell(f"{row.name}: mended")
            self.findings.pop(row.name, None)

    def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[LinkRow]:
        self._asked("links")
        tell("measuring")
        names = [row.name for row in machines]
        return [LinkRow(f"{a}|{b}", "", Status.OK, source=a, target=b, mbit=940) for a in names for b in names if a < b]

    def job(self, answers: JobAnswers) -> Job:
        self._asked("job")
        given = dict(answers.options)
        if answers.profile not in ("demo", *self.saved):
            raise BadInput(f"there is no profile '{answers.profile}'", "known: demo")
        rate = given.get("learning_rate", "0.001")
        bad = not rate.replace(".", "").isdigit()
        option = OptionRow("learning_rate", "learning_rate", Status.FAILED if bad else Status.OK, value=rate,
                           default="0.001", cause="not a number" if bad else "")  # fmt: skip
        return Job((option,), ("tiny",), ("voices",), "tiny", "voices")

    def look_at_data(self, answers: JobAnswers) -> DataRow:
        self._asked("data")
        return DataRow("data", "voices", Status.OK, samples=100)

    def fits(self, machines: Sequence[MachineRow], answers: JobAnswers) -> Sequence[FitRow]:
        self._asked("fits")
        return [FitRow(row.key, row.name, Status.OK) for row in machines]

    def forecast(self, request: Request, tell: Tell) -> Strategy:
        self._asked("forecast")
        self.forecasts.append(request)
        rows = CANDIDATES if len(request.machines) > 1 else (replace(CANDIDATES[2], index=0, recommended=True),)
        return Strategy(rows, ("because",), planning=rows)

    def with_interval(self, planning: Any, index: int, steps: int) -> CandidateRow:
        self._asked("interval")
        if steps == 13:
            raise BadInput("13 is an unlucky number", "take another")
        return replace(CANDIDATES[index], interval=steps)

    def plan(self, request: Request) -> Plan:
        self._asked("plan")
        name = request.save_as or "demo-2"
        way = f"{request.chosen.name} H={request.chosen.interval}" if request.chosen else "alone"
        return Plan(way=way, profile=name, command=f"train {name}", files=(f"{name}.ini",))

    def save(self, request: Request) -> tuple[str, ...]:
        self._asked("save")
        self.requests.append(request)
        return (f"{request.save_as or 'demo-2'}.ini",)

    def launch(self, request: Request, see: Callable[[Launch], None]) -> Path:
        self._asked("launch")
        self.requests.append(request)
        see(Launch(("copy", "start"), status=Status.WORKING))
        if self.launch_problems:
            raise RunFailed(self.launch_problems.pop(), "try again")
        return Path("/runs/1")

    def close(self) -> None:
        self._asked("close")
