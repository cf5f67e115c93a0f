"""The machines that this computer has exchanged packets with on its own networks, from the system's neighbour table.

:func:`neighbours` reads the table alone: nothing is sent. :func:`accepting_ssh` connects, when a person wants it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shutil
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from distributed.system import output, read

_TABLE = Path("/proc/net/arp")
_MOST = 16
_ROWS = (
    re.compile(r"^(?P<ip>[\d.]+) .*\blladdr (?P<mac>[\da-f:]+) (?!FAILED|INCOMPLETE)", re.IGNORECASE),  # ip neigh
    re.compile(r"^(?P<ip>[\d.]+) +0x\d+ +0x(?!0\b)[\da-f]+ +(?P<mac>[\da-f:]+)", re.IGNORECASE),  # /proc/net/arp
    re.compile(r"^\S+ \((?P<ip>[\d.]+)\) at (?P<mac>[\da-f:]+) on ", re.IGNORECASE),  # arp -an of a Mac
)


def neighbours() -> list[str]:
    """Return the IPv4 addresses in the system's neighbour table, in its order; none where it cannot be read."""
    program = shutil.which("ip")
    text = output(program, "-4", "neigh", "show", timeout=2.0) if program else read(str(_TABLE))
    arp = shutil.which("arp")
    return addresses(text or (output(arp, "-an", timeout=2.0) if arp else ""))


def addresses(table: str) -> list[str]:
    """Return the addresses that have answered in a neighbour table as printed by ``ip neigh``, Linux or ``arp -an``."""
    return list(dict.fromkeys(_addresses(table)))[:_MOST]


def accepting_ssh(addresses: Sequence[str], port: int = 22, timeout: float = 2.0) -> list[str]:
    """Return those of the addresses at which an SSH server introduces itself, within ``timeout`` seconds."""
    with ThreadPoolExecutor(max_workers=_MOST) as pool:
        answers = pool.map(lambda address: _is_ssh(address, port, timeout), addresses)
        return [address for address, is_ssh in zip(addresses, answers, strict=True) if is_ssh]


def _is_ssh(address: str, port: int, timeout: float) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout) as connection:
        return connection.recv(4) == b"SSH-"
    return False


def _addresses(table: str) -> Iterator[str]:
    for line in table.splitlines():
        match = next(filter(None, (row.match(line.strip()) for row in _ROWS)), None)
        if match is None or set(match["mac"].lower()) <= set("f:") or set(match["mac"]) <= set("0:"):
            continue
        try:
            address = ipaddress.ip_address(match["ip"])
        except ValueError:
            continue
        if address.is_private and not address.is_multicast and not address.is_loopback:
            yield str(address)
