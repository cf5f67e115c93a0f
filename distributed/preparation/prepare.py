"""Machines of a profile made ready for a run: found by identity, let in, checked, and given their packages.

Each stage does something only where it is needed, so that machines that are ready cost one look at them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from distributed.discovery.discovery import Discovery, Sources, machines
from distributed.discovery.known_machines import locate
from distributed.discovery.sightings import Status
from distributed.hosts.schema import Hosts, Machine
from distributed.machine.link import Link
from distributed.preparation.preflight import Facts, Readiness, check, ready
from distributed.preparation.provision import provision
from distributed.ssh.connection import SshTarget, Trust
from distributed.ssh.errors import (
    ConnectTimeout,
    HostKeyChanged,
    NameUnknown,
    NoKeyAccepted,
    NoRoute,
    NotSsh,
    PortClosed,
    SshError,
    Stalled,
    UnknownHostKey,
)
from profiles.errors import MusterError

Tell = Callable[[str], None]
LetIn = Callable[[Hosts], None]

_ABSENT = (NameUnknown, NoRoute, ConnectTimeout, PortClosed, NotSsh, Stalled)
"""It is not where it was, or off."""
_STRANGER = (HostKeyChanged, UnknownHostKey)
"""Somebody else answers: its address may have been given away."""
_SURE = 2.0
"""Seconds after which a machine that has not answered is looked for elsewhere."""
_SEARCH = 4.0
"""Seconds that this search takes at most, from its begin; announcements come within 2.5."""


@dataclass(frozen=True)
class PrepareOptions:
    """How machines are made ready: who is told, who is asked, and what is done unasked."""

    tell: Tell = lambda line: None
    trust: Trust | None = None
    """Asked for the key of a machine never met before."""
    let_in: LetIn | None = None
    """Asked to bring our key to machines that take a password; ``None``: nobody can be asked."""
    allow_missing: bool = False
    """Go on without machines that are not there."""
    repair: bool = True
    """Make an environment, in our own folder there, on machines without the packages."""
    offline_wheels: bool = False
    """Take the packages from this machine."""


def prepare(hosts: Hosts, task: str, options: PrepareOptions) -> list[tuple[Link, Facts]]:
    """Return links and facts of all machines, in their order and connected.

    Raises:
        NotReady: some cannot take part; one error each, and all connections are closed.
        BadInput: ~/.ssh/config has an error.
    """
    found = _ask_and_search(hosts, task, options)
    found = _let_in(found, hosts, task, options)
    found = _repair(found, hosts, task, options)
    if options.allow_missing:
        found = _without_absent(found, options)
    return ready(found)


def hosts_of(hosts: Hosts, links: Sequence[Link]) -> Hosts:
    """Return the hosts as their links know them: where they were found, and with which Python."""
    machines = [
        link.machine if link.machine.python or link.python == "python3"
        else link.machine.model_copy(update={"python": link.python})
        for link in links
    ]  # fmt: skip
    return hosts.model_copy(update={"machines": tuple(machines)})


# ----------------------------------------------------------------------------------------------------------- presence


def _ask_and_search(hosts: Hosts, task: str, options: PrepareOptions) -> list[Readiness]:
    """Ask all machines where they were; look for those that are not there by their host keys."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(check, hosts, task, options.trust)
        if wait([asked], _SURE).done and not any(map(_may_be_elsewhere, asked.result())):
            return asked.result()
        begin = time.monotonic()
        with Discovery(Sources()) as discovery:
            found = asked.result()
            lost = [one.link.machine for one in found if _may_be_elsewhere(one)]
            if not lost:
                return found
            options.tell(f"looking for {_names(lost)} in the network")
            places = _search(discovery, lost, hosts, begin + _SEARCH)
    if not places:
        return found
    for name, address in places.items():
        options.tell(f"{name}: found at {address} by its host key")
    return _again(found, hosts, task, options, places)


def _may_be_elsewhere(one: Readiness) -> bool:
    return not one.link.machine.here and isinstance(one.problem, (*_ABSENT, *_STRANGER))


def _search(discovery: Discovery, lost: Sequence[Machine], hosts: Hosts, end: float) -> dict[str, str]:
    """Return the new places of lost machines by name, as far as they show up in time."""
    seen = 0
    places: dict[str, str] = {}
    while len(places) < len(lost) and (left := end - time.monotonic()) > 0:
        seen = discovery.wait(seen, min(left, 0.5))
        present = [machine for machine in machines(discovery.state) if machine.status is Status.ONLINE]
        for machine in lost:
            found = locate(SshTarget.of(machine, hosts), present)
            for path in found.paths if found is not None else ():
                if path.status is Status.ONLINE:
                    places[machine.name] = path.endpoint.scoped
                    break
    return places


def _again(
    found: Sequence[Readiness], hosts: Hosts, task: str, options: PrepareOptions, places: Mapping[str, str]
) -> list[Readiness]:
    """Ask those with a problem again, at their new places; the comparison is over all."""
    entries = [one.link.machine for one in found]
    moved = [one.model_copy(update={"found_at": places[one.name]}) if one.name in places else one for one in entries]
    return check(hosts.model_copy(update={"machines": tuple(moved)}), task, options.trust, known=found)


def _without_absent(found: Sequence[Readiness], options: PrepareOptions) -> list[Readiness]:
    kept = [one for one in found if not isinstance(one.problem, _ABSENT)]
    if not kept:
        return list(found)
    for one in found:
        if one not in kept and one.problem is not None:
            options.tell(f"continuing without {one.link.name}: {one.problem.beside(one.link.name)}")
    return kept


# -------------------------------------------------------------------------------------------------- access, packages


def _let_in(found: list[Readiness], hosts: Hosts, task: str, options: PrepareOptions) -> list[Readiness]:
    """Let a person give the password of machines that would take our key with it."""
    locked = [
        one.link.machine for one in found if isinstance(one.problem, NoKeyAccepted) and one.problem.password_possible
    ]
    if not locked or options.let_in is None:
        return found
    options.let_in(hosts.model_copy(update={"machines": tuple(locked)}))
    return _again(found, hosts, task, options, {})


def _repair(found: list[Readiness], hosts: Hosts, task: str, options: PrepareOptions) -> list[Readiness]:
    """Give an environment to the machines that lack one, side by side."""
    lacking = [one for one in found if one.provisionable]
    if not lacking or not options.repair:
        return found

    def give(one: Readiness) -> MusterError | None:
        try:
            _provision(one.link, options)
        except MusterError as error:
            return error
        return None

    options.tell(f"installing packages into Muster's folder there: {_names([one.link.machine for one in lacking])}")
    with ThreadPoolExecutor(len(lacking)) as pool:
        problems = dict(zip([one.link.name for one in lacking], pool.map(give, lacking), strict=True))
    result = _again(found, hosts, task, options, {})
    for one in result:
        if (error := problems.get(one.link.name)) is not None:
            named = isinstance(error, SshError)
            one.problem = error if named else SshError(one.link.name, error.message, error.hint)
    return result


def _provision(link: Link, options: PrepareOptions) -> None:
    """Make the environment; a machine that cannot reach the package index gets the packages from here."""

    def say(line: str) -> None:
        options.tell(f"{link.name}: {line}")

    try:
        provision(link, say, offline_wheels=options.offline_wheels)
    except SshError as error:
        if options.offline_wheels or "--offline-wheels" not in error.hint:
            raise
        say("cannot download them: taking the packages from this machine")
        provision(link, say, offline_wheels=True)


def _names(entries: Sequence[Machine]) -> str:
    return ", ".join(entry.name for entry in entries)
