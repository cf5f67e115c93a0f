"""Machines this computer already knows: from ~/.ssh/config, known_hosts, hosts files, typed addresses, Muster's earlier
log-ins, and the peers of Tailscale and WireGuard.

The latter are queried with an ordinary user's rights; a program that is missing, fails or hangs contributes nothing.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from distributed.discovery.machine_identity import FoundMachine, host_label
from distributed.discovery.network_interfaces import Endpoint, Interfaces
from distributed.discovery.sightings import LONGEST_DETAIL, LONGEST_NAME, Problem, Sighting, SightingKey, SightingOrigin
from distributed.hosts.file import load_hosts, split_address, typed_machine
from distributed.hosts.joined import door_status, joined_machines
from distributed.hosts.past_logins import past_logins
from distributed.hosts.schema import HERE
from distributed.ssh.config import USER_CONFIG, ResolvedHost, SshTarget, config_lines, resolve
from distributed.ssh.keys.host_keys import Expected, KnownHosts, fingerprint, known_name
from distributed.ssh.wire import explain_name
from distributed.system import output
from profiles.errors import BadInput
from profiles.installation import program

USER_KNOWN_HOSTS = (Path("~/.ssh/known_hosts"), Path("~/.ssh/known_hosts2"), Path("/etc/ssh/ssh_known_hosts"))
_MOST_CANDIDATES = 256
_LOCAL_SUFFIXES = (".local", ".lan", ".home", ".home.arpa", ".internal", ".fritz.box", ".localdomain")
_CODE_HOST_USER = "git"
_PEERS_TIMEOUT = 2.0
_MOST_PEERS = 64
_WITH_SSH = ("linux", "macos", "freebsd", "")
"""Operating systems that may run an SSH server; phones are peers too."""
_TAILSCALE = ("tailscale", "/Applications/Tailscale.app/Contents/MacOS/Tailscale")


@dataclass(frozen=True)
class Sources:
    """Sources of known machines, besides the network."""

    typed: tuple[str, ...] = ()
    """``[user@]host[:port]``."""
    hosts_files: tuple[tuple[SightingOrigin, Path], ...] = ()
    """Hosts files, each with its origin: a hosts file, or that of a saved profile."""
    configurations: bool = False
    """Whether to evaluate an accepted SSH configuration that a hosts file names, which may run commands."""
    ssh_config: Path = USER_CONFIG
    known_hosts: tuple[Path, ...] = USER_KNOWN_HOSTS
    past_logins: bool = True
    """Whether to list the machines that have let Muster in before, or have joined."""
    peers: bool = True
    """Whether to query Tailscale and WireGuard for their peers."""


@dataclass(frozen=True)
class MachineCandidate:
    """A named machine that has not been looked up yet."""

    origin: SightingOrigin
    target: SshTarget
    file: str = ""
    """File that names it; entries of one name in two files are separate claims."""
    unread: bool = False
    """Whether the SSH configuration of its hosts file must not be evaluated."""
    address: str = ""
    """Literal address that it had at the last log-in, for a name that leads nowhere now."""

    @property
    def key(self) -> SightingKey:
        port = f":{self.target.port}" if self.target.port else ""
        return SightingKey(self.origin, f"{self.target.host}{port}", self.target.name.casefold(), "", self.file)


@dataclass(frozen=True)
class KnownKeys:
    """The contents of the known_hosts files."""

    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names by fingerprint."""
    hashed: int = 0
    """Number of entries with a hashed name: their key can be recognised, their name cannot be listed."""
    local: tuple[str, ...] = ()
    """Plain names that may be on the local network, ``host`` or ``[host]:port``."""


def candidates(sources: Sources, keys: KnownKeys) -> list[MachineCandidate]:
    """List the machines of all sources.

    Raises:
        BadInput: a hosts file cannot be used, or a typed text is not an address.
    """
    listed = [MachineCandidate(SightingOrigin.TYPED, SshTarget.of(typed_machine(text))) for text in sources.typed]
    for origin, path in sources.hosts_files:
        hosts = load_hosts(path)
        is_unread = bool(hosts.ssh_config) and not sources.configurations
        listed += [
            MachineCandidate(origin, SshTarget.of(machine, hosts), str(path), is_unread) for machine in hosts.machines
        ]
    config = sources.ssh_config
    config_file = "" if config == USER_CONFIG else str(config)
    configured = (SshTarget(name, name, config_file=config_file) for name in config_names(config.expanduser()))
    listed += [MachineCandidate(SightingOrigin.SSH_CONFIG, target) for target in configured]
    listed += joined_candidates(sources)
    for login in past_logins() if sources.past_logins else ():
        target = SshTarget(login.name, login.host, login.port, login.user, config_file=config_file)
        listed.append(MachineCandidate(SightingOrigin.PAST_LOGIN, target, address=login.address))
    if sources.peers:
        listed += _peers(config_file)
    for name in keys.local:
        address = split_address(name)
        target = SshTarget(address["name"], address["name"], address["port"], config_file=config_file)
        listed.append(MachineCandidate(SightingOrigin.KNOWN_HOSTS, target))
    return listed[:_MOST_CANDIDATES]


def joined_candidates(sources: Sources) -> list[MachineCandidate]:
    """List the machines that have joined this computer by now."""
    joined = joined_machines() if sources.past_logins else ()
    return [MachineCandidate(SightingOrigin.JOINED, SshTarget(m.address, m.address)) for m in joined]


def config_names(path: Path) -> list[str]:
    """Return the host names and aliases in an OpenSSH configuration and its includes, without patterns."""
    names = [
        word
        for _, words in config_lines(path)
        if words and words[0].lower() == "host"
        for word in words[1:]
        if not set("*?!") & set(word) and not word.startswith("-")
    ]
    return list(dict.fromkeys(names))[:_MOST_CANDIDATES]


def read_known_keys(paths: Iterable[Path]) -> KnownKeys:
    """Read known_hosts files; invalid lines are skipped, as OpenSSH does."""
    names: dict[str, dict[str, None]] = {}
    hashed, local = 0, {}
    for entry in KnownHosts.read(paths).entries:
        if entry.marker:
            continue
        is_hashed = entry.hosts.startswith("|")
        plain = [] if is_hashed else [name for name in entry.hosts.split(",") if name and not set("*?!") & set(name)]
        listed = [f"a hashed name ({entry.origin})"] if is_hashed else plain
        names.setdefault(fingerprint(entry.blob), {}).update(dict.fromkeys(listed))
        hashed += is_hashed
        local.update(dict.fromkeys(filter(_is_local, plain)))
    return KnownKeys({key: tuple(found) for key, found in names.items()}, hashed, tuple(local)[:_MOST_CANDIDATES])


def _is_local(name: str) -> bool:
    """Whether a name in known_hosts may be on the local network; servers on the Internet are not probed."""
    host = str(split_address(name)["name"])
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_private
    except ValueError:
        return "." not in host or host.lower().endswith(_LOCAL_SUFFIXES)


def look_up(candidate: MachineCandidate, interfaces: Interfaces) -> Sighting | None:
    """Resolve a candidate by ``ssh -G`` and the system's name service. May take seconds.

    Returns:
        ``None`` for a host that only takes git commands.
    """
    key, target = candidate.key, candidate.target
    if target.host in HERE and not target.port:
        return Sighting(key, target.name, endpoints=own_endpoints(interfaces))
    if candidate.unread:
        message = f"its SSH configuration {target.config_file} can run commands here, so a search does not read it"
        unread = Problem(
            "config_not_read", message, f"to log in there: {program('machines', 'access', '--hosts FILE')}"
        )
        return Sighting(key, target.name, problem=unread)
    try:
        host = resolve(target)
    except BadInput as error:
        bad = Problem("bad_config", error.message_for(target.name), error.hint)
        return Sighting(key, target.name, problem=bad)
    if host.user == _CODE_HOST_USER and candidate.origin is SightingOrigin.SSH_CONFIG:
        return None
    if host.joined:
        return _joined_sighting(key, target, host.joined)
    if host.jumps or host.proxy_command:
        through = host.jumps[-1].host if host.jumps else "its ProxyCommand"
        return Sighting(key, target.name, host.hostname, through=through)
    endpoints = _endpoints(host, interfaces)
    if not endpoints and candidate.address:
        endpoints = _endpoints(replace(host, hostname=candidate.address), interfaces)
    problem = None if endpoints else Problem("name_unknown", *explain_name(host))
    expected = host.known_hosts().expected(*host.known_names)
    return Sighting(key, target.name, host.hostname.rstrip("."), endpoints, problem=problem, expected=expected)


def _joined_sighting(key: SightingKey, target: SshTarget, name: str) -> Sighting:
    """Return a machine that has joined, with what it said of itself, and whether it is connected."""
    machine = next((machine for machine in joined_machines() if machine.name == name), None)
    said = (machine.system, machine.devices, str(machine.memory)) if machine is not None else ()
    details = tuple((label, text[:LONGEST_DETAIL]) for label, text in zip(("model", "devices", "memory"), said))
    status = door_status().get(name)
    is_connected, rests = status is not None, str(status.get("rests", "")) if isinstance(status, dict) else ""
    hint = "is it on? Start there: muster machines join"
    problem = None if is_connected else Problem("not_connected", "it has joined, but is not connected", hint)
    if rests:
        problem = Problem("rests", f"it rests: {rests}", "it is lent, and comes back by itself")
    return Sighting(key, target.name, target.host, details=details, problem=problem, is_connected=is_connected)


def with_expected(sighting: Sighting, expected: Callable[..., Expected]) -> Sighting:
    """Add the known host keys of the name that a machine announces; ``expected`` looks them up in known_hosts."""
    if sighting.key.origin is not SightingOrigin.BONJOUR or not sighting.host or not sighting.endpoints:
        return sighting
    host = sighting.host.rstrip(".")
    return replace(sighting, expected=expected(known_name(host, sighting.endpoints[0].port), known_name(host, 22)))


def locate(target: SshTarget, machines: Iterable[FoundMachine]) -> FoundMachine | None:
    """Return the machine whose host key is known under a target's name, whatever address it has now.

    Of several with that key, cloned from one image, return the one that has the target's name.

    Raises:
        BadInput: ~/.ssh/config has an error.
    """
    host = resolve(target)
    known_hosts = host.known_hosts()
    keys = {fingerprint(entry.blob) for name in host.known_names for entry in known_hosts.of(name)}
    matching = [machine for machine in machines if machine.fingerprint in keys]
    if len(matching) < 2:
        return next(iter(matching), None)
    target_labels = set(map(host_label, (target.name, target.host)))
    with_name = (machine for machine in matching if target_labels & set(map(host_label, machine.names)))
    return next(with_name, None)


def _endpoints(host: ResolvedHost, interfaces: Interfaces) -> tuple[Endpoint, ...]:
    try:
        resolved = socket.getaddrinfo(host.hostname, host.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    scoped = (f"{a[0]}%{a[3]}" if len(a) == 4 and a[3] and "%" not in str(a[0]) else str(a[0]) for *_, a in resolved)
    endpoints = (interfaces.endpoint_for(address, host.port) for address in scoped)
    return tuple(dict.fromkeys(endpoint for endpoint in endpoints if endpoint is not None))


def own_endpoints(interfaces: Interfaces) -> tuple[Endpoint, ...]:
    """Return the endpoints of this computer's own SSH server."""
    endpoints = [interfaces.endpoint_for(str(a.ip), 22) for interface in interfaces.all for a in interface.addresses]
    return tuple(endpoint for endpoint in endpoints if endpoint is not None)


# ----------------------------------------------------------------------------------------------------- private networks


def _peers(config_file: str) -> Iterator[MachineCandidate]:
    """Yield the peers of private networks, each with a literal address; may take seconds."""
    tailscale = _output_of(*_TAILSCALE, arguments=("status", "--json"))
    wireguard = _output_of("wg", arguments=("show", "all", "allowed-ips"))  # not "dump": that prints private keys
    peers = [(SightingOrigin.TAILSCALE, *peer) for peer in tailscale_peers(tailscale)]
    peers += [(SightingOrigin.WIREGUARD, *peer) for peer in wireguard_peers(wireguard)]
    for origin, name, address in peers[:_MOST_PEERS]:
        yield MachineCandidate(origin, SshTarget(name, address, config_file=config_file))


def tailscale_peers(status: str) -> Iterator[tuple[str, str]]:
    """Yield name and address of the peers in ``tailscale status --json``."""
    try:
        peers = json.loads(status)["Peer"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    for peer in peers:
        if isinstance(peer, dict) and str(peer.get("OS", "")).lower() in _WITH_SSH:
            addresses = peer.get("TailscaleIPs")
            address = next(filter(None, map(_literal, addresses if isinstance(addresses, list) else ())), "")
            name = str(peer.get("HostName") or address)[:LONGEST_NAME]
            if address:
                yield name, address


def wireguard_peers(table: str) -> Iterator[tuple[str, str]]:
    """Yield name and address of the peers in ``wg show all allowed-ips`` that are single machines, not networks."""
    for line in table.splitlines():
        for networks in line.split("\t")[2:3]:
            addresses = (text.rpartition("/") for text in networks.split() if text.endswith(("/32", "/128")))
            if address := next(filter(None, (_literal(host) for host, _, _ in addresses)), ""):
                yield address, address


def _literal(text: object) -> str:
    try:
        return str(ipaddress.ip_address(str(text)))
    except ValueError:
        return ""


def _output_of(*programs: str, arguments: tuple[str, ...]) -> str:
    """Return the output of the first of these programs that is installed; empty where none is, or it fails."""
    program = next(filter(None, map(shutil.which, programs)), None)
    return output(program, *arguments, timeout=_PEERS_TIMEOUT) if program else ""
