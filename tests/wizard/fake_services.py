"""A world for the set-up without machines: what it answers is laid out by the test, what it was asked is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from app.wizard.state.data_actions import LEAVE_OUT, Selection
from app.wizard.state.launch_records import LaunchProgress
from app.wizard.state.neighbours import NeighbourAnswers
from app.wizard.state.records import (
    Assessment,
    CandidateRow,
    DataSummary,
    DiscoveredMachines,
    Fit,
    Home,
    ItemStatus,
    JobAnswers,
    JobForm,
    JobOption,
    KnownProfile,
    MachineRow,
    PlanPreview,
    Presence,
    StrategyRanking,
    Tell,
)
from app.wizard.state.state import PlanRequest
from distributed.checks.findings import Finding
from distributed.discovery.neighbours import SshNeighbour
from distributed.hosts.file import Machine
from distributed.measuring.link_figures import LinkFigures, PairFigures
from distributed.planning.documents.document import Candidate, Choice
from distributed.planning.run_time import RunTime
from distributed.preparation.wheels import InstallProgress
from distributed.ssh.access import AccessReport
from distributed.ssh.errors import Stage
from distributed.ssh.keys.host_keys import HostKeyInfo
from profiles.errors import BadInput, RunFailed
from profiles.files.resolve import ProfileEntry
from profiles.options import options_by_name

OK = ItemStatus.OK


def known_machine(name: str, address: str) -> MachineRow:
    key = f"SHA256:{name}"
    return MachineRow(key, name, status=OK, entry=Machine(name=name, address=address, user="ada"), fingerprint=key)


HERE = MachineRow(
    "here", "desk", status=OK, entry=Machine(name="desk", address="localhost"), found_by=("this computer",)
)
ANNA, BERT = known_machine("anna", "10.0.0.2"), known_machine("bert", "10.0.0.3")
COMPARE = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


def let_in(machine: MachineRow) -> AccessReport:
    return AccessReport(machine.name, where=machine.entry.host, user=machine.entry.user)


def refused(machine: MachineRow, cause: str = "port_closed", stage: Stage = Stage.REACH, **more: Any) -> AccessReport:
    return replace(let_in(machine), failed=stage, cause=cause, problem=f"{cause} there", fix="repair it", **more)


def stranger(machine: MachineRow, fingerprint: str) -> AccessReport:
    """A machine that is met for the first time."""
    key = HostKeyInfo(machine.name, machine.name, "ssh-ed25519", b"")
    return refused(machine, "unknown_host_key", Stage.HOST_KEY, fingerprint=fingerprint, unknown_key=key)


def locked(machine: MachineRow) -> AccessReport:
    """A machine that takes a password."""
    return refused(machine, "no_key_accepted", Stage.LOGIN, password_possible=True)


BROKEN = (Finding("torch", "problem", "no torch", fix="distributed-check --fix", safe=True),)
FINE = (Finding("torch", "ok", "2.8.0"),)


def known(name: str, saved: bool = False, **more: Any) -> KnownProfile:
    return KnownProfile(ProfileEntry(name, more.pop("description", ""), Path(f"{name}.ini")), saved, **more)


def pair(source: str, target: str, mbit: float = 940.0, back: float = 940.0, **figures: Any) -> PairFigures:
    """Two machines with a cable between them, or what ``figures`` say."""
    plain = {"rtt_ms": 0.4, "jitter_ms": 0.0, "loss": 0.0, "loss_back": 0.0, "interface": "eth0", "interface_back": "",
             "wireless": False, "wireless_back": False, "other_mbit": 0.0, "address": "", "paths": ()}  # fmt: skip
    found = LinkFigures.model_validate({**plain, "mbit": mbit, "mbit_back": back, **figures})
    return PairFigures(source=source, target=target, figures=found)


def way(
    name: str,
    *members: str,
    index: int = 0,
    interval: int = 1,
    same_loss: float = 0.0,
    beside: tuple[str, float] = ("", 0.0),
    **more: Any,
) -> CandidateRow:
    """A way to train as the planner says it: ``name`` is strategy and codec."""
    strategy, _, codec = name.partition(" ")
    choice = Choice(strategy=strategy, codec=codec, engine="mesh", members=members, interval=interval)
    candidate = Candidate(choice=choice, **{"speed_up": 1.0, "useful_speed_up": 1.0, **more})
    seconds = candidate.steps * candidate.step
    return CandidateRow(
        candidate, index, same_loss, interval, candidate.useful_speed_up,
        time=RunTime(seconds, *beside) if seconds else None, exact=strategy == "allreduce",
        periodic=strategy == "diloco", recommended=not index,
    )  # fmt: skip


def moved(one: CandidateRow, interval: int) -> CandidateRow:
    """The same with another H."""
    choice = one.choice.model_copy(update={"interval": interval})
    return replace(one, candidate=one.candidate.model_copy(update={"choice": choice}))


CANDIDATES = (
    way("diloco mxfp4", "desk", "anna", interval=50, same_loss=70, step=0.1, steps=600, global_batch=16, speed_up=1.9,
        useful_speed_up=1.8),
    way("allreduce fp16", "desk", "anna", index=1, step=0.2),
    way("alone", "desk", index=2, step=0.3),
)  # fmt: skip


class FakeWatch:
    def __init__(self, world: FakeServices) -> None:
        self._world = world
        self.closed = False

    def look_for(self, typed: Sequence[str]) -> None:
        self._world.note(f"look for {' '.join(typed)}")
        self._world.added[:] = typed

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeServices:
    """All goes well unless the test says otherwise."""

    changes_machines: ClassVar[bool] = True
    machines: tuple[MachineRow, ...] = (HERE, ANNA, BERT)
    access: dict[str, AccessReport] = field(default_factory=dict)
    passwords: dict[str, str] = field(default_factory=dict)
    """By machine: what its server takes; afterwards it lets us in."""
    findings: dict[str, tuple[Finding, ...]] = field(default_factory=dict)
    saved: dict[str, tuple[MachineRow, ...]] = field(default_factory=dict)
    hold: dict[str, threading.Event] = field(default_factory=dict)
    """Methods that wait until their event is set."""
    accepting_ssh: tuple[str, ...] = ()
    launch_problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    requests: list[PlanRequest] = field(default_factory=list)
    forecasts: list[PlanRequest] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    see: Callable[[DiscoveredMachines], None] | None = None
    hosts: Path | None = None

    def note(self, name: str) -> None:
        self.asked.append(name)
        if name in self.hold:
            self.hold[name].wait(60)

    def home(self) -> Home:
        self.note("home")
        return Home(profiles=(known("demo"), *(known(name, saved=True) for name in self.saved)))

    def doctor(self) -> Sequence[Finding]:
        self.note("doctor")
        return (Finding("python", "ok", "3.12"),)

    def watch(self, see: Callable[[DiscoveredMachines], None]) -> FakeWatch:
        self.see = see
        see(self.sight())
        return FakeWatch(self)

    def sight(self) -> DiscoveredMachines:
        presence = {name: tuple(Presence(row.name, True) for row in rows) for name, rows in self.saved.items()}
        return DiscoveredMachines(self.machines, ("nowhere",), 1.0, presence=presence)

    def saved_machines(self, profile: str) -> Sequence[MachineRow]:
        self.note("saved_machines")
        return self.saved.get(profile, (HERE,))

    def neighbours(self, networks: Sequence[str]) -> NeighbourAnswers:
        self.note(" ".join(("neighbours", *networks)))
        machines = [SshNeighbour(address) for address in self.accepting_ssh]
        return NeighbourAnswers(3, machines, () if networks else ("10.9.9.0/24",))

    def skip_measuring(self) -> None:
        self.note("skip_measuring")

    def end_asking(self) -> None:
        self.note("end_asking")

    def check_access(self, machine: MachineRow, trusted: Sequence[str]) -> AccessReport:
        self.note(f"access {machine.name}")
        report = self.access.get(machine.name, let_in(machine))
        if report.unknown_key is not None and report.fingerprint in trusted:
            return let_in(machine)
        return report

    def approve(self, machine: MachineRow) -> None:
        self.note(f"approve {machine.name}")
        del self.access[machine.name]

    def install_key(self, machine: MachineRow, password: str, trusted: Sequence[str]) -> AccessReport:
        self.note(f"install {machine.name}")
        if self.passwords.get(machine.name) != password:
            return replace(self.access[machine.name], problem="the password is wrong")
        del self.access[machine.name]
        return let_in(machine)

    def examine(self, machines: Sequence[MachineRow], job: JobAnswers) -> Mapping[str, tuple[Finding, ...]]:
        self.note("examine")
        return {row.key: self.findings.get(row.name, FINE) for row in machines}

    def repair(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell, send: bool = False) -> None:
        self.note("repair with packages from here" if send else "repair")
        for row in machines:
            tell(InstallProgress("fixed", 1.0, row.name))
            self.findings.pop(row.name, None)

    def measure_links(self, machines: Sequence[MachineRow], job: JobAnswers, tell: Tell) -> Sequence[PairFigures]:
        self.note("links")
        tell("measuring")
        names = [row.name for row in machines]
        return [pair(a, b) for a in names for b in names if a < b]

    def job(self, answers: JobAnswers) -> JobForm:
        self.note("job")
        given = dict(answers.options)
        if answers.profile not in ("demo", *self.saved):
            raise BadInput(f"there is no profile '{answers.profile}'", "known: demo")
        rate = given.get("learning_rate", "0.001")
        bad = not rate.replace(".", "").isdigit()
        spec = options_by_name()["learning_rate"]
        option = JobOption(spec, rate, "0.001", "not a number" if bad else "", "learning_rate" in given)
        return JobForm((option,), ("tiny",), ("voices",), "tiny", "voices")

    def look_at_data(self, answers: JobAnswers) -> DataSummary:
        self.note("data")
        if dict(answers.options).get("dataset") != "messy":
            return DataSummary(samples=100)
        broken = Assessment(status=ItemStatus.FAILED, words="cannot be used", cause="b.wav is not there", fix=LEAVE_OUT)
        return DataSummary(salvageable=True, assessment=broken)

    def select_readable(self, answers: JobAnswers, tell: Tell) -> Selection:
        self.note("select")
        return Selection("messy-readable", 38, ("2 not there, such as b.wav",))

    def fits(self, machines: Sequence[MachineRow], answers: JobAnswers) -> Sequence[Fit]:
        self.note("fits")
        return [Fit(row.key, row.name, status=OK) for row in machines]

    def forecast(self, request: PlanRequest, tell: Tell) -> StrategyRanking:
        self.note("forecast")
        self.forecasts.append(request)
        ways = CANDIDATES if len(request.machines) > 1 else (replace(CANDIDATES[2], index=0, recommended=True),)
        return StrategyRanking(ways, ("because",), planning=ways)

    def with_interval(self, planning: Any, index: int, steps: int) -> CandidateRow:
        self.note("interval")
        if steps == 13:
            raise BadInput("13 is an unlucky number", "take another")
        return moved(CANDIDATES[index], steps)

    def plan(self, request: PlanRequest) -> PlanPreview:
        self.note("plan")
        name = request.answers.save_as or "demo-2"
        way = f"{request.chosen.choice.name} H={request.chosen.interval}" if request.chosen else "alone"
        return PlanPreview(way=way, profile=name, command=f"train {name}", files=(f"{name}.ini",))

    def save(self, request: PlanRequest) -> tuple[str, ...]:
        self.note("save")
        self.requests.append(request)
        return (f"{request.answers.save_as or 'demo-2'}.ini",)

    def launch(self, request: PlanRequest, see: Callable[[LaunchProgress], None], tell: Tell) -> Path:
        self.note("launch")
        self.requests.append(request)
        see(LaunchProgress(("copy", "start")))
        if self.launch_problems:
            raise RunFailed(self.launch_problems.pop(), "try again")
        return Path("/runs/1")

    def close(self) -> None:
        self.note("close")
