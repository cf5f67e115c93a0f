"""Resolves where a machine is and how to log in there as OpenSSH does, with ``ssh -G``.

So the user's whole ~/.ssh/config applies: Include, Match, ProxyJump, IdentityAgent and any future option.

``ssh -G`` runs the commands of a configuration (``Match exec``), and a connection runs more of them. The user's own
~/.ssh/config is trusted; a hosts file may name another one, and may come from another person. Such a configuration is
used only after :func:`accept`, or where exactly its content was accepted before.
"""

from __future__ import annotations

import getpass
import glob
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.hosts.approvals import approve, digest_of, has_changed, is_approved
from distributed.hosts.file import split_address
from distributed.hosts.joined import is_joined, joined_name, known_hosts_file, pool_key
from distributed.hosts.schema import Hosts, Machine
from distributed.ssh.keys.host_keys import KnownHosts, in_home, known_name, read_lines, split_paths
from profiles.errors import BadInput
from profiles.installation import program as command
from profiles.quantities import span_text

USER_CONFIG = Path("~/.ssh/config")
OWN_KEY = "~/.ssh/muster_ed25519"
"""Muster's own key, created by :func:`distributed.ssh.access.install_key`; tried early: servers allow few attempts."""
_JOINED_TIMEOUT = 25.0
"""Seconds to connect to a machine that has joined: where its line was lost, it dials again within 15 s."""
_TIMEOUT = 15.0
"""Seconds for ``ssh -G``; a ``Match exec`` of the user may be slow."""
_MOST_FILES = 256
_COMMANDS = ("proxycommand", "localcommand", "knownhostscommand", "pkcs11provider", "securitykeyprovider")
"""Settings that start a program or load a library; so does ``Match`` with ``exec``."""

_accepted: set[str] = set()
"""Configurations accepted for the rest of this process."""


@dataclass(frozen=True)
class SshTarget:
    """A machine as named by the user; empty fields are taken from ~/.ssh/config."""

    name: str
    """Name in messages."""
    host: str
    """Destination as typed after ``ssh``."""
    port: int | None = None
    user: str = ""
    key: str = ""
    """Private key file, tried first."""
    config_file: str = ""
    """OpenSSH client configuration instead of ~/.ssh/config."""
    from_hosts_file: bool = False
    """Whether a hosts file names the configuration, so that it must be accepted before it is read."""
    found_at: str = ""
    """Literal address to connect to; all other settings, and the name of its host key, remain those of ``host``."""

    @classmethod
    def of(cls, machine: Machine, hosts: Hosts | None = None) -> SshTarget:
        """Return the target of a machine of the hosts file."""
        config = hosts.ssh_config if hosts else ""
        login = machine.name, machine.host, machine.port, machine.user, machine.key
        return cls(*login, config, from_hosts_file=bool(config), found_at=machine.found_at)


@dataclass(frozen=True)
class ResolvedHost:
    """A target with all settings resolved."""

    machine: str
    hostname: str
    port: int
    user: str
    user_is_guess: bool = False
    """Whether no user is configured, so that it is the user of this machine."""
    key_files: tuple[Path, ...] = ()
    named_key: Path | None = None
    """The key file that the hosts file names."""
    certificate_files: tuple[Path, ...] = ()
    identities_only: bool = False
    agent_socket: str = ""
    host_key_alias: str = ""
    user_known_hosts: tuple[Path, ...] = ()
    system_known_hosts: tuple[Path, ...] = ()
    known_hosts_command: tuple[str, ...] = ()
    """The user's program that prints known_hosts lines, with all tokens expanded except those about the key."""
    revoked_keys: Path | None = None
    """File of revoked host keys (RevokedHostKeys)."""
    hash_known_hosts: bool = False
    accepts_new_keys: bool = False
    """Whether unknown host keys are accepted (StrictHostKeyChecking)."""
    trusts_loopback: bool = False
    """Whether any host key is accepted on loopback (NoHostAuthenticationForLocalhost)."""
    jumps: tuple[SshTarget, ...] = ()
    """Jump hosts, in order."""
    address_family: str = "any"
    """Which addresses of the machine to use: ``inet``, ``inet6`` or ``any``."""
    bind_address: str = ""
    """Address of this computer to connect from; empty: any."""
    connect_timeout: float = 0.0
    """Configured connect timeout in seconds; 0: none."""
    proxy_command: str = ""
    """The user's command that makes the connection, expanded."""
    proxy_passes_stream: bool = False
    """Whether the command passes an open connection instead of carrying the bytes (ProxyUseFdpass)."""
    note: str = ""
    """Advice for the user if the connection fails."""
    typed: Sequence[str] = ()
    """The ``ssh`` command that logs in as Muster does, for display."""
    joined: str = ""
    """Name of a machine that has joined: it dials this computer, and is an SSH server on that connection."""

    @property
    def is_dialled(self) -> bool:
        """Whether it is connected to directly, at an address of its own."""
        return not (self.jumps or self.proxy_command or self.joined)

    @property
    def host_port(self) -> str:
        """``host``, or ``host:port`` where the port is not that of SSH, with an IPv6 address in brackets."""
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return self.hostname if self.port == 22 else f"{host}:{self.port}"

    @property
    def known_names(self) -> tuple[str, str]:
        """Names under which its key may be known; for ``[host]:port`` OpenSSH also accepts the key of ``host``."""
        host, alias = self.hostname, self.host_key_alias
        return known_name(host, self.port, alias), known_name(host, 22, alias)

    def known_hosts(self) -> KnownHosts:
        """Read the known_hosts files that apply to it."""
        return KnownHosts.read((*self.user_known_hosts, *self.system_known_hosts))


def resolve(target: SshTarget) -> ResolvedHost:
    """Resolve a target with ``ssh -G``; without an ``ssh`` command OpenSSH's defaults are used.

    Raises:
        BadInput: the configuration has an error or was not accepted, or the target is no host name.
    """
    if not target.host or target.host.startswith("-") or target.user.startswith("-"):
        raise BadInput(
            f"'{target.host}' is not a host name", "name it as you would after ssh: user@host", machine=target.name
        )
    if (name := joined_name(target.host)) and is_joined(name):
        return _joined_host(target, name)
    program = shutil.which("ssh")
    if target.from_hosts_file and not accepted(target.config_file):
        problem = f"the SSH configuration {_absolute(target.config_file)} of its hosts file is not approved"
        approve_it = command("machines", "access", "--hosts FILE")
        hint = f"it can run commands here: read it, then approve it at Access in the set-up, or with: {approve_it}"
        raise BadInput(problem, hint, machine=target.name)
    resolved = _decide(target, _ask(program, target) if program else _defaults(target))
    if name and resolved.hostname.casefold() == target.host.casefold():  # ~/.ssh/config does not have it, either
        return _joined_host(target, name)
    if target.found_at:  # dialled there; its key remains known under its name
        resolved = replace(resolved, hostname=target.found_at, host_key_alias=resolved.known_names[0])
    config = Path(target.config_file or USER_CONFIG).expanduser()
    if program is None and config.exists():
        note = f"the ssh command is missing, so {config} was not read: install openssh-client"
        resolved = replace(resolved, note=note)
    return resolved


def _joined_host(target: SshTarget, name: str) -> ResolvedHost:
    """Return a machine that has joined: neither ~/.ssh/config nor the user's own keys have a part in it."""
    return ResolvedHost(
        *(target.name, target.host.casefold(), 22, target.user or name),
        key_files=(pool_key(),),
        named_key=pool_key(),
        identities_only=True,
        user_known_hosts=(known_hosts_file(),),
        connect_timeout=_JOINED_TIMEOUT,
        joined=name,
    )


def _ask(program: str, target: SshTarget) -> dict[str, list[str]]:
    """Return the output of ``ssh -G``: values by lower-case key."""
    command = [program, "-G"]
    command += ["-F", os.path.expanduser(target.config_file)] if target.config_file else []
    command += ["-p", str(target.port)] if target.port else []
    command += ["-l", target.user] if target.user else []
    try:
        result = subprocess.run(
            [*command, "--", target.host],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        problem = f"no answer from ssh -G {target.host} in {span_text(_TIMEOUT)}"
        config = target.config_file or USER_CONFIG
        hint = f"this computer is very busy, or a Match exec in {config} hangs; try it: ssh -G {target.host}"
        raise BadInput(problem, hint, machine=target.name) from None
    if result.returncode != 0:
        problem = " ".join(result.stderr.split()) or f"ssh -G ended with {result.returncode}"
        raise BadInput(problem, f"try it yourself: ssh -G {target.host}", machine=target.name)
    options: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value.strip())
    return options


def _defaults(target: SshTarget) -> dict[str, list[str]]:
    """Return the output of ``ssh -G`` on a machine without configuration."""
    return {
        "hostname": [target.host],
        "port": [str(target.port or 22)],
        "user": [target.user or getpass.getuser()],
        "identityfile": [f"~/.ssh/{name}" for name in ("id_ed25519", "id_ecdsa", "id_rsa")],
        "userknownhostsfile": ["~/.ssh/known_hosts ~/.ssh/known_hosts2"],
        "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"],
    }


def _decide(target: SshTarget, options: Mapping[str, list[str]]) -> ResolvedHost:
    def setting(key: str, default: str = "") -> str:
        value = options.get(key, [default])[0]
        return default if value.lower() == "none" else value

    def expand(text: str) -> str:
        return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)

    def path(text: str) -> Path:
        expanded = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], ""), expand(text))
        return Path(expanded.strip('"')).expanduser()

    hostname, port, user = setting("hostname", target.host), int(setting("port", "22")), setting("user")
    tokens = _tokens(target.host, hostname, port, user)
    deferred_tokens = {**tokens, "%": "%%"}  # expanded once the key is known
    command = (
        re.sub(r"%(.)", lambda m: deferred_tokens.get(m[1], m[0]), word)
        for word in _words(setting("knownhostscommand"))
    )
    explicit = [Path(key).expanduser() for key in (target.key, OWN_KEY) if key]
    configured = [path(value) for value in options.get("identityfile", []) if value.lower() != "none"]
    return ResolvedHost(
        machine=target.name,
        hostname=hostname,
        port=port,
        user=user,
        user_is_guess=not target.user and user == getpass.getuser(),
        key_files=tuple(dict.fromkeys([*explicit, *configured])),
        named_key=Path(target.key).expanduser() if target.key else None,
        certificate_files=tuple(path(value) for value in options.get("certificatefile", []) if value != "none"),
        identities_only=setting("identitiesonly", "no") == "yes",
        agent_socket=_agent_socket(options.get("identityagent", ["SSH_AUTH_SOCK"])[0], path),
        host_key_alias=setting("hostkeyalias"),
        user_known_hosts=in_home(map(path, split_paths(setting("userknownhostsfile")))),
        system_known_hosts=tuple(map(path, split_paths(setting("globalknownhostsfile")))),
        known_hosts_command=tuple(command),
        revoked_keys=path(revoked) if (revoked := setting("revokedhostkeys")) else None,
        hash_known_hosts=setting("hashknownhosts", "no") == "yes",
        accepts_new_keys=setting("stricthostkeychecking") in ("accept-new", "false", "no", "off"),
        trusts_loopback=setting("nohostauthenticationforlocalhost", "no") == "yes",
        jumps=parse_jumps(setting("proxyjump"), target),
        address_family=setting("addressfamily", "any"),
        bind_address=setting("bindaddress"),
        connect_timeout=float(setting("connecttimeout", "0")),
        proxy_command=expand(setting("proxycommand")),
        proxy_passes_stream=setting("proxyusefdpass", "no") == "yes",
    )


def _tokens(typed: str, hostname: str, port: int, user: str) -> dict[str, str]:
    own_hostname = socket.gethostname()
    return {
        "%": "%", "d": str(Path.home()), "h": hostname, "i": str(os.getuid()), "k": typed,
        "L": own_hostname.partition(".")[0], "l": own_hostname,
        "n": typed, "p": str(port), "r": user, "u": getpass.getuser(),
    }  # fmt: skip


def _agent_socket(value: str, path: Callable[[str], Path]) -> str:
    if value.lower() == "none":
        return ""
    if value == "SSH_AUTH_SOCK" or value.startswith("$"):
        return os.environ.get(value.removeprefix("$").strip("{}"), "")
    return str(path(value))


def parse_jumps(text: str, target: SshTarget) -> tuple[SshTarget, ...]:
    """Parse a ProxyJump list: ``[user@]host[:port]`` or ``ssh://[user@]host[:port]``, by comma."""
    jumps = []
    for jump in filter(None, map(str.strip, text.split(","))):
        address = split_address(jump.removeprefix("ssh://").rstrip("/"))
        name = f"{target.name} (through {address['name']})"
        user, port = address["user"] or "", address["port"]
        jumps.append(SshTarget(name, address["name"], port, user, "", target.config_file, target.from_hosts_file))
    return tuple(jumps)


# ------------------------------------------------------------------------------------------------ configuration files


def config_lines(path: Path, read: set[Path] | None = None) -> Iterator[tuple[Path, list[str]]]:
    """Yield the lines of a configuration and of all its includes, split into words, each with its file.

    Every file is first yielded once without words, even if it is empty or unreadable. ``read``: files to skip.
    """
    read = set() if read is None else read
    if path in read or len(read) >= _MOST_FILES:
        return
    read.add(path)
    yield path, []
    for line in read_lines(path):
        words = _words(line)
        if not words:
            continue
        yield path, words
        if words[0].lower() == "include":
            for pattern in words[1:]:
                base = Path("~/.ssh").expanduser()
                for name in sorted(glob.glob(str(base / Path(os.path.expandvars(pattern)).expanduser()))):
                    yield from config_lines(Path(name), read)


def _words(line: str) -> list[str]:
    """Split ``Key value value`` or ``Key=value`` into words, with quoting."""
    try:
        words = shlex.split(line, comments=True, posix=True)
    except ValueError:
        words = line.split()
    if words and "=" in words[0]:
        key, _, value = words[0].partition("=")
        words = [key, *([value] if value else []), *words[1:]]
    elif len(words) > 1 and words[1] == "=":
        del words[1]
    return words


def commands_in(config: str) -> list[str]:
    """Return the lines of a configuration that can run a program, with their files."""
    commands = []
    for path, words in config_lines(_absolute(config)):
        key = words[0].lower() if words else ""
        is_command = key in _COMMANDS or (key == "match" and any("exec" in word.lower() for word in words))
        if is_command and words[1:] != ["none"]:
            commands.append(f"{' '.join(words)} ({path})")
    return commands


def demands_of(config: str) -> list[str]:
    """Return what a user approves with a configuration that a hosts file names; empty if it is accepted."""
    if accepted(config):
        return []
    since = " and has changed since it was approved" if accepted_before(config) else ""
    named = f"it names the SSH configuration {config}, which says how this computer connects{since}"
    return [named, *(f"that configuration runs: {command}" for command in commands_in(config))]


def accept(config: str) -> None:
    """Accept a configuration: the user has named the hosts file that names it, or approved its content."""
    if config and not _is_user_config(config):
        approve(_digest(config), _description(config))
        _accepted.add(str(_absolute(config)))


def accepted(config: str) -> bool:
    """Whether a configuration may be used: the user's own, or one that was accepted with its current content.

    Once used, it stays accepted until this process ends, so that a change does not interrupt a run.
    """
    if not config or str(_absolute(config)) in _accepted or _is_user_config(config):
        return True
    if is_approved(_digest(config)):
        _accepted.add(str(_absolute(config)))
        return True
    return False


def accepted_before(config: str) -> bool:
    """Whether a configuration was accepted with other content, and is not now."""
    return not accepted(config) and has_changed(_description(config))


def _description(config: str) -> str:
    return f"SSH configuration {_absolute(config)}"


def _absolute(config: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(config)))


def _is_user_config(config: str) -> bool:
    return os.path.realpath(_absolute(config)) == os.path.realpath(USER_CONFIG.expanduser())


def _digest(config: str) -> str:
    return digest_of("ssh_config", [path for path, _ in config_lines(_absolute(config))])
