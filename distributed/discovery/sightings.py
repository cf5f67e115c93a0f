"""Observations of machines as data, and the state that :func:`apply` folds them into.

Pure functions, without network or clock::

    state = apply(state, observation)      # for every observation, in order
    for machine in machines(state): ...    # distributed.discovery.machine_identity: the list shown to the user
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from distributed.discovery.network_interfaces import Endpoint
from distributed.ssh.keys.host_keys import Expected, Keys

MOST_SIGHTINGS = 512
"""Maximum stored sightings of announced machines; further ones are counted, not stored."""
MOST_PER_SOURCE = 32
MOST_ENDPOINTS = 16
LONGEST_NAME = 120
LONGEST_DETAIL = 80


class SightingOrigin(str, Enum):
    """The source of a sighting; the order decides which name of a machine is shown."""

    HERE = "this computer"
    TYPED = "typed"
    HOSTS_FILE = "hosts file"
    PROFILE = "profile"
    SSH_CONFIG = "ssh config"
    JOINED = "joined"
    BONJOUR = "Bonjour"
    PAST_LOGIN = "used before"
    TAILSCALE = "Tailscale"
    WIREGUARD = "WireGuard"
    KNOWN_HOSTS = "known hosts"

    @property
    def rank(self) -> int:
        return list(SightingOrigin).index(self)


REMEMBERED = frozenset(
    (SightingOrigin.PAST_LOGIN, SightingOrigin.TAILSCALE, SightingOrigin.WIREGUARD, SightingOrigin.KNOWN_HOSTS)
)
"""Origins of machines that the user has not asked for: listed only while they answer."""


class Reachability(str, Enum):
    CHECKING = "checking"
    ONLINE = "online"
    OFFLINE = "offline"
    OTHER_KEY = "key does not match the known one"
    """Another machine answers under the name of a known one."""
    UNCHECKED = "not tried yet"
    """It was not asked: it is reached through another machine, where a login would be needed first, or its SSH
    configuration is not approved or has an error."""


@dataclass(frozen=True)
class Problem:
    """A problem and what to do about it, in one line each."""

    cause: str
    """Stable identifier for programs."""
    message: str
    hint: str = ""


class SightingKey(NamedTuple):
    """Identity of a claim; claims of the same name differ in their source and interface."""

    origin: SightingOrigin
    service: str
    name: str
    interface: str = ""
    source: str = ""


@dataclass(frozen=True)
class Sighting:
    """One claim that a machine exists: an announcement, or an entry of a file. Its text is untrusted."""

    key: SightingKey
    name: str
    host: str = ""
    """Its host name, ``studio.local``."""
    endpoints: tuple[Endpoint, ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    """``model``, ``devices``, ``memory``, ``version``; for display only."""
    problem: Problem | None = None
    """Why it has no endpoints."""
    through: str = ""
    """The machine through which it is reached; empty: directly."""
    expected: Expected = Expected()
    """The host keys known under its name."""
    is_connected: bool | None = None
    """Whether it holds a connection to this computer; ``None``: it is a machine that is dialled."""


@dataclass(frozen=True)
class PathState:
    """The state of one endpoint."""

    status: Reachability = Reachability.CHECKING
    fingerprint: str = ""
    """Fingerprint of the last host key; kept while it is offline."""
    keys: Keys = ()
    """All host keys that it has shown."""
    known_as: tuple[str, ...] = ()
    """Names under which known_hosts has this key."""
    problem: Problem | None = None


# ----------------------------------------------------------------------------------------------------- observations


@dataclass(frozen=True)
class Withdrawn:
    key: SightingKey


@dataclass(frozen=True)
class Identified:
    """The endpoint has shown a host key in a key exchange."""

    endpoint: Endpoint
    fingerprint: str
    known_as: tuple[str, ...] = ()
    keys: Keys = ()


@dataclass(frozen=True)
class Failed:
    """The endpoint cannot be used."""

    endpoint: Endpoint
    problem: Problem


@dataclass(frozen=True)
class Ignored:
    """Announcements that were ignored because there were too many."""

    source: str
    count: int = 1


@dataclass(frozen=True)
class Browsed:
    """The interfaces that are browsed, and the problems of others."""

    interfaces: tuple[str, ...]
    problems: tuple[Problem, ...] = ()


Observation = Sighting | Withdrawn | Identified | Failed | Ignored | Browsed


@dataclass(frozen=True)
class State:
    """All observations so far."""

    sightings: Mapping[SightingKey, Sighting] = field(default_factory=dict)
    paths: Mapping[Endpoint, PathState] = field(default_factory=dict)
    browsed: Browsed = Browsed(())
    ignored: int = 0
    ignored_from: str = ""
    """The last source that exceeded the limits."""


def apply(state: State, observation: Observation) -> State:
    """Return the state after one observation. Memory is bounded whatever is observed."""
    if isinstance(observation, Sighting):
        return _sighted(state, _bounded(observation))
    if isinstance(observation, Withdrawn):
        remaining = {key: sighting for key, sighting in state.sightings.items() if key != observation.key}
        return _without_unreferenced(replace(state, sightings=remaining))
    if isinstance(observation, Ignored):
        return replace(state, ignored=state.ignored + observation.count, ignored_from=observation.source)
    if isinstance(observation, Browsed):
        return replace(state, browsed=observation)
    before = state.paths.get(observation.endpoint)
    if before is None:  # forgotten while it was probed
        return state
    if isinstance(observation, Failed):
        after = replace(before, status=Reachability.OFFLINE, problem=observation.problem)
    else:
        after = PathState(Reachability.ONLINE, observation.fingerprint, observation.keys, observation.known_as)
    return state if after == before else replace(state, paths={**state.paths, observation.endpoint: after})


def _bounded(sighting: Sighting) -> Sighting:
    details = tuple((key[:LONGEST_DETAIL], value[:LONGEST_DETAIL]) for key, value in sighting.details[:8])
    return replace(
        sighting,
        name=sighting.name[:LONGEST_NAME],
        host=sighting.host[:LONGEST_NAME],
        endpoints=tuple(dict.fromkeys(sighting.endpoints))[:MOST_ENDPOINTS],
        details=details,
    )


def _sighted(state: State, sighting: Sighting) -> State:
    key = sighting.key
    if state.sightings.get(key) == sighting:
        return state
    if key not in state.sightings and key.origin is SightingOrigin.BONJOUR:
        announced = [other for other in state.sightings if other.origin is SightingOrigin.BONJOUR]
        speaker = (key.interface, key.source)
        if sum((other.interface, other.source) == speaker for other in announced) >= MOST_PER_SOURCE:
            return apply(state, Ignored(key.source))
        if len(announced) >= MOST_SIGHTINGS:
            unreachable = next((other for other in announced if _never_answered(state, other)), None)
            if unreachable is None:
                return apply(state, Ignored(key.source))
            state = apply(apply(state, Withdrawn(unreachable)), Ignored(unreachable.source))
    paths = dict(state.paths)
    for endpoint in sighting.endpoints:
        paths.setdefault(endpoint, PathState())
    return _without_unreferenced(replace(state, sightings={**state.sightings, key: sighting}, paths=paths))


def _never_answered(state: State, key: SightingKey) -> bool:
    """Whether a sighting may be replaced by another one: all its paths were tried, and none has ever worked."""
    paths = [state.paths[endpoint] for endpoint in state.sightings[key].endpoints]
    return all(path.status is Reachability.OFFLINE and not path.fingerprint for path in paths)


def _without_unreferenced(state: State) -> State:
    referenced = {endpoint for sighting in state.sightings.values() for endpoint in sighting.endpoints}
    if len(referenced) == len(state.paths):
        return state
    return replace(state, paths={endpoint: path for endpoint, path in state.paths.items() if endpoint in referenced})
