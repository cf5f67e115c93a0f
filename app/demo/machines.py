"""The scripted machines: plausible figures, nothing measured."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from profiles.errors import BadInput

GB = 1 << 30
MOST = 8
HUB_PORT = 47100


class Trouble(str, Enum):
    """What stands between a scripted machine and its first step."""

    NONE = ""
    FIRST_MEETING = "first meeting"
    PASSWORD = "password"
    """It takes a password once, and a check needs its fix."""
    PORT_CLOSED = "port closed"
    """Its SSH server is off, and switched on some seconds later."""
    KEY_CHANGED = "key changed"
    ASLEEP = "asleep"
    """It is offline, and wakes up some seconds later."""
    USER_REFUSED = "user refused"


@dataclass(frozen=True)
class ScriptedMachine:
    """One machine of the script."""

    name: str
    chip: str
    """Processor or graphics card as a person calls it."""
    os: str
    system: Literal["linux", "darwin"]
    device: Literal["cpu", "cuda", "mps"]
    cores: int
    memory: int
    device_memory: int
    """Bytes of a graphics card; 0: it shares the machine's memory."""
    speed: float
    """Samples/s of the scripted job beyond the overhead."""
    overhead: float
    """Seconds of a step that do not depend on its batch."""
    mbit: float
    """What its interface carries."""
    address: str
    interface: str
    wifi: bool = False
    on_mains: bool = True
    trouble: Trouble = Trouble.NONE

    @property
    def mbit_up(self) -> float:
        """What it sends; over the air less than it receives."""
        return self.mbit * (0.6 if self.wifi else 1.0)

    @property
    def fingerprint(self) -> str:
        """Of its scripted host key."""
        digest = base64.b64encode(hashlib.sha256(self.name.encode()).digest()).decode().rstrip("=")
        return f"SHA256:{digest}"


_MACHINES = (
    ScriptedMachine("demo-macbook", "Apple M3 Pro", "macOS 15.5", "darwin", "mps", 12, 18 * GB, 0,
                    16.0, 0.03, 940.0, "192.168.7.20", "en7"),
    ScriptedMachine("demo-studio", "Apple M2 Max", "macOS 15.4", "darwin", "mps", 12, 64 * GB, 0,
                    26.0, 0.03, 310.0, "192.168.7.21", "en1", wifi=True, trouble=Trouble.FIRST_MEETING),
    ScriptedMachine("demo-pc", "NVIDIA RTX 4070", "Ubuntu 24.04", "linux", "cuda", 16, 32 * GB, 12 * GB,
                    40.0, 0.02, 940.0, "192.168.7.22", "enp5s0", trouble=Trouble.PASSWORD),
    ScriptedMachine("demo-laptop", "Intel i5-8250U", "Ubuntu 22.04", "linux", "cpu", 8, 16 * GB, 0,
                    2.5, 0.05, 110.0, "192.168.7.23", "wlp2s0", wifi=True, on_mains=False, trouble=Trouble.PORT_CLOSED),
    ScriptedMachine("demo-mini", "Apple M1", "macOS 14.7", "darwin", "mps", 8, 16 * GB, 0,
                    9.0, 0.03, 940.0, "192.168.7.24", "en0", trouble=Trouble.KEY_CHANGED),
    ScriptedMachine("demo-server", "AMD EPYC 7313", "Debian 12", "linux", "cpu", 16, 128 * GB, 0,
                    7.0, 0.04, 2350.0, "192.168.7.25", "eno1", trouble=Trouble.ASLEEP),
    ScriptedMachine("demo-air", "Apple M2", "macOS 15.5", "darwin", "mps", 8, 16 * GB, 0,
                    10.0, 0.03, 260.0, "192.168.7.26", "en0", wifi=True, trouble=Trouble.USER_REFUSED),
    ScriptedMachine("demo-tower", "NVIDIA RTX 3060", "Ubuntu 24.04", "linux", "cuda", 8, 32 * GB, 12 * GB,
                    28.0, 0.02, 940.0, "192.168.7.27", "enp3s0"),
)  # fmt: skip
HERE = _MACHINES[0].name
"""The scripted machine that plays this computer."""


def scripted_machines(number: int) -> tuple[ScriptedMachine, ...]:
    """Return the first machines of the script; the first one plays this computer.

    Raises:
        BadInput: fewer than one or more than the script has.
    """
    if not 1 <= number <= MOST:
        raise BadInput(f"--demo {number}: the script has 1 to {MOST} machines", "try: --demo 3")
    return _MACHINES[:number]


def scripted_machine(name: str) -> ScriptedMachine:
    """Return the machine of a name; one that the script does not know is like this computer."""
    for machine in _MACHINES:
        if machine.name == name:
            return machine
    return replace(_MACHINES[0], name=name)
