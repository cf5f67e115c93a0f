"""Prepares machines for a run: finds them by identity, installs our key, checks them, and installs packages.

Each stage acts only where it is needed, so that machines that are ready cost a single check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from distributed.discovery.discovery import Discovery, Sources
from distributed.discovery.relocation import ABSENT, IMPOSTOR, SEARCH, search
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import Dial, MachineLink, Tell, link_to
from distributed.preparation.preflight import NotReady, Readiness, Ready, check, ready
from distributed.preparation.provision import provision_all
from distributed.ssh.connection import Trust
from distributed.ssh.errors import NoKeyAccepted, SshError

InstallKeys = Callable[[Hosts], None]

_SEARCH_AFTER = 2.0
"""Seconds after which a machine that has not answered is searched for at other addresses."""


@dataclass(frozen=True)
class PrepareOptions:
    """How machines are prepared: progress reporting, questions to the user, and what is done without asking."""

    tell: Tell = lambda line: None
    trust: Trust | None = None
    """Asked about the host key of an unknown machine."""
    install_keys: InstallKeys | None = None
    """Called to install our key on machines that accept a password; ``None``: the user cannot be asked."""
    allow_missing: bool = False
    """Continue without absent machines."""
    missing_hint: str = ""
    """How to request that, for the error about absent machines."""
    repair: bool = True
    """Install an environment, in our own folder, on machines that lack the packages."""
    offline_wheels: bool = False
    """Send the packages from this machine."""
    dial: Dial = link_to
    previous: Sequence[Readiness] = ()
    """Machines that were checked a moment ago, and are asked again only if they had a problem."""


def prepare(hosts: Hosts, task: str, options: PrepareOptions) -> list[Ready]:
    """Prepare all machines; return their links and facts, in their order and connected.

    Raises:
        NotReady: a machine cannot take part; one error each, and all connections are closed.
        BadInput: ~/.ssh/config has an error.
    """
    machines = _Preparation(hosts, task, options).run()
    return ready(machines, _missing_hint(machines, options))


def require_present(hosts: Hosts, task: str, options: PrepareOptions) -> None:
    """Check that no machine is absent, before anything is fetched for a run; installs nothing.

    Raises:
        NotReady: some are; one error each.
        BadInput: ~/.ssh/config has an error.
    """
    machines = _Preparation(hosts, task, options).search()
    for machine in machines:
        machine.link.close()
    absent = [machine.problem for machine in machines if isinstance(machine.problem, ABSENT)]
    if absent and not (options.allow_missing and len(absent) < len(machines)):
        raise NotReady(absent, _missing_hint(machines, options))


def _missing_hint(machines: Sequence[Readiness], options: PrepareOptions) -> str:
    """Return how to go on without absent machines, where nothing else is wrong and others are there."""
    absent = [machine for machine in machines if isinstance(machine.problem, ABSENT)]
    problems = [machine for machine in machines if machine.problem is not None]
    return options.missing_hint if len(absent) == len(problems) < len(machines) else ""


def updated_hosts(hosts: Hosts, links: Iterable[MachineLink]) -> Hosts:
    """Return the hosts with what a log-in to these machines has shown: where they are, and their Python."""
    entries = {link.name: _as_reached(link) for link in links}
    machines = tuple(entries.get(machine.name, machine) for machine in hosts.machines)
    return hosts.model_copy(update={"machines": machines})


def _as_reached(link: MachineLink) -> Machine:
    is_known = link.machine.python or link.python == "python3"
    return link.machine if is_known else link.machine.model_copy(update={"python": link.python})


class _Preparation:
    """The stages of preparing the machines of one hosts file."""

    def __init__(self, hosts: Hosts, task: str, options: PrepareOptions) -> None:
        self._hosts, self._task, self._options = hosts, task, options
        self._machines = list(options.previous)

    def search(self) -> list[Readiness]:
        """Find all machines, and return what is known of each without a change on it."""
        self._ask_and_search()
        return self._machines

    def run(self) -> list[Readiness]:
        """Run all stages, and return the outcome for every machine."""
        self._ask_and_search()
        self._install_keys()
        if self._is_hopeless():
            return [replace(machine, problem=None) if machine.provisionable else machine for machine in self._machines]
        self._repair()
        if self._options.allow_missing:
            self._leave_out_absent()
        self._report_ssh_routes()
        return self._machines

    def _is_hopeless(self) -> bool:
        """Whether the run cannot begin, whatever is installed: a machine is away or refuses us."""
        allowed = ABSENT if self._options.allow_missing else ()
        problems = [machine.problem for machine in self._machines if not machine.provisionable]
        return any(problem is not None and not isinstance(problem, allowed) for problem in problems)

    def _report_ssh_routes(self) -> None:
        asked = [(m.link.machine, m.facts) for m in self._machines if m.problem is None and m.facts is not None]
        blocked = [entry for entry, facts in asked if not facts.dials_here]
        if blocked and not any(entry.carries_coordinator for entry, _ in asked):
            reason = "cannot connect to this computer (a firewall, or a NAT such as WSL2's)"
            self._options.tell(f"{_names(blocked)}: {reason}; the coordinator is reached through SSH")

    def _ask_and_search(self) -> None:
        """Check all machines at their known addresses; search for absent ones by their host keys."""
        with ThreadPoolExecutor(1) as pool:
            check_result = pool.submit(self._check, self._hosts)
            if wait([check_result], _SEARCH_AFTER).done and not any(map(_may_be_elsewhere, check_result.result())):
                self._machines = check_result.result()
                return
            begin = time.monotonic()
            with Discovery(Sources()) as discovery:
                self._machines = check_result.result()
                lost = [machine.link.machine for machine in self._machines if _may_be_elsewhere(machine)]
                if not lost:
                    return
                self._options.tell(f"looking for {_names(lost)} on the network")
                addresses = search(discovery, lost, self._hosts, begin + SEARCH)
        for name, address in addresses.items():
            self._options.tell(f"{name}: found at {address} by its host key")
        if addresses:
            self._ask_again(addresses)

    def _ask_again(self, addresses: Mapping[str, str]) -> None:
        """Check machines with a problem again, at their new addresses, and compare all machines."""
        entries = (machine.link.machine for machine in self._machines)
        moved = [m.model_copy(update={"found_at": addresses[m.name]}) if m.name in addresses else m for m in entries]
        hosts = self._hosts.model_copy(update={"machines": tuple(moved)})
        self._machines = self._check(hosts)

    def _check(self, hosts: Hosts) -> list[Readiness]:
        return check(hosts, self._task, self._options.trust, previous=self._machines, dial=self._options.dial)

    def _install_keys(self) -> None:
        """Let the user enter passwords to install our key on machines that accept them."""
        refused = [(machine.link.machine, machine.problem) for machine in self._machines]
        locked = [m for m, error in refused if isinstance(error, NoKeyAccepted) and error.password_possible]
        if locked and self._options.install_keys is not None:
            self._options.install_keys(self._hosts.model_copy(update={"machines": tuple(locked)}))
            self._ask_again({})

    def _repair(self) -> None:
        """Install an environment on machines that lack one; packages are sent from here if the index is unreachable."""
        lacking = [machine.link for machine in self._machines if machine.provisionable]
        if not lacking or not self._options.repair:
            return
        tell = self._options.tell
        tell(f"installing packages into Muster's folder there: {_names([link.machine for link in lacking])}")
        problems = provision_all(lacking, tell, self._options.offline_wheels)
        self._ask_again({})
        for machine in self._machines:
            if (error := problems.get(machine.link.name)) is not None:
                names_machine = isinstance(error, SshError)
                machine.problem = error if names_machine else SshError(machine.link.name, error.message, error.hint)

    def _leave_out_absent(self) -> None:
        absent = [machine for machine in self._machines if isinstance(machine.problem, ABSENT)]
        if len(absent) == len(self._machines):
            return
        self._machines = [machine for machine in self._machines if machine not in absent]
        for machine in absent:
            if machine.problem is not None:
                self._options.tell(
                    f"continuing without {machine.link.name}: {machine.problem.message_for(machine.link.name)}"
                )


def _may_be_elsewhere(machine: Readiness) -> bool:
    return not machine.link.machine.is_local and isinstance(machine.problem, (*ABSENT, *IMPOSTOR))


def _names(entries: Sequence[Machine]) -> str:
    return ", ".join(entry.name for entry in entries)
