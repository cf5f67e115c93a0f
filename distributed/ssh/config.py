"""Where a machine is and how to log in there, as OpenSSH itself sees it: resolved by ``ssh -G``.

So the user's ~/.ssh/config holds whole: Include, Match, ProxyJump, IdentityAgent and whatever comes next.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distributed.hosts.schema import Hosts, Machine
from distributed.ssh.config_files import check_accepted
from distributed.ssh.host_keys import known_name
from profiles.errors import BadInput

OWN_KEY = "~/.ssh/muster_ed25519"
"""Muster's own key, which :mod:`distributed.ssh.key_setup` makes; tried early, for servers allow few attempts."""
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_PATIENCE = 15.0
"""Seconds for ``ssh -G``; a ``Match exec`` of the user's may take its time."""


@dataclass(frozen=True)
class SshTarget:
    """What a person has said of a machine; empty fields are left to ~/.ssh/config."""

    name: str
    """How messages call it."""
    host: str
    """What one would type after ``ssh``."""
    port: int | None = None
    user: str = ""
    key: str = ""
    """Private key file, tried first."""
    config_file: str = ""
    """OpenSSH client configuration instead of ~/.ssh/config."""
    from_hosts_file: bool = False
    """Whether a hosts file has named the configuration, so that it has to be accepted before it is read."""
    found_at: str = ""
    """Literal address to connect to; all else, and the name of its host key, stays that of ``host``."""

    @classmethod
    def of(cls, machine: Machine, hosts: Hosts | None = None) -> SshTarget:
        """Return the target of a machine of the hosts file."""
        config = hosts.ssh_config if hosts else ""
        where = machine.name, machine.host, machine.port, machine.user, machine.key
        return cls(*where, config, from_hosts_file=bool(config), found_at=machine.found_at)


@dataclass(frozen=True)
class ResolvedHost:
    """A target with everything decided."""

    machine: str
    hostname: str
    port: int
    user: str
    user_is_guess: bool = False
    """Nobody named the user: it is the one of this machine."""
    key_files: tuple[Path, ...] = ()
    identities_only: bool = False
    agent_socket: str = ""
    host_key_alias: str = ""
    user_known_hosts: tuple[Path, ...] = ()
    system_known_hosts: tuple[Path, ...] = ()
    hash_known_hosts: bool = False
    jumps: tuple[SshTarget, ...] = ()
    """Machines to go through, the first one first."""
    proxy_command: str = ""
    """The user's own command that makes the connection, expanded."""
    note: str = ""
    """Something a person should know if the connection fails."""

    @property
    def where(self) -> str:
        host = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{host}:{self.port}"


def resolve(target: SshTarget) -> ResolvedHost:
    """Ask OpenSSH what it would do for this target. Without an ``ssh`` command the usual defaults are taken.

    Raises:
        BadInput: the configuration has an error or was not accepted, or the target is no host name.
    """
    if not target.host or target.host.startswith("-") or target.user.startswith("-"):
        raise BadInput(f"'{target.host}' is not a host name", "see docs/hosts.md", machine=target.name)
    program = shutil.which("ssh")
    if target.from_hosts_file:
        check_accepted(target.config_file, target.name)
    options = _parse(_ask(program, target)) if program else _defaults(target)
    resolved = _elsewhere(_decide(target, options), target)
    config = Path(target.config_file or "~/.ssh/config").expanduser()
    if program is None and config.exists():
        note = f"the ssh command is missing, so {config} was not read: install openssh-client"
        resolved = replace(resolved, note=note)
    return resolved


def _elsewhere(host: ResolvedHost, target: SshTarget) -> ResolvedHost:
    """Return the host at the address where it was found; its key stays known under the name it had."""
    if not target.found_at:
        return host
    name = known_name(host.hostname, host.port, host.host_key_alias)
    return replace(host, hostname=target.found_at, host_key_alias=name)


def _ask(program: str, target: SshTarget) -> str:
    command = [program, "-G"]
    command += ["-F", os.path.expanduser(target.config_file)] if target.config_file else []
    command += ["-p", str(target.port)] if target.port else []
    command += ["-l", target.user] if target.user else []
    try:
        result = subprocess.run(
            [*command, "--", target.host],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PATIENCE,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        problem, hint = f"ssh -G {target.host} does not end", "check Match exec in ~/.ssh/config"
        raise BadInput(problem, hint, machine=target.name) from None
    if result.returncode != 0:
        problem = " ".join(result.stderr.split()) or f"ssh -G ended with {result.returncode}"
        raise BadInput(problem, f"try it yourself: ssh -G {target.host}", machine=target.name)
    return result.stdout


def _parse(text: str) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value.strip())
    return options


def _defaults(target: SshTarget) -> dict[str, list[str]]:
    """What ``ssh -G`` says on a machine without configuration."""
    return {
        "hostname": [target.host],
        "port": [str(target.port or 22)],
        "user": [target.user or getpass.getuser()],
        "identityfile": [f"~/.ssh/{name}" for name in _DEFAULT_KEYS],
        "userknownhostsfile": ["~/.ssh/known_hosts ~/.ssh/known_hosts2"],
        "globalknownhostsfile": ["/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"],
    }


def _decide(target: SshTarget, options: Mapping[str, list[str]]) -> ResolvedHost:
    def first(key: str, default: str = "") -> str:
        value = options.get(key, [default])[0]
        return default if value.lower() == "none" else value

    hostname, port, user = first("hostname", target.host), int(first("port", "22")), first("user")
    tokens = _tokens(target.host, hostname, port, user)
    keys = [_path(value, tokens) for value in options.get("identityfile", []) if value.lower() != "none"]
    own = [Path(key).expanduser() for key in (target.key, OWN_KEY) if key]
    return ResolvedHost(
        machine=target.name,
        hostname=hostname,
        port=port,
        user=user,
        user_is_guess=not target.user and user == getpass.getuser(),
        key_files=tuple(dict.fromkeys([*own, *keys])),
        identities_only=first("identitiesonly", "no") == "yes",
        agent_socket=_agent_socket(options.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        host_key_alias=first("hostkeyalias"),
        user_known_hosts=_paths(first("userknownhostsfile"), tokens),
        system_known_hosts=_paths(first("globalknownhostsfile"), tokens),
        hash_known_hosts=first("hashknownhosts", "no") == "yes",
        jumps=parse_jumps(first("proxyjump"), target),
        proxy_command=_expand(first("proxycommand"), tokens),
    )


def parse_jumps(text: str, target: SshTarget) -> tuple[SshTarget, ...]:
    """Parse a ProxyJump list: ``[user@]host[:port]`` or ``ssh://[user@]host[:port]``, by comma."""
    return tuple(_jump(part.strip(), target) for part in text.split(",") if part.strip())


def _jump(text: str, target: SshTarget) -> SshTarget:
    match = re.fullmatch(r"(?:ssh://)?(?:([^@]*)@)?(\[[^\]]+\]|[^:/]+|[^/]*:[^/]*:[^/]*?)(?::(\d{1,5}))?/?", text)
    if not match:
        raise BadInput(f"cannot understand ProxyJump {text!r}", "expected [user@]host[:port]", machine=target.name)
    host = match[2].strip("[]")
    port = int(match[3]) if match[3] else None
    name = f"{target.name} (through {host})"
    return SshTarget(name, host, port, match[1] or "", "", target.config_file, target.from_hosts_file)


def _tokens(typed: str, hostname: str, port: int, user: str) -> dict[str, str]:
    here = socket.gethostname()
    return {
        "%": "%", "d": str(Path.home()), "h": hostname, "i": str(os.getuid()), "k": typed, "L": here.partition(".")[0],
        "l": here, "n": typed, "p": str(port), "r": user, "u": getpass.getuser(),
    }  # fmt: skip


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _path(text: str, tokens: Mapping[str, str]) -> Path:
    filled = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], ""), _expand(text, tokens))
    return Path(filled.strip('"')).expanduser()


def _paths(text: str, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(_path(part, tokens) for part in text.split())


def _agent_socket(value: str, tokens: Mapping[str, str]) -> str:
    if value.lower() == "none":
        return ""
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK", "")
    if value.startswith("$"):
        return os.environ.get(value[1:].strip("{}"), "")
    return str(_path(value, tokens))
