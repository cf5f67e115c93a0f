"""What this computer is made of, from files and one quick command: nothing heavy is loaded for the list of machines."""

from __future__ import annotations

import platform
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

_PATIENCE = 2.0
_LONGEST_FILE = 65_536
LONGEST_NAME = 64


def plain_name(name: str) -> str:
    """A name that a hosts file takes, from text of the network."""
    return re.sub(r"[^\w .:@-]", "", name).strip(" .")[:LONGEST_NAME]


class ThisComputer(NamedTuple):
    """What is shown of the machine that the set-up runs on."""

    name: str
    chip: str
    """Chip or GPU."""
    memory: str
    system: str


@lru_cache(maxsize=1)
def this_computer() -> ThisComputer:
    import psutil  # 20 ms, which an import of this module does without

    name = plain_name(socket.gethostname().partition(".")[0]) or "this-computer"
    chip, system = mac() if platform.system() == "Darwin" else linux()
    return ThisComputer(name, chip, f"{psutil.virtual_memory().total / 2**30:.0f} GB", system)


def said(*command: str) -> str:
    """Return what a command prints; nothing where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def mac(ask: Callable[..., str] = said) -> tuple[str, str]:
    """Return chip and system of a Mac; ``platform.processor()`` would say ``arm``."""
    version = platform.mac_ver()[0] or ask("sw_vers", "-productVersion")
    return ask("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine(), f"macOS {version}".strip()


def linux(root: Path = Path("/")) -> tuple[str, str]:
    """Return the NVIDIA GPUs, else the processor, and the system."""
    cards = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    models = Counter(name for card in cards if (name := _value(card, r"Model:[ \t]*(.+)")))
    gpus = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in models.items())
    processor = _value(root / "proc/cpuinfo", r"model name\s*:[ \t]*(.+)") or _value(
        root / "proc/device-tree/model", r"([^\0]+)"
    )
    system = _value(root / "etc/os-release", r'^PRETTY_NAME="?([^"\n]+)')
    return gpus or processor or platform.machine(), system or platform.system()


def _value(path: Path, pattern: str) -> str:
    """Return the first match of a pattern in a file of the system."""
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            found = re.search(pattern, stream.read(_LONGEST_FILE), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""
