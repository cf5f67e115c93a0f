"""Facts from a machine's own programs and files, mostly about its network interfaces.

Standard library only, Python >= 3.9: it is sent to the machines together with the programs that run there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

_INHIBIT = """systemd-inhibit --what=sleep:idle --who=muster --why='a training run' cat ||
exec systemd-inhibit --what=idle --who=muster --why='a training run' cat"""
"""Many systems refuse an SSH session more than ``idle``. It ends with its input, so with the process that holds it."""

_ADDRESS = re.compile(r"\sinet6?\s+([0-9a-fA-F.:]+)")


def output(*command: str, timeout: float = 10.0) -> str:
    """Return the output of a program; empty where it fails, is missing, or does not end in time."""
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdin=nothing, capture_output=True, text=True, errors="replace", timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read(path: str) -> str:
    """Return the text of a file; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def parse_addresses(text: str) -> list[tuple[str, str]]:
    """Parse the output of ``ip -o addr`` or ``ifconfig``: pairs of interface and address, without scopes."""
    addresses, name = [], ""
    for line in text.splitlines():
        begin = re.match(r"(?:\d+:\s+)?([\w.@-]+?)(?:@\S+)?(?::\s|\s+inet)", line)
        name = begin[1] if begin else name
        addresses += [(name, address) for address in _ADDRESS.findall(line)]
    return addresses


def own_addresses() -> list[tuple[str, str]]:
    return parse_addresses(output("ip", "-o", "addr") or output("ifconfig"))


def interface_of(address: str) -> str:
    """Return the interface that has an address; empty if there is none."""
    plain = address.partition("%")[0].removeprefix("::ffff:")
    return next((name for name, candidate in own_addresses() if candidate == plain), "")


def wireless(interface: str) -> bool:
    if sys.platform == "darwin":
        return interface in _wireless_ports()
    return bool(interface) and Path("/sys/class/net", interface, "wireless").exists()


@lru_cache(maxsize=1)
def _wireless_ports() -> set[str]:
    return parse_ports(output("networksetup", "-listallhardwareports"))


def parse_ports(text: str) -> set[str]:
    """Parse the output of macOS' ``networksetup -listallhardwareports``: the devices of wireless ports."""
    ports = re.findall(r"Hardware Port: (.*)\nDevice: (\S+)", text)
    return {device for port, device in ports if port in ("Wi-Fi", "AirPort")}


def keep_awake() -> subprocess.Popen[bytes] | None:
    """Keep this machine awake while this process lives, where the system supports it."""
    words = ["caffeinate", "-ims", "-w", str(os.getpid())] if sys.platform == "darwin" else ["sh", "-c", _INHIBIT]
    tool, nothing = keeper(), subprocess.DEVNULL
    if tool:
        with contextlib.suppress(OSError):
            return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing)
    return None


def keeper() -> str:
    """Return the program of this system that keeps it awake, where it is installed; Linux has another one that is
    called ``caffeinate``, without these options."""
    tool = "caffeinate" if sys.platform == "darwin" else "systemd-inhibit"
    return tool if shutil.which(tool) else ""
