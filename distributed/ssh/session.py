"""Turns an open stream into a paramiko transport with a server whose identity was verified."""

from __future__ import annotations

import base64
import logging
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import paramiko

from distributed.ssh.config import ResolvedHost
from distributed.ssh.errors import Dropped, HostKeyChanged, NotSsh, SshError, Stage, UnknownHostKey
from distributed.ssh.keys.host_keys import (
    HostKeyInfo,
    HostKeyStatus,
    KnownHost,
    KnownHosts,
    fingerprint,
    is_revoked,
    parse_lines,
    remember,
)
from distributed.ssh.wire import Deadline, SshStream, greet, stalled_exchange
from profiles.installation import program as command

Trust = Callable[[HostKeyInfo], bool]
"""Asked once about an unknown machine; ``True`` adds its key to the user's known_hosts."""

_CERTIFICATE = "-cert-v01@openssh.com"
"""Suffix of host key types with a certificate."""
_COMMAND_TIMEOUT = 15.0
_OUTDATED = frozenset(("ssh-rsa", "ssh-dss", "3des-cbc", "blowfish-cbc", "cast128-cbc", "arcfour", "hmac-md5"))

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its tracebacks land on the terminal


def open_transport(
    host: ResolvedHost, wire: SshStream, trust: Trust | None, deadline: Deadline, kinds: Sequence[str] = ()
) -> tuple[Any, list[str]]:
    """Exchange greetings and keys with the server, and verify its identity.

    Args:
        kinds: types of host key to ask for first; default: those of the known keys.

    Returns:
        The transport, and a list that receives the server's message if it disconnects.

    Raises:
        SshError: Stalled, Dropped, NotSsh, UnknownHostKey or HostKeyChanged; the wire is closed.
    """
    transport: Any = None
    try:
        greet(host, wire, deadline)
        transport = paramiko.Transport(wire)
        _add_key_exchange(transport)
        last_words, offers = _record_disconnect(transport), _record_offers(transport)
        known_hosts = _known_hosts(host)
        uses_certificates = bool(known_hosts.authorities(*host.known_names))
        _prefer(
            transport, kinds or [kind for kind, _ in known_hosts.expected(*host.known_names).keys], uses_certificates
        )
        _agree(host, transport, deadline, offers)
        if not (host.trusts_loopback and wire.on_loopback):
            _check_identity(host, transport, known_hosts, trust)
    except BaseException:
        if transport is not None:
            transport.close()
        wire.close()
        raise
    return transport, last_words


def _record_disconnect(transport: Any) -> list[str]:
    """Record the text of the server's disconnect message, which paramiko only logs."""
    messages: list[str] = []

    def parse(message: Any) -> None:
        message.get_int()
        messages.append(message.get_text()[:200])

    transport._parse_disconnect = parse
    return messages


def _record_offers(transport: Any) -> dict[str, list[str]]:
    """Record the algorithms that the server offers, by kind, which paramiko only logs."""
    offers: dict[str, list[str]] = {}
    parse = transport._really_parse_kex_init

    def note(*arguments: Any, **options: Any) -> Any:
        parsed = parse(*arguments, **options)
        offers.update({kind: list(names) for kind, names in parsed.items() if isinstance(names, list)})
        return parsed

    transport._really_parse_kex_init = note
    return offers


def _add_key_exchange(transport: Any) -> None:
    """Add the key exchange curve25519-sha256 by its name in RFC 8731; paramiko knows only the older name."""
    old, new = "curve25519-sha256@libssh.org", "curve25519-sha256"
    if old in transport._kex_info:
        transport._kex_info = {**transport._kex_info, new: transport._kex_info[old]}
        transport._preferred_kex = tuple(name for preferred in transport._preferred_kex for name in
                                         ((new, preferred) if preferred == old else (preferred,)))  # fmt: skip


def missing_algorithm(transport: Any, offers: Mapping[str, list[str]]) -> tuple[str, str, list[str]] | None:
    """Return the first kind of algorithms without a common one: its keyword in sshd_config, one that we support, and
    what the server offers."""
    for kind, word, example, ours in (
        ("kex_algo_list", "KexAlgorithms", "curve25519-sha256", transport.preferred_kex),
        ("server_key_algo_list", "HostKeyAlgorithms", "ssh-ed25519", transport.preferred_keys),
        ("server_encrypt_algo_list", "Ciphers", "aes256-gcm@openssh.com", transport.preferred_ciphers),
        ("server_mac_algo_list", "MACs", "hmac-sha2-256-etm@openssh.com", transport.preferred_macs),
    ):
        offered = [name for name in offers.get(kind, []) if name and not name.startswith(("ext-info-", "kex-strict-"))]
        if offered and not set(offered) & set(ours):
            return word, example, offered
    return None


def _explain_algorithms(host: ResolvedHost, word: str, example: str, offered: Sequence[str]) -> tuple[str, str]:
    problem = f"no common encryption with {host.host_port}: of {word} it offers only {', '.join(offered[:8])}"
    if all(name.endswith("sha1") or name in _OUTDATED for name in offered):
        return f"{problem}, which are outdated", "update its SSH server"
    if word == "HostKeyAlgorithms":
        return problem, f"give it a host key of a usual type: sudo ssh-keygen -A there, and allow {example} in {word}"
    hint = f"add {example} to the line '{word}' of its sshd_config (where it has none: {word} +{example}), restart sshd"
    return f"{problem}, which Muster's SSH library lacks (the ssh command may know them)", hint


def _known_hosts(host: ResolvedHost, key: HostKeyInfo | None = None) -> KnownHosts:
    """Return the entries of the files and of the user's KnownHostsCommand, which runs before and after a key is shown.

    Raises:
        SshError: the command failed, in which case ssh would not connect either.
    """
    entries = host.known_hosts().entries
    if host.known_hosts_command:
        tokens = {"H": host.known_names[0], "I": "ORDER", "K": "NONE", "f": "NONE", "t": "NONE", "%": "%"}
        if key is not None:
            blob = base64.b64encode(key.blob).decode()
            tokens |= {"I": "HOSTNAME", "K": blob, "f": key.fingerprint, "t": key.key_type}
        words = [re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), word) for word in host.known_hosts_command]
        entries += parse_lines(_output_of(host, words), "KnownHostsCommand")
    return KnownHosts(entries)


def _output_of(host: ResolvedHost, words: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT)
        problem = "" if done.returncode == 0 else f"it ended with {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = f"{error}"
    if problem:
        failed = SshError(host.machine, f"KnownHostsCommand of ~/.ssh/config failed: {problem}", f"try it: {words[0]}")
        failed.stage = Stage.HOST_KEY
        raise failed
    return done.stdout.decode(errors="replace").splitlines()


def _prefer(transport: Any, known_types: Sequence[str], uses_certificates: bool) -> None:
    """Prefer host keys of a known type, so that another type is not taken for a changed key; prefer certificates where
    an authority is trusted for this host."""
    options = transport.get_security_options()
    offered = list(options.key_types)
    preferred = [
        k for known in known_types for k in (("rsa-sha2-512", "rsa-sha2-256") if known == "ssh-rsa" else (known,))
    ]
    ordered = list(dict.fromkeys([*(kind for kind in preferred if kind in offered), *offered]))
    options.key_types = [*(f"{kind}{_CERTIFICATE}" for kind in ordered if uses_certificates), *ordered]


def _agree(host: ResolvedHost, transport: Any, deadline: Deadline, offers: Mapping[str, list[str]]) -> None:
    transport.handshake_timeout = transport.banner_timeout = deadline.remaining + 1.0
    try:
        transport.start_client(timeout=deadline.remaining)
    except (paramiko.SSHException, EOFError, OSError, ValueError) as error:
        if isinstance(error, paramiko.IncompatiblePeer) and (nothing_common := missing_algorithm(transport, offers)):
            raise NotSsh(host.machine, *_explain_algorithms(host, *nothing_common)) from None
        raise _explain_handshake(host, error, deadline) from None
    if not transport.is_active() or not transport.initial_kex_done:
        raise stalled_exchange(host, deadline.seconds)


def _explain_handshake(host: ResolvedHost, error: Exception, deadline: Deadline) -> SshError:
    text = str(error)
    if deadline.passed:
        return stalled_exchange(host, deadline.seconds)
    if isinstance(error, paramiko.IncompatiblePeer):
        return NotSsh(host.machine, f"no common encryption with {host.host_port}: {text}", "check its sshd_config")
    if isinstance(error, EOFError | ConnectionError) or not text or "EOF" in text or "no existing session" in text:
        hint = "its SSH server may be overloaded (MaxStartups) or refuse this address; check its log"
        return Dropped(host.machine, f"{host.host_port} closed the connection during the key exchange", hint)
    return NotSsh(
        host.machine, f"{host.host_port} breaks the SSH protocol: {text[:120]}", "is 'port' its SSH server's?"
    )


def _check_identity(host: ResolvedHost, transport: Any, known_hosts: KnownHosts, trust: Trust | None) -> None:
    key = transport.get_remote_server_key()
    name, plain_name = host.known_names
    certificate = key.public_blob.key_blob if key.public_blob else b""
    info = HostKeyInfo(host.machine, name, key.get_name(), key.asbytes(), certificate)
    known_hosts = _known_hosts(host, info) if host.known_hosts_command else known_hosts
    status = known_hosts.judge(info)
    if status is HostKeyStatus.UNKNOWN and plain_name != name:
        plain_status = known_hosts.judge(replace(info, name=plain_name))
        status = plain_status if plain_status in (HostKeyStatus.KNOWN, HostKeyStatus.REVOKED) else status
    if status is HostKeyStatus.REVOKED or (host.revoked_keys and is_revoked(info, host.revoked_keys)):
        raise HostKeyChanged(host.machine, f"its host key {info.fingerprint} is revoked", "do not connect")
    if status is HostKeyStatus.CHANGED:
        raise _changed(host, info, known_hosts.of(name)[0])
    if status is HostKeyStatus.UNKNOWN and host.joined:  # its key was pinned when it joined: there is no first contact
        hint = f"let it join again: {command('machines', 'share')}"
        raise HostKeyChanged(host.machine, f"{host.hostname} has not joined with the key that it shows", hint)
    if status is HostKeyStatus.UNKNOWN:
        info = replace(info, known_as=known_hosts.names_of(info.blob))
        if not host.accepts_new_keys and (trust is None or not trust(info)):
            raise UnknownHostKey(info)
        _remember(host, info)


def _changed(host: ResolvedHost, info: HostKeyInfo, entry: KnownHost) -> HostKeyChanged:
    file = entry.origin.rpartition(":")[0]
    problem = (
        f"another machine answers at {host.host_port}, or its host key changed: it shows {info.fingerprint}, "
        f"known is {fingerprint(entry.blob)} ({entry.origin})"
    )
    hint = (
        f"only if you know why it changed: compare on that machine with {info.compare_command}, "
        f"then: ssh-keygen -R '{info.name}' -f {file}"
    )
    return HostKeyChanged(host.machine, problem, hint)


def _remember(host: ResolvedHost, info: HostKeyInfo) -> None:
    if not host.user_known_hosts:
        return
    path = host.user_known_hosts[0]
    try:
        remember(info, path, host.hash_known_hosts)
    except OSError as error:
        problem = f"its host key cannot be written to {path}: {error.strerror or error}"
        unwritable = SshError(host.machine, problem, "make the file writable")
        unwritable.stage = Stage.HOST_KEY
        raise unwritable from None
