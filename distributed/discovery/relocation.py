"""Finds machines that have moved to another address, by their host keys."""

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
"""Errors of a machine that has moved or is off."""
IMPOSTOR = (HostKeyChanged, UnknownHostKey)
"""Errors where another machine answers: the address may have been reassigned."""
SEARCH = 4.0
"""Maximum seconds of a search; announcements arrive within 2.5 s."""


def search(discovery: Discovery, lost: Sequence[Machine], hosts: Hosts, end: float) -> dict[str, str]:
    """Return the literal addresses of lost machines by name, of those whose host keys show up in time.

    Args:
        hosts: has the SSH configuration for them.
        end: deadline on the monotonic clock.
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
    """Return the literal address at which a machine's host key shows up; empty where it is not found."""
    with Discovery(Sources()) as discovery:
        return search(discovery, [machine], hosts, time.monotonic() + SEARCH).get(machine.name, "")
