"""Findings about a machine: what was seen, what is needed, and the fix. Pure functions of the machine's report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from distributed.agent.machine_health import LOSES_LARGE
from distributed.preparation.preflight import CLOCK_TOLERANCE, FREE_BYTES, OLDEST_PYTHON, Facts
from distributed.ssh.keys.host_keys import NEW_HOST_KEYS
from profiles.quantities import (
    bytes_text,
    flops_text,
    memory_text,
    offset_text,
    share_text,
    span_text,
    temperature_text,
)

Level = Literal["ok", "warning", "problem"]
_Text = Annotated[str, Field(max_length=200)]
LITTLE_MEMORY = 2 * 2**30
HOT = 90.0
_SANDBOXED = ("Desktop", "Documents", "Downloads", "Library/Mobile Documents")
_FIREWALL = "allow Python to accept connections in the firewall of {0} (on a Mac: System Settings > Network > Firewall)"
_MTU = "give both ends and all between the same MTU (a VPN: ip link set dev tun0 mtu 1280), or let its ICMP pass"
_NOT_NEEDED = "only engine = nccl needs it; on the mesh the other machine connects, or the coordinator's machine relays"


CHECKS = {
    "ready": "what every machine needs: Python, packages, a folder, free disk space, a correct clock",
    "host key": "whether another machine has the same host key",
    "system": "the operating system",
    "python": "the version of Python",
    "torch": "the version of torch",
    "disk": "free space",
    "clock": "its clock, compared with this computer's",
    "folder": "a folder that macOS does not protect",
    "device": "whether every device multiplies two matrices correctly",
    "driver": "the NVIDIA driver, and whether torch can use it",
    "gpu memory": "free memory of the NVIDIA GPU",
    "arch": "a Python built for this processor",
    "memory": "free memory",
    "power": "mains or battery",
    "power saving": "Low Power Mode",
    "sleep": "whether it can be kept awake",
    "heat": "how hot it is",
    "ports": "a port that is free",
    "mtu": "its packet size, compared with the other machines'",
    "ways": "connections to the other machines",
    "health": "whether its hardware can be read",
}
"""The checks on every machine, without a job: descriptions by identifier."""


UNKNOWN = "unknown"
"""First word of what was seen where a machine cannot tell."""


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    """Stable identifier for programs."""
    level: Level
    """A machine with a problem cannot take part; a warning costs time or may end a run."""
    seen: str
    needed: str = ""
    fix: str = ""
    """A command, or what the user should do."""
    safe: bool = False
    """Whether ``--fix`` may apply it without asking."""
    size: str = ""
    """Disk space that the fix takes, with ``about``."""

    @property
    def is_unknown(self) -> bool:
        """Whether the machine could not tell: that is no alarm, and no proof either."""
        return self.level == "ok" and self.seen.startswith(UNKNOWN)

    @classmethod
    def warn_if(cls, wrong: bool, check: str, seen: str, needed: str, fix: str) -> Finding:
        """Return a warning with its fix where ``wrong``, else an ``ok`` finding."""
        return cls(check, "warning" if wrong else "ok", seen, needed, fix if wrong else "")


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Memory(_Report):
    total: int
    free: int


class Power(_Report):
    source: Literal["", "ac", "battery"]
    percent: int | None = None
    saving: bool = False


class Nvidia(_Report):
    name: _Text
    driver: _Text
    total: int | None = None
    free: int | None = None
    celsius: int | None = None


class Device(_Report):
    device: _Text
    problem: str = Field(max_length=1000)
    gflops: float | None = None
    bf16: bool = False
    """Whether it multiplies bf16 in hardware."""


class Health(_Report):
    """Report of :mod:`distributed.agent.machine_health`; sizes in bytes."""

    system: _Text = "Linux"
    machine: _Text
    hardware: _Text
    memory: Memory
    power: Power
    inhibitor: _Text
    lid: _Text = ""
    """What Linux does when the lid is closed; empty: nothing, or it has none."""
    mtu: dict[str, int] = Field(max_length=1000)
    celsius: float | None = None
    throttled: bool = False
    nvidia: tuple[Nvidia, ...] = ()
    devices: tuple[Device, ...] = ()


def judge_facts(facts: Facts) -> list[Finding]:
    """Return ``ok`` findings for the facts that are in order; what makes a machine unfit is in its problem."""
    version, oldest = ".".join(map(str, facts.python)), ".".join(map(str, OLDEST_PYTHON))
    ahead = facts.clock_ahead
    looked_at = [
        (True, "system", facts.system, ""),
        (facts.python[:2] >= OLDEST_PYTHON, "python", version, f"{oldest} or newer"),
        (bool(facts.torch), "torch", facts.torch, "one version on all machines"),
        (facts.free >= FREE_BYTES, "disk", f"{bytes_text(facts.free)} free", bytes_text(FREE_BYTES)),
        (abs(ahead) <= CLOCK_TOLERANCE, "clock", offset_text(ahead), f"at most {span_text(CLOCK_TOLERANCE)} off"),
    ]
    findings = [Finding(check, "ok", seen, needed) for in_order, check, seen, needed in looked_at if in_order]
    sandboxed = guarded_folder(facts.root, facts.system)
    if sandboxed:
        fix = "set another 'project_path' in the hosts file, or none"
        needed = f"not in {sandboxed}: macOS protects it"
        findings.append(Finding("folder", "problem", f"works in {facts.root}", needed, fix))
    return findings


def judge_host_keys(fingerprints: Mapping[str, str]) -> dict[str, Finding]:
    """Return a warning for each machine that shares its host key with others; by name, like the fingerprints."""
    findings = {}
    for name, key in fingerprints.items():
        if others := [other for other, shown in fingerprints.items() if shown == key and other != name]:
            seen = f"it has the same host key as {', '.join(others)}: who has one of them can pose as the others"
            findings[name] = Finding("host key", "warning", seen, "one of its own", f"on a clone: {NEW_HOST_KEYS}")
    return findings


def guarded_folder(root: str, system: str) -> str:
    """Return the protected folder of a Mac that contains ``root``; empty if there is none.

    Programs without a window may not enter Desktop, Documents, Downloads and iCloud of any user, and other disks: a run
    over SSH is refused there, or waits for the answer to a dialog that is not seen.
    """
    if system != "Darwin":
        return ""
    path = PurePosixPath(root)
    if path.is_relative_to("/Volumes"):
        return "/Volumes"
    if len(path.parts) > 3 and path.parts[1].casefold() == "users":
        home, inside = PurePosixPath(*path.parts[:3]), "/".join(path.parts[3:]).casefold()
        for name in _SANDBOXED:
            if f"{inside}/".startswith(f"{name.casefold()}/"):
                return str(home / name)
    return ""


_POWER_SAVING = {
    True: ("Low Power Mode is on", "sudo pmset -a lowpowermode 0"),
    False: ("the power-saving profile is on", "powerprofilesctl set balanced"),
}
"""What is seen, and what turns it off; by whether the machine is a Mac, like the next."""
_SLEEP = {
    True: ("may fall asleep: caffeinate is missing", "turn sleep off there while you train: sudo pmset -a sleep 0"),
    False: (
        "may fall asleep: systemd-inhibit is missing or refused",
        "turn sleep off there while you train: sudo systemctl mask --runtime sleep.target",
    ),
}


def judge_health(health: Health) -> list[Finding]:
    """Return the findings about a machine's hardware and system."""
    translated = health.machine != health.hardware
    fix = f"name a Python for {health.hardware} with 'python' in the hosts file, such as /opt/homebrew/bin/python3"
    seen = f"Python for {health.machine} under Rosetta" if translated else health.machine
    processor = Finding.warn_if(translated, "arch", seen, health.hardware, fix)
    little, needed = health.memory.free < LITTLE_MEMORY, memory_text(LITTLE_MEMORY)
    seen = f"{memory_text(health.memory.free)} of {memory_text(health.memory.total)} free"
    memory = Finding.warn_if(little, "memory", seen, needed, "close programs there")
    return [processor, *_devices(health), memory, *_power(health), *_heat(health)]


def _devices(health: Health) -> Iterator[Finding]:
    for device in health.devices:
        if device.problem:
            fix = "update its driver, or choose others with 'devices' in the hosts file"
            yield Finding(
                "device", "problem", f"{device.device}: {device.problem}", "a correct product of two matrices", fix
            )
        else:
            yield Finding(
                "device", "ok", f"{device.device}: {flops_text(1e9 * (device.gflops or 0))}", "a correct product"
            )
    if health.nvidia and not any(device.device.startswith("cuda") for device in health.devices):
        seen = f"{health.nvidia[0].name} (driver {health.nvidia[0].driver}) is not used: torch has no CUDA there"
        fix = "install a CUDA build of torch there, or a newer driver (nvidia-smi shows the newest CUDA that it knows)"
        yield Finding("driver", "warning", seen, "a driver and a torch that fit", fix)
    for gpu in health.nvidia:
        yield Finding("driver", "ok", f"{gpu.name}: driver {gpu.driver}")
        if gpu.total and gpu.free is not None:
            seen = f"{gpu.name}: {memory_text(gpu.free)} of {memory_text(gpu.total)} free"
            fix = "nvidia-smi shows which program holds it"
            yield Finding.warn_if(gpu.free < gpu.total / 2, "gpu memory", seen, "half of it", fix)


def _power(health: Health) -> Iterator[Finding]:
    power = health.power
    seen = {"": "no battery", "ac": "mains", "battery": "runs on battery"}[power.source]
    percent = "" if power.percent is None or not power.source else f", {share_text(power.percent / 100)}"
    yield Finding.warn_if(power.source == "battery", "power", f"{seen}{percent}", "mains power", "plug it in")
    is_mac = health.system == "Darwin"
    if power.saving:
        seen, fix = _POWER_SAVING[is_mac]
        yield Finding("power saving", "warning", seen, "off: it halves the speed", fix)
    awake = health.inhibitor or ("seldom: no battery" if not power.source else "")
    asleep, fix = _SLEEP[is_mac]
    sleeps_when_closed = (is_mac and power.source) or health.lid not in ("", "ignore", "lock")
    lid = "; keep its lid open: closing it puts it to sleep" if sleeps_when_closed else ""
    yield Finding.warn_if(not awake, "sleep", f"{awake or asleep}{lid}", "can be kept awake", fix)


def _heat(health: Health) -> Iterator[Finding]:
    """Judge the hottest of processor and GPUs."""
    readings = (health.celsius, *(gpu.celsius for gpu in health.nvidia))
    temperatures = [celsius for celsius in readings if celsius is not None]
    is_hot = health.throttled or max(temperatures, default=0.0) >= HOT
    degrees = temperature_text(max(temperatures)) if temperatures else UNKNOWN
    seen = f"{degrees}, slowed down by heat" if health.throttled else degrees
    if seen == UNKNOWN:
        yield Finding("heat", "ok", f"{UNKNOWN}: no sensor tells it")
        return
    yield Finding.warn_if(
        is_hot, "heat", seen, f"below {temperature_text(HOT)}", "let it cool down; are its vents blocked?"
    )


def judge_mtu(mtus: Mapping[str, tuple[str, int]]) -> dict[str, Finding]:
    """Compare the MTU of the interfaces in use; ``mtus`` has interface and bytes by machine.

    Packets that only one end can handle are lost silently where no router reports it, and transfers hang.
    """
    smallest = min((mtu for _, mtu in mtus.values()), default=0)
    common_size, findings = max(smallest, 1500), {}
    for name, (interface, mtu) in mtus.items():
        needed = f"one size for all; the smallest is {smallest}" if mtu > common_size else "one size for all"
        fix = f"set it to {common_size} there, or the others' to {mtu}"
        findings[name] = Finding.warn_if(mtu > common_size, "mtu", f"{interface}: packets of {mtu} bytes", needed, fix)
    return findings


def judge_connections(reasons: Mapping[str, str], needed: Sequence[str], through_ssh: bool = False) -> list[Finding]:
    """Return findings from a machine's attempts to connect to the others.

    Args:
        reasons: by the other machine's name: empty, or why the connection failed.
        needed: machines that it must reach to train.
        through_ssh: whether it reaches these through its SSH connection.
    """
    findings = []
    for name, reason in reasons.items():
        is_needed = name in needed
        if not reason:
            findings.append(Finding("ways", "ok", f"reaches {name}"))
        elif reason == LOSES_LARGE:
            seen = f"to {name} small packets pass, and large ones are lost: a run sends small ones there"
            findings.append(Finding("ways", "warning", seen, "packets of full size", _MTU))
        elif is_needed and through_ssh:
            seen = f"cannot connect to {name}: {reason}; a run reaches it through SSH"
            findings.append(
                Finding("ways", "warning", seen, "direct is faster where traffic is relayed", _FIREWALL.format(name))
            )
        else:
            why = "every run needs it, and its SSH server does not forward" if is_needed else _NOT_NEEDED
            seen = f"cannot connect to {name}: {reason}"
            findings.append(Finding("ways", "problem" if is_needed else "warning", seen, why, _FIREWALL.format(name)))
    return findings
