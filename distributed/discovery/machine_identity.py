"""Derives the list of machines from a state of sightings.

A machine is identified by its SSH host key. Names, addresses and interfaces only lead to it: two names with one key are
one machine, and one name with two keys is two machines. Machines cloned from one disk image share a key; two entries of
one list, or two announced host names, stay two machines unless they share an address.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from distributed.discovery.network_interfaces import Endpoint
from distributed.discovery.sightings import (
    REMEMBERED,
    Problem,
    Reachability,
    Sighting,
    SightingKey,
    SightingOrigin,
    State,
)
from distributed.hosts.file import is_literal_address
from distributed.ssh.keys.host_keys import NEW_HOST_KEYS, Expected


@dataclass(frozen=True)
class FoundPath:
    """One path to a machine."""

    endpoint: Endpoint
    status: Reachability
    problem: Problem | None

    @property
    def online(self) -> bool:
        return self.status is Reachability.ONLINE


@dataclass(frozen=True)
class FoundMachine:
    """One machine, as shown to the user. Names and details come from the network: escape them for display."""

    id: str
    """Its host key's fingerprint; while that is unknown, an identifier that is unique in the state."""
    name: str
    names: tuple[str, ...]
    status: Reachability
    found_by: tuple[SightingOrigin, ...]
    paths: tuple[FoundPath, ...]
    """Paths, the best one first: answering ones, then by kind."""
    fingerprint: str = ""
    known_as: tuple[str, ...] = ()
    """Names under which its key is in known_hosts; empty: unknown, or known under hashed names only."""
    details: Mapping[str, str] = field(default_factory=dict)
    problem: Problem | None = None
    through: str = ""
    here: bool = False


_LISTS = frozenset((SightingOrigin.TYPED, SightingOrigin.HOSTS_FILE, SightingOrigin.PROFILE))
"""Origins that name each machine once; an SSH configuration may have an alias for each path to it."""
_ANNOUNCED, _OF_THIS_COMPUTER = ("announced",), ("here",)


@dataclass
class _Bucket:
    """Sightings and endpoints that belong to one machine, while the list is built."""

    sightings: list[Sighting] = field(default_factory=list)
    endpoints: set[Endpoint] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """All its names, host names without their domain."""
        return {host_label(text) for s in self.sightings for text in (s.name, s.host) if text}

    def contradicts(self, candidate: _Bucket) -> bool:
        """Whether two buckets with one key are different machines: one list names both, or they announce two hosts."""
        claims, other_claims = self._claims(), candidate._claims()
        if any(claims[origin].isdisjoint(other_claims[origin]) for origin in claims.keys() & other_claims.keys()):
            return True
        claimant = _OF_THIS_COMPUTER
        listed = bool((claims.keys() | other_claims.keys()) - {claimant, _ANNOUNCED})
        return (claimant in claims) != (claimant in other_claims) and listed and self.names.isdisjoint(candidate.names)

    def _claims(self) -> dict[tuple[str, ...], set[str]]:
        """Return names by claimant; different names by the same claimant are different machines."""
        claims: dict[tuple[str, ...], set[str]] = {}
        for sighting in self.sightings:
            origin = sighting.key.origin
            if origin in _LISTS:
                claims.setdefault((origin.value, sighting.key.source), set()).add(sighting.key.name)
            if origin in (SightingOrigin.BONJOUR, SightingOrigin.HERE) and sighting.host:
                claims.setdefault(_ANNOUNCED, set()).add(host_label(sighting.host))
            if origin is SightingOrigin.HERE:
                claims[_OF_THIS_COMPUTER] = {"here"}
        return claims


def host_label(name: str) -> str:
    """Return a host name without its domain, so that it is the same on all networks; addresses are unchanged."""
    label = name.casefold().partition(".")[0]
    return name.casefold() if label.isdecimal() or ":" in name else label


def machines(state: State) -> tuple[FoundMachine, ...]:
    """Return the machines of a state: this computer, then those that answer, then the others, by name."""
    listed = []
    for machine in _identified_machines(state):
        only_remembered = set(machine.found_by) <= REMEMBERED
        if not only_remembered or machine.status in (Reachability.ONLINE, Reachability.OTHER_KEY):
            listed.append(machine)
    return tuple(sorted(listed, key=lambda m: (not m.here, m.status is Reachability.OFFLINE, m.name.casefold(), m.id)))


def _identified_machines(state: State) -> Iterator[FoundMachine]:
    grouped = _buckets(state)
    for (identity, refuted), buckets in grouped.items():
        if refuted:
            buckets = [bucket for bucket in buckets if not _has_moved(bucket, grouped)]
        twins = [_machine(identity, refuted, bucket, state) for bucket in buckets]
        for number, machine in enumerate(twins):
            others = [twin.name for twin in twins if twin is not machine]
            identifier = f"{machine.id}#{number}" if number else machine.id
            yield replace(machine, id=identifier, problem=machine.problem or (_same_key(others) if others else None))


def _has_moved(bucket: _Bucket, grouped: Mapping[tuple[str, bool], list[_Bucket]]) -> bool:
    """Whether another machine answers at the address of earlier log-ins, while theirs is listed at its new one."""
    return all(
        sighting.key.origin is SightingOrigin.PAST_LOGIN
        and any((fingerprint, False) in grouped for _, fingerprint in sighting.expected.keys)
        for sighting in bucket.sightings
    )


def _same_key(others: list[str]) -> Problem:
    message = (
        f"shows the same host key as {', '.join(others[:3])}: cloned from one image, or one machine with two names"
    )
    return Problem("same_host_key", message, f"on a clone: {NEW_HOST_KEYS}")


def _buckets(state: State) -> dict[tuple[str, bool], list[_Bucket]]:
    """Return the buckets by identity and whether that contradicts the key known under the machine's name."""
    buckets: dict[tuple[str, bool], list[_Bucket]] = {}
    for group in sorted(_groups(_with_announced_addresses(state)), key=lambda group: min(map(_precedence, group))):
        for identity, bucket in _identified(group, state).items():
            candidates = buckets.setdefault(identity, [])
            compatible = [other for other in candidates if not other.contradicts(bucket)]
            match = next((other for other in compatible if other.names & bucket.names), next(iter(compatible), None))
            if match is None:
                candidates.append(bucket)
            else:
                match.sightings += bucket.sightings
                match.endpoints |= bucket.endpoints
    return buckets


def _precedence(sighting: Sighting) -> tuple[int, SightingKey]:
    return sighting.key.origin.rank, sighting.key


def _identified(group: list[Sighting], state: State) -> dict[tuple[str, bool], _Bucket]:
    """Split a group that shares endpoints by the host keys shown there."""
    buckets: dict[tuple[str, bool], _Bucket] = {}
    keys = {state.paths[e].fingerprint for s in group for e in s.endpoints} - {""}
    provisional_identity = _provisional(min(sighting.key for sighting in group))
    for sighting in group:
        shown_identities = {state.paths[e].fingerprint for e in sighting.endpoints} - {""}
        claimed = shown_identities or (keys if len(keys) == 1 else set())
        for identity in claimed or {_provisional(sighting.key) if keys else provisional_identity}:
            endpoints = {
                e for e in sighting.endpoints
                if state.paths[e].fingerprint == identity or (not state.paths[e].fingerprint and len(claimed) < 2)
            }  # fmt: skip
            shown_keys = [state.paths[endpoint].keys for endpoint in endpoints if state.paths[endpoint].fingerprint]
            refuted = any(
                sighting.expected.refutes(keys) for keys in shown_keys
            )  # not the machine that is known under this name
            bucket = buckets.setdefault((identity, refuted), _Bucket())
            bucket.sightings.append(sighting)
            bucket.endpoints |= endpoints
    return buckets


def expected_at(state: State) -> dict[Endpoint, list[Expected]]:
    """Return the known keys expected at each endpoint, from the names that lead there."""
    expected_by_endpoint: dict[Endpoint, list[Expected]] = {}
    for sighting in _with_announced_addresses(state):
        for endpoint in sighting.endpoints if sighting.expected.keys else ():
            expected_by_endpoint.setdefault(endpoint, []).append(sighting.expected)
    return expected_by_endpoint


def _provisional(key: SightingKey) -> str:
    return "unidentified:" + "|".join([key.origin.value, *key[1:]])


def _with_announced_addresses(state: State) -> list[Sighting]:
    """Add announced addresses to entries whose ``.local`` name the system cannot resolve."""
    announced: dict[str, list[Endpoint]] = {}
    for sighting in state.sightings.values():
        if sighting.key.origin is SightingOrigin.BONJOUR:
            announced.setdefault(sighting.host.casefold(), []).extend(sighting.endpoints)
    result = []
    for sighting in state.sightings.values():
        if not sighting.endpoints and not sighting.through and sighting.host:
            sighting = replace(sighting, endpoints=tuple(dict.fromkeys(announced.get(sighting.host.casefold(), ()))))
        result.append(sighting)
    return result


def _groups(sightings: list[Sighting]) -> list[list[Sighting]]:
    """Group sightings that share an endpoint, directly or transitively (union-find)."""
    parent = list(range(len(sightings)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    first_by_endpoint: dict[Endpoint, int] = {}
    for number, sighting in enumerate(sightings):
        for endpoint in sighting.endpoints:
            parent[root(number)] = root(first_by_endpoint.setdefault(endpoint, number))
    groups: dict[int, list[Sighting]] = {}
    for number, sighting in enumerate(sightings):
        groups.setdefault(root(number), []).append(sighting)
    return list(groups.values())


def _machine(identity: str, refuted: bool, bucket: _Bucket, state: State) -> FoundMachine:
    sightings = sorted(bucket.sightings, key=lambda s: (s.key.origin.rank, s.name.casefold(), s.key))
    paths = tuple(sorted(
        (FoundPath(e, state.paths[e].status, state.paths[e].problem) for e in bucket.endpoints),
        key=lambda p: (
            p.status is not Reachability.ONLINE, p.endpoint.kind.rank, ":" in p.endpoint.address, p.endpoint
        ),
    ))  # fmt: skip
    details = {key: value for s in reversed(sightings) for key, value in s.details if value}
    is_local = sightings[0].key.origin is SightingOrigin.HERE
    status = Reachability.ONLINE if is_local else _status(sightings, paths)
    identity = f"other key:{identity}" if refuted else identity
    if refuted and status is Reachability.ONLINE:
        status = Reachability.OTHER_KEY
    shown_fingerprint = next((state.paths[e].fingerprint for e in bucket.endpoints if state.paths[e].fingerprint), "")
    known_names = sorted({name for e in bucket.endpoints for name in state.paths[e].known_as})
    has_problem = status in (Reachability.OFFLINE, Reachability.UNCHECKED)
    problem = _problem(sightings, paths, state) if has_problem else None
    return FoundMachine(
        id=identity,
        name=_name(sightings, known_names),
        names=tuple(dict.fromkeys(text for s in sightings for text in (s.name, s.host) if text)),
        status=status,
        found_by=tuple(dict.fromkeys(s.key.origin for s in sightings)),
        paths=paths,
        fingerprint=shown_fingerprint,
        known_as=tuple(known_names),
        details=details,
        problem=_other_key(sightings, shown_fingerprint) if status is Reachability.OTHER_KEY else problem,
        through=next((s.through for s in sightings if s.through), "") if not paths else "",
        here=is_local,
    )


def _name(sightings: list[Sighting], known_as: list[str]) -> str:
    """Return the name of a machine: a real name takes precedence over an address, even a typed one."""
    names = [*(sighting.name for sighting in sightings), *(name for name in known_as if not set("[ (") & set(name))]
    return next((name for name in names if not is_literal_address(name)), names[0])


def _status(sightings: list[Sighting], paths: tuple[FoundPath, ...]) -> Reachability:
    connected = [sighting.is_connected for sighting in sightings if sighting.is_connected is not None]
    if connected:
        return Reachability.ONLINE if any(connected) else Reachability.OFFLINE
    seen = {path.status for path in paths}
    for status in (Reachability.ONLINE, Reachability.CHECKING):
        if status in seen:
            return status
    if not paths and any(sighting.through or _is_untried(sighting) for sighting in sightings):
        return Reachability.UNCHECKED
    return Reachability.OFFLINE if paths or any(sighting.problem for sighting in sightings) else Reachability.CHECKING


def _is_untried(sighting: Sighting) -> bool:
    """Whether nobody asked the machine, as the configuration that says how was not read."""
    return sighting.problem is not None and sighting.problem.cause in ("config_not_read", "bad_config")


def _other_key(sightings: list[Sighting], shown: str) -> Problem:
    name = next(sighting.expected.name for sighting in sightings if sighting.expected.name)
    hint = (
        f"another machine answers there, or it was reinstalled; in that case compare the fingerprint on the machine, "
        f"then: {shlex.join(['ssh-keygen', '-R', name])}"
    )
    return Problem("host_key_changed", f"its host key {shown} does not match the one known for {name}", hint)


_BY_RELEVANCE = ("local_network_permission", "firewall", "port_closed", "not_ssh", "stalled", "dropped", "timeout")


def _problem(sightings: list[Sighting], paths: tuple[FoundPath, ...], state: State) -> Problem | None:
    """Return the most informative problem: of a path that has worked first, then by cause."""
    order = {cause: number for number, cause in enumerate(_BY_RELEVANCE)}
    ranked = [
        (not state.paths[path.endpoint].fingerprint, order.get(path.problem.cause, len(order)), number, path.problem)
        for number, path in enumerate(paths)
        if path.problem
    ]
    return min(ranked)[-1] if ranked else next((s.problem for s in sightings if s.problem), None)
