"""The machines that this computer has exchanged packets with on its own networks, from the system's neighbour table.

:func:`neighbours` reads the table alone: nothing is sent. :func:`accepting_ssh` connects, when a person wants it; to
every address of :func:`home_networks` only when a person has agreed to that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distributed.discovery.neighbour_names import neighbour_names
from distributed.discovery.network_interfaces import Interfaces, PathKind, list_interfaces
from distributed.system import output, read

_TABLE = Path("/proc/net/arp")
_MOST = 16
_AT_ONCE = 64
"""Connections; macOS gives a program 256 open files."""
_MOST_NETWORKS, _PREFIX = 4, 24
_LONGEST_LINE = 255
"""Bytes of the line with which an SSH server introduces itself (RFC 4253, section 4.2)."""
_SYSTEMS = {
    "raspbian": "Raspberry Pi OS", "ubuntu": "Ubuntu", "debian": "Debian", "freebsd": "FreeBSD",
    "windows": "Windows", "dropbear": "Dropbear (a router, NAS ...)",
}  # fmt: skip
"""Systems by what their SSH servers write in the line with which they introduce themselves."""
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


def home_networks(interfaces: Interfaces | None = None) -> list[str]:
    """Return the private IPv4 networks of cables and Wi-Fi, ``a.b.c.0/24``: of a larger one the part around this
    computer."""
    attached = [
        address
        for interface in (interfaces or list_interfaces()).all
        if interface.kind in (PathKind.WIRED, PathKind.WIFI)
        for address in interface.addresses
        if address.version == 4 and address.is_private and not address.is_link_local
    ]
    whole = (ipaddress.ip_network((address.ip, max(_PREFIX, address.network.prefixlen)), False) for address in attached)
    return list(dict.fromkeys(str(network) for network in whole if network.num_addresses > 2))[:_MOST_NETWORKS]


def addresses_in(networks: Sequence[str], interfaces: Interfaces | None = None) -> list[str]:
    """Return the addresses of other machines that these networks can have."""
    own = {str(address.ip) for one in (interfaces or list_interfaces()).all for address in one.addresses}
    every = (str(address) for network in networks for address in ipaddress.ip_network(network).hosts())
    return [address for address in every if address not in own]


class SshNeighbour(NamedTuple):
    """A machine that accepts SSH, by what it shows to everybody. Texts are its own words: escape them for display."""

    address: str
    system: str = ""
    """The system that its SSH server names, such as ``Debian``; most name none."""
    name: str = ""
    """Its host name without a domain; empty: unknown before a log-in."""


class SshAnswers(NamedTuple):
    """What came of asking addresses for SSH."""

    asked: int
    """Number of addresses that were asked: all, unless it was ended before."""
    machines: list[SshNeighbour]


def accepting_ssh(
    addresses: Sequence[str],
    port: int = 22,
    timeout: float = 2.0,
    is_ended: Callable[[], bool] = lambda: False,
    names: Callable[[Sequence[str]], Mapping[str, str]] = neighbour_names,
) -> SshAnswers:
    """Return those of the addresses at which an SSH server introduces itself, within ``timeout`` seconds.

    Each is dialled once, 64 at a time. It needs a thread without an event loop.

    Args:
        is_ended: called before each address; true: no further one is asked, and the answers so far are returned.
        names: returns the names of addresses, as :func:`neighbour_names`; asked for those that accept SSH.
    """
    asked, introductions = asyncio.run(_introductions(addresses, port, timeout, is_ended))
    accepting = {address: line for address, line in introductions.items() if line.startswith("SSH-")}
    known = names(list(accepting)) if accepting else {}
    return SshAnswers(
        asked,
        [SshNeighbour(address, system_of(line), known.get(address, "")) for address, line in accepting.items()],
    )


def system_of(introduction: str) -> str:
    """Return the system that an SSH server names in its first line; empty where it names none, as Macs and Fedora do.

    ``SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3`` is Debian's.
    """
    software, _, comment = introduction.strip().partition(" ")
    named = (_SYSTEMS[word] for word in _SYSTEMS if word in f"{software} {comment}".casefold())
    return next(named, "")


async def _introductions(
    addresses: Sequence[str], port: int, timeout: float, is_ended: Callable[[], bool]
) -> tuple[int, dict[str, str]]:
    """Return how many addresses were asked, and the first line of each server that sent one."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def introduction(address: str) -> str | None:
        async with free:
            if is_ended():
                return None
            with contextlib.suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
                return await asyncio.wait_for(_first_line(address, port), timeout)
        return ""

    lines = dict(zip(addresses, await asyncio.gather(*map(introduction, addresses)), strict=True))
    return sum(line is not None for line in lines.values()), {address: line for address, line in lines.items() if line}


async def _first_line(address: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(address, port, limit=_LONGEST_LINE)
    try:
        return (await reader.readuntil(b"\n")).decode("ascii", "replace")
    finally:
        writer.close()


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
