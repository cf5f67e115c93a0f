"""Machines between the set-up's rows, discovery, and the hosts file that a run takes."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

from app.wizard.state import MachineRow, PathRow, Status
from distributed.hosts import Hosts, Machine, split_address
from distributed.machine_identity import FoundMachine
from distributed.sightings import Origin
from distributed.sightings import Status as Seen

HERE_KEY = "here"
_WORDS = {Seen.ONLINE: Status.OK, Seen.CHECKING: Status.WORKING, Seen.OFFLINE: Status.FAILED, Seen.UNCHECKED: Status.OK}
_KEPT = ("key", "python", "project_path", "devices", "interface")
"""Fields of a hosts file's entry that discovery knows nothing of."""
_LONGEST_NAME = 64


def here_name() -> str:
    """Return what this computer is called."""
    return _plain(socket.gethostname().partition(".")[0]) or "this-computer"


def _plain(name: str) -> str:
    """A name that a hosts file takes, from text of the network."""
    return re.sub(r"[^\w .:@-]", "", name).strip(" .")[:_LONGEST_NAME]


class Naming:
    """How machines that were found are reached: as typed, as their hosts file says, by alias, or by ``.local`` name."""

    def __init__(self, typed: Iterable[str], entries: Mapping[str, Machine]) -> None:
        self._typed = {str(split_address(text)["name"]).casefold(): text for text in typed}
        self._entries = {name.casefold(): machine for name, machine in entries.items()}

    def rows(self, found: Sequence[FoundMachine]) -> tuple[MachineRow, ...]:
        """Return one row a machine."""
        hosts = [self._local_name(machine) for machine in found]
        claimed = {host for host in hosts if host and hosts.count(host) > 1}
        return tuple(
            self._row(machine, host if host not in claimed else "") for machine, host in zip(found, hosts, strict=True)
        )

    def _row(self, machine: FoundMachine, host: str) -> MachineRow:
        """``host``: its name in the local network, unless two machines claim it."""
        entry = self._entry(machine, host)
        details = machine.details
        problem = machine.problem
        return MachineRow(
            key=HERE_KEY if machine.here else machine.id,
            name=here_name() if machine.here else machine.name,
            status=_WORDS[machine.status],
            words=machine.status.value,
            cause=problem.message if problem else "",
            fix=problem.hint if problem else "",
            address="" if machine.here else entry.host,
            port=entry.port,
            user=entry.user,
            here=machine.here,
            chip=details.get("devices", "") or details.get("model", ""),
            memory=details.get("memory", ""),
            system=details.get("system", "") or details.get("version", ""),
            found_by=tuple(origin.value for origin in machine.found_by),
            paths=tuple(
                PathRow(p.endpoint.where, p.endpoint.kind.value, p.endpoint.interface, p.status is Seen.ONLINE)
                for p in machine.paths
            ),
            fingerprint=machine.fingerprint,
            aliases=self._aliases(machine),
            python=entry.python,
            settings=_settings(entry),
        )

    def _aliases(self, machine: FoundMachine) -> tuple[str, ...]:
        names = {name.casefold() for name in machine.names}
        typed = tuple(f"typed:{text}" for host, text in self._typed.items() if host in names)
        return (*typed, *(() if machine.here else (f"name:{machine.names[0].casefold()}",) if machine.names else ()))

    def _entry(self, machine: FoundMachine, host: str) -> Machine:
        """Return how to reach it, as a hosts file would say it."""
        names = [name.casefold() for name in machine.names]
        for name in names:
            if name in self._typed and Origin.TYPED in machine.found_by:
                place = split_address(self._typed[name])
                return Machine(name=_plain(machine.name) or name, address=str(place["name"]), port=place["port"],
                               user=place["user"] or "")  # fmt: skip
        for name in names:
            if name in self._entries and {Origin.HOSTS_FILE, Origin.PROFILE} & set(machine.found_by):
                return self._entries[name]
        best = machine.paths[0].endpoint if machine.paths else None
        if Origin.SSH_CONFIG in machine.found_by or best is None:
            return Machine(
                name=_plain(machine.name) or "unnamed", address=machine.name if _is_host(machine.name) else ""
            )
        port = best.port if best.port != 22 else None
        if not host or not _is_host(host):
            return Machine(name=_plain(machine.name) or best.address, address=best.scoped, port=port)
        return Machine(name=_plain(machine.name) or host, address=host, port=port, found_at=best.scoped)

    @staticmethod
    def _local_name(machine: FoundMachine) -> str:
        return next((name for name in machine.names if name.casefold().endswith(".local")), "").casefold()


def _is_host(text: str) -> bool:
    return re.fullmatch(r"[\w:][\w.:%-]*", text) is not None


def _settings(entry: Machine) -> tuple[tuple[str, object], ...]:
    kept = ((name, getattr(entry, name)) for name in (*_KEPT, "found_at"))
    return tuple((name, value) for name, value in kept if value)


def machine_of(row: MachineRow, name: str = "") -> Machine:
    """Return the entry of a row in a hosts file."""
    if row.here:
        return Machine(name=name or row.name, address="localhost", python=row.python or sys.executable)
    settings = dict(row.settings)
    return Machine(name=name or _plain(row.name) or "unnamed", address=row.address, port=row.port, user=row.user,
                   **settings)  # fmt: skip


def hosts_of(rows: Sequence[MachineRow]) -> Hosts:
    """Return the hosts file of some machines; two of one name get numbers."""
    machines = []
    taken: set[str] = set()
    for row in rows:
        plain = _plain(row.name) or "unnamed"
        numbered = (plain if number == 1 else f"{plain[: _LONGEST_NAME - 4]}-{number}" for number in range(1, 100))
        name = next(name for name in numbered if name.casefold() not in taken)
        taken.add(name.casefold())
        machines.append(machine_of(row, name))
    return Hosts(machines=tuple(machines))


def row_of(machine: Machine) -> MachineRow:
    """Return the row of an entry of a saved profile, before anything is seen of it."""
    if machine.here:
        return MachineRow(HERE_KEY, machine.name, Status.OK, "online", here=True, python=machine.python)
    return MachineRow(
        key=f"saved:{machine.host}:{machine.port or 22}",
        name=machine.name,
        words="looking",
        address=machine.host,
        port=machine.port,
        user=machine.user,
        found_by=(Origin.PROFILE.value,),
        python=machine.python,
        settings=_settings(machine),
        aliases=(f"name:{machine.name.casefold()}",),
    )
