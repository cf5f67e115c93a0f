"""Continuous discovery for the set-up: machine rows, where it searches, and which saved machines are online."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from app.wizard.services.machines import Naming
from app.wizard.services.outside import Outside, Search
from app.wizard.state.records import DiscoveredMachines, Presence
from distributed.discovery.discovery import Sources, State, machines
from distributed.discovery.known_machines import locate
from distributed.discovery.machine_identity import FoundMachine
from distributed.discovery.sightings import Reachability, SightingOrigin
from distributed.hosts.file import Hosts, Machine, load_hosts, names_machines
from distributed.ssh.connection import SshTarget
from profiles.errors import MusterError
from profiles.installation import USUAL_HOSTS

NOTHING_AFTER = 5.0
"""Seconds without another machine after which advice is shown."""
ADVICE = (
    "add one as you would type it after ssh: user@host, or user@192.168.1.7",
    "on a Mac: turn on System Settings > General > Sharing > Remote Login; on Linux: start the SSH server",
    "guest Wi-Fi and some routers separate machines: use a cable or another network",
)
ANNOUNCE = "a Linux machine shows itself here while this runs on it: uvx --from muster-train muster machines announce"
_SHOWN, _MEET_EVERY = 4, 5.0
"""Number of neighbour addresses that are listed, and the seconds between two reads of the neighbour table."""
_AT_LEAST_EVERY = 1.0
_AT_MOST_EVERY = 0.15
_NOWHERE = Path("/dev/null")


class DiscoveryWatch:
    """Looks for machines until it is closed.

    Args:
        see: callback for new results, called from the watch's thread.
        saved: hosts files of saved profiles by profile name; their machines are looked for too.
        outside: source of the discovery, real or recorded.
        hosts_file: whose machines are looked for; default: the usual one, where it exists.
    """

    def __init__(
        self,
        see: Callable[[DiscoveredMachines], None],
        saved: Mapping[str, Path],
        outside: Outside,
        hosts_file: Path | None = None,
    ) -> None:
        self._see = see
        self._outside = outside
        self._begin = outside.now()
        self._saved = {name: (path, hosts) for name, path in saved.items() if (hosts := _hosts(path)) is not None}
        hosts_file = hosts_file or USUAL_HOSTS
        hosts = _hosts(hosts_file) if hosts_file.exists() or names_machines(hosts_file) else None
        self._hosts = [*([hosts] if hosts else []), *(hosts for _, hosts in self._saved.values())]
        self._files = (
            *([(SightingOrigin.HOSTS_FILE, hosts_file)] if hosts else []),
            *((SightingOrigin.PROFILE, path) for path, _ in self._saved.values()),
        )
        self._online: frozenset[tuple[str, tuple[str, ...]]] = frozenset()
        self._present: Mapping[str, tuple[Presence, ...]] = {}
        self._typed: dict[str, Search] = {}
        self._met: Sequence[str] = ()
        self._met_at = float("-inf")
        self._logins = outside.past_logins()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._browsing = outside.search(Sources(hosts_files=self._files, configurations=True))
        self._thread = threading.Thread(target=self._follow, name="discovery-watch", daemon=True)
        self._thread.start()

    def look_for(self, typed: Sequence[str]) -> None:
        """Search for exactly these ``[user@]host[:port]`` besides browsing; invalid addresses are ignored."""
        with self._lock:
            gone = [self._typed.pop(text) for text in self._typed.keys() - {*typed}]
            for text in typed if not self._closed.is_set() else ():
                if text not in self._typed:
                    with contextlib.suppress(MusterError):  # already listed; Access shows what is wrong with it
                        sources = Sources((text,), ssh_config=_NOWHERE, known_hosts=(), past_logins=False, peers=False)
                        self._typed[text] = self._outside.search(sources, browse=False)
        for discovery in gone:
            discovery.close()

    def close(self) -> None:
        """Stop the search. May be called twice."""
        self._closed.set()
        with self._lock:
            typed, self._typed = self._typed, {}
        for discovery in (self._browsing, *typed.values()):
            discovery.close()

    def _follow(self) -> None:
        version = 0
        while not self._closed.is_set():
            with self._lock:
                typed = dict(self._typed)
            self._see(self._sight(typed))
            version = self._browsing.wait(version, _AT_MOST_EVERY * 2 if typed else _AT_LEAST_EVERY)
            self._closed.wait(_AT_MOST_EVERY)

    def _sight(self, typed: Mapping[str, Search]) -> DiscoveredMachines:
        state = _together([self._browsing.state, *(discovery.state for discovery in typed.values())])
        discovered = machines(state)
        rows = Naming(typed, self._hosts, self._outside.this_computer, self._logins).rows(discovered)
        seconds = self._outside.now() - self._begin
        problems = tuple(f"{problem.message} ({problem.hint})" for problem in state.browsed.problems)
        alone = all(row.here for row in rows) and seconds > NOTHING_AFTER
        nothing_found = (*self._of_neighbours(typed), *ADVICE) if alone else ()
        searched, present = _searched(state, self._files), self._presence(discovered)
        return DiscoveredMachines(rows, searched, seconds, problems, nothing_found, present, self._outside.picks_all)

    def _of_neighbours(self, typed: Iterable[str]) -> tuple[str, ...]:
        """Return the addresses seen on these networks, but typed ones, and how a machine without Bonjour can announce
        itself."""
        if self._outside.now() - self._met_at > _MEET_EVERY:
            self._met, self._met_at = self._outside.neighbours(), self._outside.now()
        unlisted = [address for address in self._met if address not in typed]
        more = f" and {len(unlisted) - _SHOWN} more" if len(unlisted) > _SHOWN else ""
        met = f"{', '.join(unlisted[:_SHOWN])}{more}"
        ask = f"this computer has met {met} on its networks: press s to ask which of them accept SSH"
        return (*((ask,) if unlisted else ()), ANNOUNCE)

    def _presence(self, discovered: Sequence[FoundMachine]) -> Mapping[str, tuple[Presence, ...]]:
        """Return the presence of saved machines, recomputed only if the listed ones change: each costs ``ssh -G``."""
        online = [machine for machine in discovered if machine.status is Reachability.ONLINE]
        untried = [machine for machine in discovered if machine.status is Reachability.UNCHECKED]
        identities = frozenset((machine.id, machine.names) for machine in (*online, *untried))
        if identities != self._online:
            self._online = identities
            self._present = {
                name: tuple(
                    Presence(m.name, is_present(m, hosts, online, untried), not m.is_local) for m in hosts.machines
                )
                for name, (_, hosts) in self._saved.items()
            }
        return self._present


def is_present(
    machine: Machine, hosts: Hosts, online: Sequence[FoundMachine], untried: Sequence[FoundMachine] = ()
) -> bool | None:
    """Whether a saved machine is online; ``None`` if nobody has asked it yet."""
    if machine.is_local:
        return True
    with contextlib.suppress(MusterError):
        if locate(SshTarget.of(machine, hosts), online) is not None:
            return True
    return _is_named(machine, online) or (None if _is_named(machine, untried) else False)


def _is_named(machine: Machine, listed: Sequence[FoundMachine]) -> bool:
    names = {machine.name.casefold(), machine.host.casefold()}
    return any(names & {name.casefold() for name in one.names} for one in listed if not one.here)


def _together(states: Sequence[State]) -> State:
    """Merge the state of browsing (the first one) with those of the searches for typed machines."""
    browsing, *searches = states
    sightings, paths = dict(browsing.sightings), dict(browsing.paths)
    for search in searches:
        sightings.update({key: one for key, one in search.sightings.items() if key.origin is SightingOrigin.TYPED})
        for endpoint, path in search.paths.items():
            if endpoint not in paths or paths[endpoint].status is not Reachability.ONLINE:
                paths[endpoint] = path
    return replace(browsing, sightings=sightings, paths=paths)


def _searched(state: State, files: Iterable[tuple[SightingOrigin, Path]]) -> tuple[str, ...]:
    interfaces = ", ".join(state.browsed.interfaces) or "no interface with multicast"
    named = tuple(f"{path} ({origin.value})" for origin, path in files)
    return (f"Bonjour on {interfaces}", "~/.ssh/config, known hosts and private networks", *named)


def _hosts(path: Path) -> Hosts | None:
    with contextlib.suppress(MusterError):
        return load_hosts(path)
    return None
