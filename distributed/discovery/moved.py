"""Machines that are not where they were, found at another address by their host keys."""

from __future__ import annotations

import time
from collections.abc import Sequence

from distributed.discovery.discovery import Discovery, Sources, machines
from distributed.discovery.known_machines import locate
from distributed.discovery.sightings import Reachability
from distributed.hosts.schema import Hosts, Machine
from distributed.ssh.connection import SshTarget
from distributed.ssh.errors import (
    ConnectTimeout,
    HostKeyChanged,
    NameUnknown,
    NoRoute,
    NotSsh,
    PortClosed,
    Stalled,
    UnknownHostKey,
)

ABSENT = (NameUnknown, NoRoute, ConnectTimeout, PortClosed, NotSsh, Stalled)
"""It is not where it was, or off."""
STRANGER = (HostKeyChanged, UnknownHostKey)
"""Somebody else answers: its address may have been given away."""
SEARCH = 4.0
"""Seconds that a search takes at most, from its begin; announcements come within 2.5."""


def search(discovery: Discovery, lost: Sequence[Machine], hosts: Hosts, end: float) -> dict[str, str]:
    """Return the literal addresses of machines by name, as far as their host keys show up in time.

    Args:
        hosts: with the SSH configuration that holds for them.
        end: on the monotonic clock.
    """
    seen = 0
    addresses: dict[str, str] = {}
    while len(addresses) < len(lost) and (left := end - time.monotonic()) > 0:
        seen = discovery.wait(seen, min(left, 0.5))
        present = [machine for machine in machines(discovery.state) if machine.status is Reachability.ONLINE]
        for machine in lost:
            match = locate(SshTarget.of(machine, hosts), present)
            path = next((path for path in match.paths if path.online), None) if match is not None else None
            if path is not None:
                addresses[machine.name] = path.endpoint.scoped
    return addresses


def search_one(machine: Machine, hosts: Hosts) -> str:
    """Return the literal address at which a machine's host key shows up now; empty where it does not."""
    with Discovery(Sources()) as discovery:
        return search(discovery, [machine], hosts, time.monotonic() + SEARCH).get(machine.name, "")
