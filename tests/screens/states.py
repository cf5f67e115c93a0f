"""One full state for every step of the set-up, and a steering that only notes what was done."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from app.wizard.actions import Action
from app.wizard.state import (
    AccessRow,
    Answers,
    ChangeRow,
    CheckRow,
    DataRow,
    FitRow,
    Home,
    Job,
    JobOption,
    Launch,
    LaunchRow,
    Links,
    MachineRow,
    Machines,
    Need,
    Plan,
    Presence,
    ProfileRow,
    Status,
    Strategy,
    WizardState,
)
from app.wizard.steps import Step
from distributed.checks.findings import Finding
from distributed.discovery.machine_identity import FoundPath
from distributed.discovery.network_interfaces import Endpoint, PathKind
from distributed.discovery.sightings import Status as Seen
from profiles.options import options_by_name
from tests.wizard.fake_services import pair, way
from training.run_metadata import RunMetadata
from training.runs import RunSummary

OK, BAD, WARN, WAIT = Status.OK, Status.FAILED, Status.WARNING, Status.WAITING
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
        ProfileRow("talk", "talk", OK, description="saved on 20 September", saved=True,
                   machines=(Presence("desk", True), Presence("studio", True, True), Presence("attic", False, True))),
        ProfileRow("demo", "demo", OK, description="a small Whisper on the shipped recordings"),
        ProfileRow("nanogpt", "nanogpt", OK, description="a small language model on a text file"),
    ),
    status=OK,
)  # fmt: skip


def _path(address: str, interface: str, kind: PathKind, status: Seen = Seen.ONLINE) -> FoundPath:
    return FoundPath(Endpoint(address, interface, 22, kind), status, None)


DESK = MachineRow(
    "SHA256:desk", "desk", OK, "online", address="127.0.0.1", here=True, chip="AMD Ryzen 7", memory="32 GB",
    system="Linux 6.8", found_by=("this computer",),
)  # fmt: skip
STUDIO = MachineRow(
    "SHA256:studio", "studio", OK, "online", address="192.168.7.21", user="ada", chip="Apple M2 Max", memory="64 GB",
    system="macOS 15.4", found_by=("Bonjour", "ssh config"), fingerprint="SHA256:studio",
    paths=(_path("192.168.7.21", "en0", PathKind.WIRED), _path("169.254.7.2", "en5", PathKind.LINK_LOCAL)),
)  # fmt: skip
HOSTILE = MachineRow(
    "SHA256:evil", EVIL, BAD, "offline", "no SSH server listens on port 22",
    "switch on Remote Login there", address="192.168.7.66", found_by=("Bonjour",),
    paths=(_path("192.168.7.66", "en0", PathKind.WIRED, Seen.OFFLINE),),
)  # fmt: skip
MACHINES = Machines((DESK, STUDIO, HOSTILE), ("Bonjour on eth0", "~/.ssh/config", "distributed_hosts.json"), 12.0)
ANSWERS = Answers(picked=(DESK.key, STUDIO.key), profile="demo")

_STAGES = ("reach", "host key", "login", "shell")


def _stages(*done: Status) -> tuple[tuple[str, Status], ...]:
    return tuple(zip(_STAGES, (*done, *[WAIT] * 4)))


ACCESS = (
    AccessRow("SHA256:attic", "attic", BAD, "port closed", "it answers, but no SSH server listens on port 22",
              "sudo systemctl enable --now ssh", stages=_stages(BAD), code="port_closed", where="192.168.7.9:22",
              user="ada"),
    AccessRow("SHA256:mini", "mini", BAD, "key changed", "its host key is not the one it had before",
              "find out why; then: ssh-keygen -R mini", stages=_stages(OK, BAD), code="host_key_changed"),
    AccessRow("SHA256:pc", "pc", BAD, "password", "none of our keys fits", "its password, given once, installs our key",
              stages=_stages(OK, OK, BAD), code="no_key", need=Need.PASSWORD, where="192.168.7.22:22", user="ada"),
    AccessRow("SHA256:studio", "studio", BAD, "first meeting", "its ed25519 host key was never seen here",
              stages=_stages(OK, BAD), need=Need.TRUST,
              fingerprint="SHA256:J5Kk6zAoCTGjtwaQWdGjCMKa1uMDb/JvqhvExyl2HAo",
              compare="ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub", where="192.168.7.21:22", user="ada"),
    AccessRow("SHA256:tower", "tower", OK, "ready", stages=_stages(OK, OK, OK, OK), where="192.168.7.27:22",
              user="ada"),
)  # fmt: skip
CHECKS = (
    CheckRow("SHA256:desk", "desk", OK, "ready",
             findings=(Finding("python", "ok", "3.12.7", "3.10 or newer"),)),
    CheckRow("SHA256:studio", "studio", BAD, "not ready", "torch is missing", fixable=True, findings=(
        Finding("torch", "problem", "no torch", "2.8.0, as on all machines", "distributed-check --fix", safe=True),
        Finding("power", "warning", "battery, 64 %", "mains", "plug it in"),
        Finding("disk", "ok", "184 GB free", "1 GB"),
    )),
)  # fmt: skip
LINKS = Links(
    (
        pair("desk", "studio", 941, 938, interface_back="en0", address="192.168.7.21"),
        pair("desk", "air", 211, 94, rtt_ms=4.8, interface_back="en0", wireless_back=True, address="192.168.7.26"),
        pair("studio", "air", 208, 160, rtt_ms=5.1, interface="en0", interface_back="en0", wireless_back=True,
             address="192.168.7.26"),
    ),
    ("desk", "studio", "air"),
    status=OK,
)  # fmt: skip


def _option(name: str, value: str, **more: Any) -> JobOption:
    return JobOption(options_by_name()[name], value, **{"default": value, **more})


JOB = Job(
    (
        _option("epochs", "3"),
        _option("batch_size", "16", default="8", changed=True),
        _option("learning_rate", "5", problem="must be <= 1", changed=True),
        _option("seed", "1"),
        _option("engine", "auto"),
    ),
    ("whisper-tiny", "whisper-small"), ("recordings",), "whisper-tiny", "recordings",
    DataRow("data", "recordings", WARN, "1 broken", "1 file cannot be read", "it is left out", samples=6400, hours=5.3,
            columns=("audio", "text"), splits=(("train", 6400), ("test", 240)), broken=("clips/0412.wav",),
            broken_count=1),
    (FitRow("SHA256:desk", "desk", OK, "fits", needed=3_000_000_000, free=24_000_000_000),
     FitRow("SHA256:studio", "studio", OK, "fits", needed=3_000_000_000, free=50_000_000_000)),
    status=OK,
)  # fmt: skip
STRATEGY = Strategy(
    (
        way("diloco mxfp4", "desk", "studio", interval=10, same_loss=133, step=0.354, steps=320, global_batch=16,
            speed_up=1.86, useful_speed_up=1.59, exposed=0.0177, bytes_per_hour=7.6e9, loss_increase=0.0026),
        way("allreduce bf16", "desk", "studio", index=1, same_loss=192, step=0.61, steps=320, global_batch=16,
            speed_up=1.1, useful_speed_up=1.1, exposed=0.2623, bytes_per_hour=91e9),
        way("alone", "desk", index=2, same_loss=211, step=0.66, steps=320, global_batch=8),
    ),
    ("2 machines with diloco reach the same loss 1.59 times as fast as the best of them alone",
     "0.0167 s of a step of 0.354 s is waiting for the network (5 %)"),
    status=OK,
)  # fmt: skip
PLAN = Plan(
    (
        ChangeRow("desk|run", "desk", OK, sign="+", machine="desk", what="the run's folder in output/"),
        ChangeRow("studio|code", "studio", OK, sign="+", machine="studio", what="code of this version",
                  bytes=1_400_000),
        ChangeRow("studio|env", "studio", OK, sign="~", machine="studio", what="torch 2.4.1 becomes 2.8.0"),
    ),
    85_400_000, ("hub on 192.168.7.20:47100",), 113.0, "diloco mxfp4 every 10 steps over the hub on desk",
    ("training traffic: TLS with certificates of this run", "commands, code and data: SSH"), (), "demo-2",
    ("profiles/saved/demo-2.ini",), "python3 cli_typer.py distributed-train demo-2", "0123456789abcdef01", status=OK,
)  # fmt: skip
LAUNCH = Launch(
    ("connected", "code and data", "program", "features", "joined", "first step"),
    (
        LaunchRow("desk", "desk", Status.WORKING, cells=(OK, OK, OK, OK, Status.WORKING, WAIT)),
        LaunchRow("studio", "studio", BAD, "no memory", "the worker was killed: out of memory", "take a smaller batch",
                  cells=(OK, OK, BAD, WAIT, WAIT, WAIT), log=("loading whisper-tiny", "Killed")),
    ),
    ("desk: connected", "studio: connected"), status=BAD, cause="studio did not start", fix="r tries again",
)  # fmt: skip

WHOLE = WizardState(
    Step.HOME, ANSWERS, HOME, MACHINES, ACCESS, CHECKS, LINKS, JOB, STRATEGY, PLAN, LAUNCH, reached=Step.LAUNCH
)
"""Everything at once; a test looks at one step of it."""
MAIN_KEYS = {
    Step.HOME: "enter Open", Step.MACHINES: "enter Continue", Step.ACCESS: "enter Continue",
    Step.CHECKS: "enter Continue", Step.LINKS: "enter Continue", Step.JOB: "enter Continue",
    Step.STRATEGY: "enter Continue", Step.PLAN: "enter Start", Step.LAUNCH: "r Retry",
}  # fmt: skip


class Still:
    """A set-up that stands still."""

    def __init__(self, state: WizardState) -> None:
        self.state = state
        self.done: list[Action] = []

    def do(self, action: Action) -> None:
        self.done.append(action)


def at(step: Step, **changes: Any) -> Still:
    """Return the set-up at a step."""
    return Still(replace(WHOLE, step=step, **changes))


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
    return tuple(map(hostile, value)) if isinstance(value, tuple) else value
