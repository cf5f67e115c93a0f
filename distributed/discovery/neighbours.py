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
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributed.discovery.network_interfaces import Interfaces, PathKind, list_interfaces
from distributed.system import output, read

_TABLE = Path("/proc/net/arp")
_MOST = 16
_AT_ONCE = 64
"""Connections; macOS gives a program 256 open files."""
_MOST_NETWORKS, _PREFIX = 4, 24
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


def accepting_ssh(addresses: Sequence[str], port: int = 22, timeout: float = 2.0) -> list[str]:
    """Return those of the addresses at which an SSH server introduces itself, within ``timeout`` seconds.

    Each is dialled once, 64 at a time. It needs a thread without an event loop.
    """
    return asyncio.run(_accepting(addresses, port, timeout))


async def _accepting(addresses: Sequence[str], port: int, timeout: float) -> list[str]:
    free = asyncio.Semaphore(_AT_ONCE)

    async def is_ssh(address: str) -> bool:
        async with free:
            with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError):
                return await asyncio.wait_for(_introduction(address, port), timeout) == b"SSH-"
        return False

    answers = await asyncio.gather(*map(is_ssh, addresses))
    return [address for address, accepts in zip(addresses, answers, strict=True) if accepts]


async def _introduction(address: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(address, port)
    try:
        return await reader.readexactly(4)
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
