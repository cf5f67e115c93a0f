"""What a machine's own programs and files say of it, above all of its network interfaces.

Standard library only, Python >= 3.9: it goes to the machines together with the programs that run there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_ADDRESS = re.compile(r"\sinet6?\s+([0-9a-fA-F.:]+)")


def output(*command: str) -> str:
    """Return what a program prints; nothing where it fails, or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def read(path: str) -> str:
    """Return the text of a file; nothing where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def parse_addresses(text: str) -> list[tuple[str, str]]:
    """Parse what ``ip -o addr`` or ``ifconfig`` prints: interfaces and their addresses, without scopes."""
    found, name = [], ""
    for line in text.splitlines():
        begin = re.match(r"(?:\d+:\s+)?([\w.@-]+?)(?:@\S+)?(?::\s|\s+inet)", line)
        name = begin[1] if begin else name
        found += [(name, address) for address in _ADDRESS.findall(line)]
    return found


def own_addresses() -> list[tuple[str, str]]:
    return parse_addresses(output("ip", "-o", "addr") or output("ifconfig"))


def interface_of(address: str) -> str:
    """Return the interface that has an address; empty if none is found."""
    plain = address.partition("%")[0]
    plain = plain[7:] if plain.startswith("::ffff:") else plain
    return next((name for name, one in own_addresses() if one == plain), "")


def card_rates() -> dict[str, float]:
    """Return the line rates of the interfaces in Mbit/s, as the system has agreed on them with the other end; only
    those that it tells, which are neither wireless ones nor all virtual ones."""
    if sys.platform == "darwin":
        return parse_media(output("ifconfig"))
    found = {}
    for name in {name for name, _ in own_addresses()}:
        rate = read(f"/sys/class/net/{name}/speed")
        if rate.isdecimal() and int(rate) > 0:  # else it is down, or has no rate
            found[name] = float(rate)
    return found


def parse_media(text: str) -> dict[str, float]:
    """Parse the rates that macOS' ``ifconfig`` prints: ``media: autoselect (1000baseT <full-duplex>)``."""
    found, name = {}, ""
    for line in text.splitlines():
        begin = re.match(r"([\w.-]+): flags", line)
        name = begin[1] if begin else name
        media = re.match(r"\s+media: .*?\b(\d{1,5})(G?)base", line, re.IGNORECASE)
        if media:
            found[name] = float(media[1]) * (1000 if media[2] else 1)
    return found


def counted(interface: str) -> int:
    """Return the bytes that passed an interface in both directions; 0 where the system does not tell."""
    if sys.platform == "darwin":
        return parse_netstat(output("netstat", "-ibn", "-I", interface)) if interface else 0
    return parse_net_dev(read("/proc/net/dev"), interface)


def parse_net_dev(text: str, interface: str) -> int:
    """Parse Linux' ``/proc/net/dev``: bytes received are the first number, bytes sent the ninth."""
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        if name.strip() == interface and len(fields) > 8 and fields[0].isdecimal() and fields[8].isdecimal():
            return int(fields[0]) + int(fields[8])
    return 0


def parse_netstat(text: str) -> int:
    """Parse macOS' ``netstat -ibn``: the link's row ends with Ipkts Ierrs Ibytes Opkts Oerrs Obytes Coll."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[2].startswith("<Link") and fields[-5].isdecimal() and fields[-2].isdecimal():
            return int(fields[-5]) + int(fields[-2])
    return 0


def wireless(interface: str) -> bool:
    if sys.platform == "darwin":
        ports = re.findall(r"Hardware Port: (.*)\nDevice: (\S+)", output("networksetup", "-listallhardwareports"))
        return any(device == interface and port in ("Wi-Fi", "AirPort") for port, device in ports)
    return bool(interface) and Path("/sys/class/net", interface, "wireless").exists()
