"""One full state for every step of the set-up, and a steering that only notes what was done."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from app.wizard.engine import TaskRecord
from app.wizard.state.assessment import of_report
from app.wizard.state.launch_records import LaunchProgress, LaunchRow
from app.wizard.state.records import (
    Access,
    Assessment,
    DataSummary,
    DiscoveredMachines,
    Fit,
    Home,
    ItemStatus,
    JobForm,
    JobOption,
    MachineChange,
    MachineRow,
    PlanPreview,
    Presence,
    StrategyRanking,
)
from app.wizard.state.state import Action, Answers, StatePart, Step, TaskKind, WizardState
from distributed.checks.findings import Finding
from distributed.discovery.machine_identity import FoundPath
from distributed.discovery.network_interfaces import Endpoint, PathKind
from distributed.discovery.sightings import Reachability
from distributed.hosts.file import Machine
from distributed.ssh.access import AccessReport
from distributed.ssh.errors import Stage
from profiles.options import options_by_name
from tests.wizard.fake_services import known, locked, pair, refused, stranger, way
from training.records.plan import RunMetadata
from training.records.runs import RunSummary

OK, BAD, WARN, WAIT = ItemStatus.OK, ItemStatus.FAILED, ItemStatus.WARNING, ItemStatus.WAITING
EVIL = "evil\x1b[31m[bold red]mac\u202e"
"""A name from the network with an escape code, markup and a mark that turns the direction of writing."""


def _run(name: str, status: str, start: str, live: bool = False) -> RunSummary:
    path = Path("output", name)
    start = datetime.fromisoformat(start).astimezone().isoformat()  # here, as it is shown
    metadata = RunMetadata.model_validate({"run_id": name[:20], "start_time": start, "profile": name[21:],
                                           "status": status})  # fmt: skip
    return RunSummary(path, name[:20], metadata, "", live)


HOME = Home(
    (
        _run("20260921-130000-ab12-talk", "running", "2026-09-21T13:00:00", live=True),
        _run("20260920-090000-cd34-demo", "completed", "2026-09-20T09:00:00"),
    ),
    (
        known("talk", saved=True, description="saved on 20 September"),
        known("demo", description="a small Whisper on the shipped recordings"),
        known("nanogpt", description="a small language model on a text file"),
    ),
)
PRESENCE = {"talk": (Presence("desk", True), Presence("studio", True, True), Presence("attic", False, True))}


def _path(address: str, interface: str, kind: PathKind, status: Reachability = Reachability.ONLINE) -> FoundPath:
    return FoundPath(Endpoint(address, interface, 22, kind), status, None)


DESK = MachineRow(
    "SHA256:desk", "desk", status=OK, words="online", entry=Machine(name="desk", address="localhost"),
    chip="AMD Ryzen 7", memory="32 GB", system="Linux 6.8", found_by=("this computer",),
)  # fmt: skip
STUDIO = MachineRow(
    "SHA256:studio", "studio", status=OK, words="online",
    entry=Machine(name="studio", address="192.168.7.21", user="ada"),
    chip="Apple M2 Max", memory="64 GB", system="macOS 15.4", found_by=("Bonjour", "ssh config"),
    fingerprint="SHA256:studio",
    paths=(_path("192.168.7.21", "en0", PathKind.WIRED), _path("169.254.7.2", "en5", PathKind.LINK_LOCAL)),
)  # fmt: skip
HOSTILE = MachineRow(
    "SHA256:evil", EVIL, status=BAD, words="offline", cause="no SSH server answers",
    fix="switch on Remote Login there", entry=Machine(name="evil", address="192.168.7.66"), found_by=("Bonjour",),
    paths=(_path("192.168.7.66", "en0", PathKind.WIRED, Reachability.OFFLINE),),
)  # fmt: skip
MACHINES = DiscoveredMachines(
    (DESK, STUDIO, HOSTILE), ("Bonjour on eth0", "~/.ssh/config", "distributed_hosts.json"), 12.0
)
FINGERPRINT = "SHA256:J5Kk6zAoCTGjtwaQWdGjCMKa1uMDb/JvqhvExyl2HAo"


def _machine(name: str, address: str = "", user: str = "ada") -> MachineRow:
    entry = Machine(name=name, address=address, user=user)
    return MachineRow(f"SHA256:{name}", name, status=OK, entry=entry)


def _off(machine: MachineRow) -> AccessReport:
    said = "it is there, but no SSH server answers"
    return replace(refused(machine), problem=said, fix="sudo systemctl enable --now ssh")


def _changed(machine: MachineRow) -> AccessReport:
    said = "its host key is not the one it had before"
    report = refused(machine, "host_key_changed", Stage.HOST_KEY)
    return replace(report, where="", user="", problem=said, fix="find out why; then: ssh-keygen -R mini")


ATTIC, MINI, PC = _machine("attic", "192.168.7.9"), _machine("mini"), _machine("pc", "192.168.7.22")
TOWER = _machine("tower", "192.168.7.27")
ACCESS = {
    ATTIC: _off(ATTIC),
    MINI: _changed(MINI),
    PC: replace(locked(PC), problem="it accepts none of your keys"),
    STUDIO: replace(stranger(STUDIO, FINGERPRINT), problem=f"its host key has the fingerprint {FINGERPRINT}"),
    TOWER: replace(refused(TOWER), failed=None, cause="", problem="", fix=""),
}
"""Five machines of which one lets us in."""
EXAMINED = {
    DESK.key: (Finding("python", "ok", "3.12.7", "3.10 or newer"),),
    STUDIO.key: (
        Finding("torch", "problem", "no torch", "2.8.0, as on all machines", "check --fix", True, "about 1.6 GB"),
        Finding("power", "warning", "battery, 64 %", "mains", "plug it in"),
        Finding("disk", "ok", "184 GB free", "1 GB"),
    ),
}  # fmt: skip
LINKS = (
        pair("desk", "studio", 941, 938, interface_back="en0", address="192.168.7.21"),
        pair("desk", "air", 211, 94, rtt_ms=4.8, interface_back="en0", wireless_back=True, address="192.168.7.26"),
        pair("studio", "air", 208, 160, rtt_ms=5.1, interface="en0", interface_back="en0", wireless_back=True,
             address="192.168.7.26"),
)  # fmt: skip


def _option(name: str, value: str, **more: Any) -> JobOption:
    return JobOption(options_by_name()[name], value, **{"default": value, **more})


JOB = JobForm(
    (
        _option("epochs", "3"),
        _option("batch_size", "16", default="8", changed=True),
        _option("learning_rate", "5", problem="must be <= 1", changed=True),
        _option("seed", "1"),
        _option("engine", "auto"),
    ),
    ("whisper-tiny", "whisper-small"), ("recordings",), "whisper-tiny", "recordings",
)  # fmt: skip
DATA = DataSummary(
    6400,
    5.3,
    ("audio", "text"),
    (("train", 6400), ("test", 240)),
    ("clips/0412.wav",),
    1,
    examples=("open the second window", "and close it again"),
)
FITS = (
    Fit("SHA256:desk", "desk", 3_000_000_000, 24_000_000_000, status=OK, words="fits"),
    Fit("SHA256:studio", "studio", 3_000_000_000, 50_000_000_000, status=OK, words="fits"),
)
ALONE = ("desk", 211.2)
STRATEGY = StrategyRanking(
    (
        way("diloco mxfp4", "desk", "studio", beside=ALONE, interval=10, same_loss=133, step=0.354, steps=320,
            global_batch=16, speed_up=1.86, useful_speed_up=1.59, exposed=0.0177, bytes_per_hour=7.6e9,
            loss_increase=0.0026),
        way("allreduce bf16", "desk", "studio", beside=ALONE, index=1, same_loss=192, step=0.61, steps=320,
            global_batch=16, speed_up=1.1, useful_speed_up=1.1, exposed=0.2623, bytes_per_hour=91e9),
        way("alone", "desk", index=2, same_loss=211, step=0.66, steps=320, global_batch=8),
    ),
    ("Merging only every 10 steps, the machines wait for the network 5 % of the time",),
    ("the link from desk to studio limits each exchange: 941 Mbit/s, 70 ms",
     "2 machines with diloco reach the same loss 1.59 times as fast as the best of them alone"),
)  # fmt: skip
PLAN = PlanPreview(
    (
        MachineChange("desk|run", "desk", "the run's folder in output/"),
        MachineChange("studio|code", "studio", "code of this version", "+", 1_400_000),
        MachineChange("studio|env", "studio", "torch 2.4.1 becomes 2.8.0", "~"),
    ),
    "85.4 MB that the machines lack",
    ("SSH from this computer to each machine", "the machines also connect to desk and to each other, on "
     "free ports", "if a firewall blocks that, desk relays"), ("This run takes 1:53; desk alone would take 3:31.",),
    "desk and studio, merging every 10 steps",
    ("training traffic: TLS with certificates of this run", "commands, code and data: SSH"), (), "demo-2",
    ("profiles/saved/demo-2.ini",), "python3 cli_typer.py train demo-2", "0123456789abcdef01",
)  # fmt: skip
LAUNCH = LaunchProgress(
    ("connected", "code and data", "program", "features", "joined", "first step"),
    (
        LaunchRow("desk", "desk", (OK, OK, OK, OK, ItemStatus.WORKING, WAIT), status=ItemStatus.WORKING),
        LaunchRow("studio", "studio", (OK, OK, BAD, WAIT, WAIT, WAIT), ("loading whisper-tiny", "Killed"), status=BAD,
                  words="no memory", cause="the worker was killed: out of memory", fix="take a smaller batch"),
    ),
)  # fmt: skip


def _part(found: Any, said: Assessment) -> StatePart[Any]:
    return StatePart(found, status=said.status, words=said.words, cause=said.cause, fix=said.fix)


PARTS: dict[tuple[TaskKind, str], StatePart[Any]] = {
    (TaskKind.HOME, ""): StatePart(HOME, status=OK),
    (TaskKind.CHECKS, ""): StatePart(EXAMINED, status=OK),
    (TaskKind.LINKS, ""): StatePart(LINKS, status=OK),
    (TaskKind.JOB, ""): StatePart(JOB, status=OK),
    (TaskKind.DATA, ""): StatePart(
        DATA, status=WARN, words="1 broken", cause="1 file cannot be read", fix="it is left out"
    ),
    (TaskKind.FITS, ""): StatePart(FITS, status=OK),
    (TaskKind.FORECAST, ""): StatePart(STRATEGY, status=OK),
    (TaskKind.PLAN, ""): StatePart(PLAN, status=OK),
    (TaskKind.LAUNCH, ""): StatePart(LAUNCH, status=BAD, cause="studio did not start", fix="r tries again"),
    **{(TaskKind.ACCESS, machine.key): _part(report, of_report(report)) for machine, report in ACCESS.items()},
}
ANSWERS = Answers(picked=(DESK.key, STUDIO.key), profile="demo")
WHOLE = WizardState(Step.HOME, ANSWERS, replace(MACHINES, presence=PRESENCE), PARTS, reached=Step.LAUNCH)
"""Everything at once; a test looks at one step of it."""
OTHERS = {Step.ACCESS: tuple(ACCESS), Step.LINKS: (DESK, STUDIO, _machine("air"))}
"""Machines of the steps that show others than the list does."""
MAIN_KEYS = {
    Step.HOME: "enter Open", Step.MACHINES: "enter Continue", Step.ACCESS: "enter Continue",
    Step.CHECKS: "enter Continue", Step.LINKS: "enter Continue", Step.JOB: "enter Continue",
    Step.STRATEGY: "enter Continue", Step.PLAN: "enter Start", Step.LAUNCH: "r Retry",
}  # fmt: skip


class Still:
    """A set-up that stands still."""

    def __init__(self, state: WizardState) -> None:
        self.state = state
        self.done: list[Any] = []
        self.offer: Any = None
        """What :meth:`share` returns."""

    def do(self, action: Action) -> None:
        self.done.append(action)

    def give_password(self, machine: str, password: str) -> None:
        self.done.append((machine, password))

    def password_offer(self, row: Access) -> tuple[Access, ...]:
        return ()

    def share(self) -> Any:
        return self.offer

    def skip_measuring(self) -> None:
        self.done.append("skip measuring")

    def end_asking(self) -> None:
        self.done.append("end asking")

    def asked_for(self) -> list[TaskRecord]:
        return []


def at(step: Step, launch: StatePart[LaunchProgress] | None = None) -> Still:
    """Return the set-up at a step."""
    state = replace(WHOLE, step=step)
    if step in OTHERS:
        picked = tuple(machine.key for machine in OTHERS[step])
        state = replace(state, machines=replace(MACHINES, rows=OTHERS[step])).answering(picked=picked)
    return Still(state.putting(TaskKind.LAUNCH, state_part=launch) if launch is not None else state)


def hostile(value: Any) -> Any:
    """Return a state in which every text is as bad as it can be."""
    if isinstance(value, str) and not isinstance(value, Enum):
        return f"{EVIL}{value}\n\x9b5n\U0001f600"
    if is_dataclass(value) and not isinstance(value, type):
        kept = ("key", "sign", "run", "type", "identity", "picked", "aliases")
        return replace(
            value, **{one.name: hostile(getattr(value, one.name)) for one in fields(value) if one.name not in kept}
        )
    if isinstance(value, Finding):
        return Finding(hostile(value.check), value.level, *map(hostile, value[2:]))
    if isinstance(value, dict):
        return {key: hostile(one) for key, one in value.items()}
    return tuple(map(hostile, value)) if isinstance(value, tuple) else value
