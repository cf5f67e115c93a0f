"""Conversions between the set-up's rows, discovered machines and hosts files, and the hardware of this computer."""

from __future__ import annotations

import platform
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from app.wizard.state.records import ItemStatus, MachineRow
from distributed.discovery.known_machines import USER_KNOWN_HOSTS, read_known_keys
from distributed.discovery.machine_identity import FoundMachine
from distributed.discovery.sightings import Reachability, SightingOrigin
from distributed.hosts.file import (
    Hosts,
    Machine,
    is_literal_address,
    other_python,
    python_demands,
    split_address,
    typed_machine,
)
from distributed.hosts.past_logins import PastLogin
from distributed.ssh.access import AccessReport
from distributed.ssh.connection import SshTarget, Trust
from distributed.ssh.errors import Stage
from distributed.ssh.keys.host_keys import HostKeyInfo
from distributed.system import output, read
from profiles.errors import BadInput
from profiles.installation import training_python
from profiles.quantities import memory_text

LONGEST_NAME = 64
HERE_KEY = "here"
_STATUSES = {
    Reachability.ONLINE: ItemStatus.OK,
    Reachability.CHECKING: ItemStatus.WORKING,
    Reachability.OFFLINE: ItemStatus.FAILED,
    Reachability.OTHER_KEY: ItemStatus.FAILED,
    Reachability.UNCHECKED: ItemStatus.OK,
}
_NO_HOST = "not-a-host-name.invalid"
"""Host of a machine whose name is not valid for SSH: Access then reports it as unknown."""


def plain_name(name: str) -> str:
    """Return text from the network as a name that a hosts file accepts."""
    return re.sub(r"[^\w .:@-]", "", name).strip(" .")[:LONGEST_NAME]


class ThisComputer(NamedTuple):
    """Description of the machine that the set-up runs on."""

    name: str
    chip: str
    """Chip or GPU."""
    memory: str
    system: str
    python: str = ""
    """Python interpreter that trains on it; empty: not installed yet."""


def this_computer() -> ThisComputer:
    return _hardware()._replace(python=training_python())


@lru_cache(maxsize=1)
def _hardware() -> ThisComputer:
    import psutil  # 20 ms, which an import of this module does without

    name = plain_name(socket.gethostname().partition(".")[0]) or "this-computer"
    chip, system = mac() if platform.system() == "Darwin" else linux()
    return ThisComputer(name, chip, memory_text(psutil.virtual_memory().total), system)


def mac(ask: Callable[..., str] = output) -> tuple[str, str]:
    """Return chip and system of a Mac; ``platform.processor()`` would only return ``arm``."""
    version = platform.mac_ver()[0] or ask("sw_vers", "-productVersion").strip()
    return ask("sysctl", "-n", "machdep.cpu.brand_string").strip() or platform.machine(), f"macOS {version}".strip()


def linux(root: Path = Path("/")) -> tuple[str, str]:
    """Return the NVIDIA GPUs, or else the processor, and the system."""
    cards = sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
    models = Counter(name for card in cards if (name := _value(card, r"Model:[ \t]*(.+)")))
    gpus = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in models.items())
    processor = _value(root / "proc/cpuinfo", r"model name\s*:[ \t]*(.+)") or _value(
        root / "proc/device-tree/model", r"([^\0]+)"
    )
    system = _value(root / "etc/os-release", r'^PRETTY_NAME="?([^"\n]+)')
    return gpus or processor or platform.machine(), system or platform.system()


def _value(path: Path, pattern: str) -> str:
    """Return the first match of a pattern in a system file."""
    match = re.search(pattern, read(str(path)), re.MULTILINE)
    return match[1].strip() if match else ""


# ------------------------------------------------------------------------------------------------------------- machines


def _announced(details: Mapping[str, str]) -> tuple[str, str, str]:
    """Return chip, memory and system as announced by the machine itself: unverified, for display only."""
    memory = details.get("memory", "")
    size = memory_text(float(memory)) if memory.isdecimal() and len(memory) < 16 else ""
    return details.get("devices", "") or details.get("model", ""), size, details.get("system", "")


class Naming:
    """Finds how to reach discovered machines: as typed, by their hosts file, by SSH alias, by ``.local`` name, or as at
    an earlier log-in."""

    def __init__(
        self,
        typed: Iterable[str],
        files: Iterable[Hosts],
        this_machine: Callable[[], ThisComputer] = this_computer,
        logins: Sequence[PastLogin] = (),
    ) -> None:
        self._logins = logins
        self._this_machine = this_machine
        self._typed = {str(split_address(text)["name"]).casefold(): text for text in typed}
        self._entries: dict[str, tuple[Machine, str]] = {}
        for hosts in files:
            for machine in hosts.machines:
                self._entries.setdefault(machine.name.casefold(), (machine, hosts.ssh_config))

    def rows(self, discovered: Sequence[FoundMachine]) -> tuple[MachineRow, ...]:
        """Return one row per machine."""
        local = (
            [name.casefold() for name in machine.names if name.casefold().endswith(".local")] for machine in discovered
        )
        hosts = [names[0] if names else "" for names in local]
        claimed = {host for host in hosts if host and hosts.count(host) > 1}
        return tuple(
            self._row(machine, host if host not in claimed else "")
            for machine, host in zip(discovered, hosts, strict=True)
        )

    def _row(self, machine: FoundMachine, host: str) -> MachineRow:
        """Return the row of a machine; ``host`` is its name in the local network, unless two machines claim it."""
        names = tuple(name.casefold() for name in machine.names)
        login = self._login_of(machine)
        entry, ssh_config = self._entry(machine, names, host, login)
        name = login.name if login is not None and is_literal_address(machine.name) else machine.name
        details = self._this_machine() if machine.here else ThisComputer(name, *_announced(machine.details))
        if machine.here:
            entry = _local_entry(entry.name, entry.python or details.python)
        origins = dict.fromkeys((*machine.found_by, *((SightingOrigin.PAST_LOGIN,) if login is not None else ())))
        problem, is_untried = machine.problem, machine.status is Reachability.UNCHECKED
        return MachineRow(
            key=HERE_KEY if machine.here else machine.id,
            name=details.name,
            status=ItemStatus.WARNING if is_untried and problem else _STATUSES[machine.status],
            words=machine.status.value,
            cause=problem.message if problem else "",
            fix=problem.hint if problem else "",
            entry=entry,
            ssh_config=ssh_config,
            chip=details.chip,
            memory=details.memory,
            system=details.system,
            found_by=tuple(origin.value for origin in origins),
            paths=machine.paths,
            fingerprint=machine.fingerprint,
            names=names,
            aliases=tuple(f"typed:{text}" for host, text in self._typed.items() if host in names),
            unequipped=machine.here and not details.python,
            other_python=other_python(entry) is not None,
        )

    def _entry(
        self, machine: FoundMachine, names: Sequence[str], host: str, login: PastLogin | None
    ) -> tuple[Machine, str]:
        """Return a hosts file entry that reaches the machine, and the SSH configuration of that file."""
        typed = next((self._typed[name] for name in names if name in self._typed), "")
        if typed and SightingOrigin.TYPED in machine.found_by:
            as_typed = typed_machine(typed)
            return as_typed.model_copy(update={"name": plain_name(machine.name) or as_typed.name}), ""
        listed = next((self._entries[name] for name in names if name in self._entries), None)
        if listed is not None and {SightingOrigin.HOSTS_FILE, SightingOrigin.PROFILE} & set(machine.found_by):
            return listed
        return _found_entry(machine, host, login), ""

    def _login_of(self, machine: FoundMachine) -> PastLogin | None:
        """Return the latest log-in at a machine with this host key; of clones, at one with its name."""
        logins = [login for login in self._logins if login.fingerprint == machine.fingerprint]
        names = {name.casefold() for name in machine.names}
        named = (login for login in logins if names & {login.name.casefold(), login.host.casefold()})
        return next(named, next(iter(logins), None))


def _found_entry(machine: FoundMachine, host: str, login: PastLogin | None) -> Machine:
    """Return an entry by SSH alias, by ``.local`` name or that of an earlier log-in and discovered address, or by that
    address alone."""
    name = plain_name(machine.name)
    best = machine.paths[0].endpoint if machine.paths else None
    if best is None or (SightingOrigin.SSH_CONFIG in machine.found_by and _is_host(machine.name)):
        return Machine(name=name or "unnamed", address=machine.name if _is_host(machine.name) else _NO_HOST)
    port = best.port if best.port != 22 else None
    user = login.user if login is not None else ""
    host = host or (login.host if login is not None and not is_literal_address(login.host) else "")
    if not host or not _is_host(host):
        return Machine(name=name or best.address, address=best.scoped, port=port, user=user)
    return Machine(name=name or host, address=host, port=port, user=user, found_at=best.scoped)


def _is_host(text: str) -> bool:
    return re.fullmatch(r"[\w:][\w.:%-]{0,200}", text, re.ASCII) is not None


def _local_entry(name: str, python: str = "") -> Machine:
    return Machine(name=plain_name(name) or "unnamed", address="localhost", python=python)


def entries_of(rows: Sequence[MachineRow]) -> dict[str, Machine]:
    """Return the entries of these machines in a hosts file by the rows' keys; equal names are numbered."""
    entries: dict[str, Machine] = {}
    taken: set[str] = set()
    for row in rows:
        plain = plain_name(row.name) or "unnamed"
        numbered = (plain if number == 1 else f"{plain[: LONGEST_NAME - 4]}-{number}" for number in range(1, 100))
        name = next(name for name in numbered if name.casefold() not in taken)
        taken.add(name.casefold())
        entries[row.key] = row.entry.model_copy(update={"name": name})
    return entries


def hosts_of(rows: Sequence[MachineRow]) -> Hosts:
    """Return a hosts file for these machines.

    Raises:
        BadInput: the user has not approved the interpreter that it names for this computer.
    """
    ssh_config = next((row.ssh_config for row in rows if row.ssh_config), "")
    hosts = Hosts(machines=tuple(entries_of(rows).values()), ssh_config=ssh_config)
    if demands := python_demands(hosts):
        problem = f"the hosts file of {hosts.master.name} can run a program here and is not approved: {demands[0]}"
        raise BadInput(problem, "approve it at Access")
    return hosts


def target_of(row: MachineRow) -> SshTarget:
    hosts = hosts_of([row])
    return SshTarget.of(hosts.master, hosts)


def access_here(row: MachineRow) -> AccessReport:
    """Return whether the interpreter of this computer that a hosts file names may be used."""
    demands = tuple(python_demands(Hosts(machines=(row.entry,))))
    if not demands:
        return AccessReport(row.name)
    problem = f"its hosts file names {row.entry.python} as the Python of this computer, which is not approved"
    return AccessReport(row.name, failed=Stage.REACH, cause="python", problem=problem, demands=demands)


def trust_in(fingerprints: Sequence[str]) -> Trust:
    """Return a check that accepts host keys the user has trusted, now or earlier under any of the machine's names."""

    def accept(key: HostKeyInfo) -> bool:
        return key.fingerprint in fingerprints or key.fingerprint in read_known_keys(USER_KNOWN_HOSTS).names

    return accept


def row_of(machine: Machine, computer: ThisComputer, ssh_config: str = "") -> MachineRow:
    """Return the row of a machine in a saved profile, before it is discovered."""
    if machine.is_local:
        entry = _local_entry(machine.name, machine.python or computer.python)
        return replace(this_row(computer), name=machine.name, entry=entry, other_python=other_python(entry) is not None)
    return MachineRow(f"saved:{machine.host}:{machine.port or 22}", machine.name, words="searching", entry=machine,
                      ssh_config=ssh_config, found_by=(SightingOrigin.PROFILE.value,))  # fmt: skip


def this_row(computer: ThisComputer) -> MachineRow:
    """Return the row of this computer."""
    return MachineRow(
        HERE_KEY,
        computer.name,
        status=ItemStatus.OK,
        words="online",
        entry=_local_entry(computer.name, computer.python),
        chip=computer.chip,
        memory=computer.memory,
        system=computer.system,
        unequipped=not computer.python,
    )
