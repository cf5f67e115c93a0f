"""Announces this machine to other Muster users on the network, as service ``_muster._tcp``.

Announced data is displayed by others and never trusted. Closing withdraws the announcement.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import psutil
from zeroconf import Error, ServiceInfo, Zeroconf

from distributed.discovery.mdns_records import MUSTER
from distributed.discovery.network_interfaces import Interface, Interfaces, PathKind, list_interfaces
from distributed.system import output
from profiles.errors import MachinesNotReady

_NOT_ANNOUNCED = (PathKind.DOCKER, PathKind.VPN, PathKind.VIRTUAL)
"""Kinds of interfaces on which machines are not announced."""
_LONGEST_LABEL = 40
_LONGEST_VALUE = 200
"""Bytes; key and value share one byte for their length (RFC 6763, 6.1)."""
_LOOPBACK = "127.0.0.1"
"""Placeholder where there is no network: zeroconf needs at least one address."""


class Announcement:
    """This machine's announcement; use it as a context manager.

    Args:
        port: of this machine's SSH server, or of ``service``.
        name: announced name; empty: the host name. A number is appended if another machine has the name.
        service: the kind of what is announced.
        properties: announced with it; by default what describes this machine.
        interfaces: lists the interfaces of this machine.
        responder: creates the multicast DNS responder for their addresses.

    Raises:
        MachinesNotReady: there is no network to announce it on.
    """

    def __init__(
        self,
        port: int = 22,
        name: str = "",
        *,
        service: str = MUSTER,
        properties: Mapping[str, str] | None = None,
        interfaces: Callable[[], Interfaces] = list_interfaces,
        responder: Callable[..., Zeroconf] = Zeroconf,
    ) -> None:
        self._port, self._list_interfaces = port, interfaces
        self._interfaces = _announceable(interfaces())
        if not self._interfaces:
            raise MachinesNotReady("no network interface to announce this machine on", "connect a cable or Wi-Fi")
        self._label = _label(name or socket.gethostname())
        self._type = f"{service}.local."
        self.txt = describe_this_machine() if properties is None else dict(properties)
        logging.getLogger("zeroconf").setLevel(logging.ERROR)  # it warns of addresses that are not ready yet
        self._zeroconf = self._start(responder)
        self._info = self._service(f"{self._label}.{self._type}", self._interfaces)

    def _start(self, responder: Callable[..., Zeroconf]) -> Zeroconf:
        while True:
            try:
                return responder(interfaces=_addresses(self._interfaces))
            except (OSError, RuntimeError) as error:
                current = _announceable(self._list_interfaces())
                if current and current != self._interfaces:  # one has gone since they were listed
                    self._interfaces = current
                    continue
                message = f"cannot send multicast DNS: {getattr(error, 'strerror', None) or error}"
                raise MachinesNotReady(message, "is a network connected, and UDP port 5353 free?") from None

    @property
    def name(self) -> str:
        """The name of the machine on the network."""
        return str(self._info.name).removesuffix(f".{self._type}")

    @property
    def interfaces(self) -> tuple[str, ...]:
        return tuple(interface.name for interface in self._interfaces)

    def _service(self, full_name: str, interfaces: tuple[Interface, ...]) -> ServiceInfo:
        # A separate host name: the system's responder owns the plain one and would see a conflict.
        return ServiceInfo(
            self._type, full_name, port=self._port, properties=self.txt, server=f"muster-{self._label}.local.",
            parsed_addresses=_addresses(interfaces),
        )  # fmt: skip

    def __enter__(self) -> Announcement:
        try:
            self._zeroconf.register_service(self._info, allow_name_change=True)
        except Error as error:
            self.close()
            raise MachinesNotReady(f"cannot announce this machine: {error}", "try again in a minute") from None
        return self

    def follow_interfaces(self) -> bool:
        """Announce on the current interfaces; return whether they have changed.

        Call it periodically: what failed, such as an address that is not ready yet, is retried.
        """
        current = _announceable(self._list_interfaces())
        announced = {(interface.name, interface.index) for interface in self._interfaces}
        retained = tuple(interface for interface in current if (interface.name, interface.index) in announced)
        try:
            if (
                retained != current or not current
            ):  # by address alone, zeroconf would take a replugged interface for the old one
                self._zeroconf.update_interfaces(_addresses(retained) or [_LOOPBACK])
            if not current:
                return False
            self._zeroconf.update_interfaces(_addresses(current))
            if current == self._interfaces:
                return False
            self._interfaces = ()  # a failed update is repeated by the next call
            info = self._service(str(self._info.name), current)
            self._zeroconf.update_service(info)
        except (Error, OSError):
            return False
        self._info, self._interfaces = info, current
        return True

    def close(self) -> None:
        """Withdraw the announcement, if the machine is not too busy."""
        with contextlib.suppress(Error):
            self._zeroconf.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _announceable(interfaces: Interfaces) -> tuple[Interface, ...]:
    return tuple(interface for interface in interfaces.browsable if interface.kind not in _NOT_ANNOUNCED)


def _addresses(interfaces: tuple[Interface, ...]) -> list[str]:
    return [str(attached.ip) for interface in interfaces for attached in interface.addresses]


def _label(name: str) -> str:
    """Convert a host name to one DNS label."""
    label = re.sub(r"[^A-Za-z0-9-]+", "-", name.partition(".")[0])[:_LONGEST_LABEL].strip("-")
    return label or "machine"


def describe_this_machine(output: Callable[..., str] = output) -> dict[str, str]:
    """Return the announced properties: version, model, devices, and memory in bytes. Loads nothing heavy."""
    try:
        version = importlib.metadata.version("muster-train")
    except importlib.metadata.PackageNotFoundError:  # started from a folder that was never installed
        version = "unknown"
    memory = str(psutil.virtual_memory().total)
    model = f"{platform.system()} {platform.machine()}"
    if sys.platform == "darwin":
        model = output("sysctl", "-n", "machdep.cpu.brand_string").strip()
    properties = {"version": version, "devices": ", ".join(_devices(output)), "memory": memory, "model": model}
    return {key: value.encode()[:_LONGEST_VALUE].decode(errors="ignore") for key, value in properties.items()}


def _devices(output: Callable[..., str]) -> list[str]:
    gpus = [line.strip() for line in output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()]
    gpu_counts = Counter(f"cuda {name}" for name in gpus if name)
    devices = [f"{count}x {name}" if count > 1 else name for name, count in gpu_counts.items()][:4]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        devices.append("mps")
    return [*devices, f"cpu {os.cpu_count()} cores"]
