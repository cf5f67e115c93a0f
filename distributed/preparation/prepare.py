"""Machines of a profile made ready for a run: found by identity, let in, checked, and given their packages.

Each stage does something only where it is needed, so that machines that are ready cost one look at them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from distributed.discovery.discovery import Discovery, Sources
from distributed.discovery.moved import ABSENT, SEARCH, STRANGER, search
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import MachineLink, Tell
from distributed.preparation.preflight import Readiness, Ready, check, ready
from distributed.preparation.provision import provision_all
from distributed.ssh.connection import Trust
from distributed.ssh.errors import NoKeyAccepted, SshError

LetIn = Callable[[Hosts], None]

_SURE = 2.0
"""Seconds after which a machine that has not answered is looked for elsewhere."""


@dataclass(frozen=True)
class PrepareOptions:
    """How machines are made ready: where progress goes, who is asked, and what is done without asking."""

    tell: Tell = lambda line: None
    trust: Trust | None = None
    """Asked for the key of a machine never met before."""
    let_in: LetIn | None = None
    """Asked to bring our key to machines that take a password; ``None``: nobody can be asked."""
    allow_missing: bool = False
    """Go on without machines that are not there."""
    missing_hint: str = ""
    """How a person says that, for the error about some that are not there."""
    repair: bool = True
    """Make an environment, in our own folder there, on machines without the packages."""
    offline_wheels: bool = False
    """Take the packages from this machine."""


def prepare(hosts: Hosts, task: str, options: PrepareOptions) -> list[Ready]:
    """Return links and facts of all machines, in their order and connected.

    Raises:
        NotReady: some cannot take part; one error each, and all connections are closed.
        BadInput: ~/.ssh/config has an error.
    """
    machines = _Preparation(hosts, task, options).found()
    absent = [one for one in machines if isinstance(one.problem, ABSENT)]
    problems = [one for one in machines if one.problem is not None]
    all_are_absent = len(absent) == len(problems) < len(machines)
    return ready(machines, options.missing_hint if all_are_absent else "")


def hosts_with(hosts: Hosts, links: Sequence[MachineLink]) -> Hosts:
    """Return the same hosts, those of ``links`` as these know them."""
    connected = {machine.name: machine for machine in hosts_of(hosts, links).machines}
    return hosts.model_copy(update={"machines": tuple(connected.get(one.name, one) for one in hosts.machines)})


def hosts_of(hosts: Hosts, links: Sequence[MachineLink]) -> Hosts:
    """Return the hosts as their links know them: where they were found, and with which Python."""
    machines = [
        link.machine if link.machine.python or link.python == "python3"
        else link.machine.model_copy(update={"python": link.python})
        for link in links
    ]  # fmt: skip
    return hosts.model_copy(update={"machines": tuple(machines)})


class _Preparation:
    """Machines on their way from the hosts file to a run."""

    def __init__(self, hosts: Hosts, task: str, options: PrepareOptions) -> None:
        self._hosts, self._task, self._options = hosts, task, options
        self._found: list[Readiness] = []

    def found(self) -> list[Readiness]:
        """Return the outcome for every machine."""
        self._ask_and_search()
        self._let_in()
        self._repair()
        if self._options.allow_missing:
            self._leave_out_absent()
        self._tell_who_goes_through_ssh()
        return self._found

    def _tell_who_goes_through_ssh(self) -> None:
        entries = [one.link.machine for one in self._found if one.problem is None]
        shut_out = [entry for entry in entries if entry.through_ssh]
        if shut_out and not any(entry.carries_coordinator for entry in entries):
            reason = "cannot connect to this computer (a firewall, or a NAT such as WSL2's)"
            self._options.tell(f"{_names(shut_out)}: {reason}; the coordinator is reached through SSH")

    def _ask_and_search(self) -> None:
        """Ask all machines where they were; look for those that are not there by their host keys."""
        with ThreadPoolExecutor(1) as pool:
            check_result = pool.submit(check, self._hosts, self._task, self._options.trust)
            if wait([check_result], _SURE).done and not any(map(_may_be_elsewhere, check_result.result())):
                self._found = check_result.result()
                return
            begin = time.monotonic()
            with Discovery(Sources()) as discovery:
                self._found = check_result.result()
                lost = [one.link.machine for one in self._found if _may_be_elsewhere(one)]
                if not lost:
                    return
                self._options.tell(f"looking for {_names(lost)} on the network")
                addresses = search(discovery, lost, self._hosts, begin + SEARCH)
        for name, address in addresses.items():
            self._options.tell(f"{name}: found at {address} by its host key")
        if addresses:
            self._ask_again(addresses)

    def _ask_again(self, addresses: Mapping[str, str]) -> None:
        """Ask those with a problem again, at their new places; the comparison is over all."""
        entries = (one.link.machine for one in self._found)
        moved = [m.model_copy(update={"found_at": addresses[m.name]}) if m.name in addresses else m for m in entries]
        hosts = self._hosts.model_copy(update={"machines": tuple(moved)})
        self._found = check(hosts, self._task, self._options.trust, previous=self._found)

    def _let_in(self) -> None:
        """Let a person give the password of machines that would take our key with it."""
        refused = [(one.link.machine, one.problem) for one in self._found]
        locked = [m for m, error in refused if isinstance(error, NoKeyAccepted) and error.password_possible]
        if locked and self._options.let_in is not None:
            self._options.let_in(self._hosts.model_copy(update={"machines": tuple(locked)}))
            self._ask_again({})

    def _repair(self) -> None:
        """Give an environment to the machines that lack one; those without the package index get it from here."""
        lacking = [one.link for one in self._found if one.provisionable]
        if not lacking or not self._options.repair:
            return
        tell = self._options.tell
        tell(f"installing packages into Muster's folder there: {_names([link.machine for link in lacking])}")
        problems = provision_all(lacking, tell, self._options.offline_wheels, falls_back=True)
        self._ask_again({})
        for machine in self._found:
            if (error := problems.get(machine.link.name)) is not None:
                names_machine = isinstance(error, SshError)
                machine.problem = error if names_machine else SshError(machine.link.name, error.message, error.hint)

    def _leave_out_absent(self) -> None:
        absent = [one for one in self._found if isinstance(one.problem, ABSENT)]
        if len(absent) == len(self._found):
            return
        self._found = [one for one in self._found if one not in absent]
        for machine in absent:
            if machine.problem is not None:
                self._options.tell(
                    f"continuing without {machine.link.name}: {machine.problem.beside(machine.link.name)}"
                )


def _may_be_elsewhere(machine: Readiness) -> bool:
    return not machine.link.machine.here and isinstance(machine.problem, (*ABSENT, *STRANGER))


def _names(entries: Sequence[Machine]) -> str:
    return ", ".join(entry.name for entry in entries)
