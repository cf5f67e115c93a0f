"""This machine's network interfaces, and through which of them an address is reached."""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from distributed.system import wireless

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Attached = ipaddress.IPv4Interface | ipaddress.IPv6Interface

_DOCKER = re.compile(r"docker|br-[0-9a-f]|veth|cni|podman|lxc|lxd|flannel|cali")
_VIRTUAL = re.compile(r"virbr|vmnet|vboxnet|vnet|bridge\d{3}|anpi|awdl|llw|ap\d")
_VPN = re.compile(r"utun|tun|tap|wg|ppp|ipsec|tailscale|zt|nordlynx|gpd")
_WIFI = re.compile(r"wl|wifi|ath\d")
_CARRIER_GRADE = ipaddress.ip_network("100.64.0.0/10")
"""Shared address space (RFC 6598): at home it is a mesh VPN."""


class PathKind(str, Enum):
    """The medium of a path; the order is the rank, the best one first."""

    HERE = "this computer"
    WIRED = "wired"
    LINK_LOCAL = "link-local"
    """169.254 on a wired interface: often Thunderbolt or a direct cable."""
    WIFI = "wifi"
    ROUTED = "routed"
    """Not on a network of this machine: through a router."""
    VIRTUAL = "virtual"
    VPN = "vpn"
    DOCKER = "docker"

    @property
    def rank(self) -> int:
        return list(PathKind).index(self)


@dataclass(frozen=True, order=True)
class Endpoint:
    """One path to an SSH server: its address and port, and the interface of this machine that leads to it."""

    address: str
    """IP address without a scope."""
    interface: str
    port: int = 22
    kind: PathKind = field(default=PathKind.WIRED, compare=False)

    @property
    def scoped(self) -> str:
        """The address with its scope, as for sockets and hosts files."""
        ip = ipaddress.ip_address(self.address)
        return f"{self.address}%{self.interface}" if ip.version == 6 and ip.is_link_local else self.address

    @property
    def host_port(self) -> str:
        """``address``, or ``address:port`` where the port is not that of SSH, with an IPv6 address in brackets."""
        host = self.scoped if ":" in self.address else self.address
        if self.port == 22:
            return host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(frozen=True)
class Interface:
    """One network interface that is up."""

    name: str
    index: int
    addresses: tuple[Attached, ...]
    kind: PathKind
    multicast: bool

    def on_link(self, address: Address) -> bool:
        """Whether an address is one hop away through this interface."""
        return address.is_link_local or any(address in attached.network for attached in self.addresses)

    def source_address(self, version: int) -> Attached | None:
        """Return the address to send from; for IPv6 the link-local one."""
        candidates = (address for address in self.addresses if address.version == version)
        return next((address for address in candidates if version == 4 or address.is_link_local), None)


@dataclass(frozen=True)
class Interfaces:
    """All interfaces of this machine at one moment, without loopback."""

    all: tuple[Interface, ...]

    @property
    def browsable(self) -> tuple[Interface, ...]:
        """Interfaces that can send and receive multicast."""
        return tuple(i for i in self.all if i.multicast and (i.source_address(4) or i.source_address(6)))

    def endpoint_for(self, text: str, port: int, seen_on: str = "") -> Endpoint | None:
        """Return the endpoint of an address.

        Args:
            text: IP address, with or without scope.
            port: port of the SSH server.
            seen_on: interface on which the address was announced; needed to locate a link-local one.

        Returns:
            ``None`` for an address that cannot be connected to.
        """
        plain, _, scope = text.partition("%")
        try:
            address = ipaddress.ip_address(plain)
        except ValueError:
            return None
        address = getattr(address, "ipv4_mapped", None) or address  # another notation of the same address, even our own
        if address.is_multicast or address.is_unspecified or not 0 < port < 65536:
            return None
        owners = (i.name for i in self.all if any(address == attached.ip for attached in i.addresses))
        if owner := next(owners, "lo" if address.is_loopback else ""):
            return Endpoint(str(address), owner, port, PathKind.HERE)
        scope_name = next((i.name for i in self.all if scope.isdecimal() and i.index == int(scope)), scope)
        interface = self._toward(address, scope_name or seen_on)
        if interface is None:
            return None if address.is_link_local else Endpoint(str(address), "", port, _routed_kind(address))
        return Endpoint(str(address), interface.name, port, _path_kind(address, interface))

    def _toward(self, address: Address, seen_on: str) -> Interface | None:
        candidates = [interface for interface in self.all if interface.on_link(address)]
        seen = [interface for interface in candidates if interface.name == seen_on]
        if address.is_link_local and not seen and len(candidates) > 1:
            return None  # every interface has such a network: ambiguous without a scope
        return next(iter(seen or candidates), None)


def _routed_kind(address: Address) -> PathKind:
    return PathKind.VPN if address.version == 4 and address in _CARRIER_GRADE else PathKind.ROUTED


def _path_kind(address: Address, interface: Interface) -> PathKind:
    if _routed_kind(address) is PathKind.VPN:
        return PathKind.VPN
    if address.version == 4 and address.is_link_local and interface.kind is PathKind.WIRED:
        return PathKind.LINK_LOCAL
    return interface.kind


def list_interfaces() -> Interfaces:
    """Return this machine's current interfaces."""
    import psutil  # 20 ms, not needed where only the types are used

    stats, interfaces = psutil.net_if_stats(), []
    for name, entries in psutil.net_if_addrs().items():
        state = stats.get(name)
        attached = tuple(a for entry in entries if (a := _attached(entry.address, entry.netmask)) is not None)
        if state is None or not state.isup or not attached or all(address.is_loopback for address in attached):
            continue
        if Path("/sys/class/net", name, "master").exists():
            continue  # a port of a bridge: the bridge has the network
        multicast = "multicast" in state.flags.split(",") or not state.flags
        try:
            index = socket.if_nametoindex(name)
        except OSError:
            index = 0
        interfaces.append(Interface(name, index, attached, interface_kind(name), multicast))
    return Interfaces(tuple(interfaces))


def _attached(address: str, netmask: str | None) -> Attached | None:
    try:
        plain = ipaddress.ip_address(address.partition("%")[0])
        if plain.version == 4:
            return ipaddress.IPv4Interface(f"{plain}/{netmask or 32}")
        bits = bin(int(ipaddress.IPv6Address(netmask))).count("1") if netmask else 64
        return ipaddress.IPv6Interface(f"{plain}/{bits}")
    except ValueError:
        return None  # a hardware address, or something that is no IP address


def interface_kind(name: str) -> PathKind:
    """Return the kind of an interface, from its name and what the system reports about its hardware."""
    for kind, names in ((PathKind.DOCKER, _DOCKER), (PathKind.VIRTUAL, _VIRTUAL), (PathKind.VPN, _VPN)):
        if names.match(name):
            return kind
    return PathKind.WIFI if wireless(name) or _WIFI.match(name) else PathKind.WIRED
