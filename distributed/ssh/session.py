"""From an open stream to a paramiko transport with a server that is who it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import paramiko

from distributed.ssh.config import ResolvedHost
from distributed.ssh.errors import Dropped, HostKeyChanged, NotSsh, SshError, Stage, UnknownHostKey
from distributed.ssh.host_keys import HostKeyInfo, HostKeyStatus, KnownHost, KnownHosts, fingerprint, remember
from distributed.ssh.wire import Deadline, SshStream, greet, stalled_exchange

Trust = Callable[[HostKeyInfo], bool]
"""Asked once for a machine never met before; ``True`` adds its key to the user's known_hosts."""

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its tracebacks land on the terminal


def open_transport(
    host: ResolvedHost, wire: SshStream, trust: Trust | None, deadline: Deadline, kinds: Sequence[str] = ()
) -> tuple[Any, list[str]]:
    """Greet the server, agree on keys, and check who it is.

    Args:
        kinds: types of host key to ask for first; those of the known keys where none are given.

    Returns:
        The transport, and a list that receives the server's last words if it disconnects.

    Raises:
        SshError: Stalled, Dropped, NotSsh, UnknownHostKey or HostKeyChanged; the wire is closed.
    """
    transport: Any = None
    try:
        greet(host, wire, deadline)
        transport = paramiko.Transport(wire)
        words = _note_disconnect(transport)
        known = host.known_hosts()
        _prefer(transport, kinds or [kind for kind, _ in known.expected(*host.known_names).keys])
        _agree(host, transport, deadline)
        _check_identity(host, transport, known, trust)
    except BaseException:
        if transport is not None:
            transport.close()
        wire.close()
        raise
    return transport, words


def _note_disconnect(transport: Any) -> list[str]:
    """Keep the text of the server's disconnect message, which paramiko only logs."""
    words: list[str] = []

    def parse(message: Any) -> None:
        message.get_int()
        words.append(message.get_text()[:200])

    transport._parse_disconnect = parse
    return words


def _prefer(transport: Any, known_types: Sequence[str]) -> None:
    """Ask for a key of a type we know, so that another one is not taken for a change."""
    options = transport.get_security_options()
    offered = list(options.key_types)
    wanted = [
        k for known in known_types for k in (("rsa-sha2-512", "rsa-sha2-256") if known == "ssh-rsa" else (known,))
    ]
    options.key_types = list(dict.fromkeys([*(kind for kind in wanted if kind in offered), *offered]))


def _agree(host: ResolvedHost, transport: Any, deadline: Deadline) -> None:
    transport.handshake_timeout = transport.banner_timeout = deadline.remaining + 1.0
    try:
        transport.start_client(timeout=deadline.remaining)
    except (paramiko.SSHException, EOFError, OSError, ValueError) as error:
        raise _explain_handshake(host, error, deadline) from None
    if not transport.is_active() or not transport.initial_kex_done:
        raise stalled_exchange(host, deadline.seconds)


def _explain_handshake(host: ResolvedHost, error: Exception, deadline: Deadline) -> SshError:
    text = str(error)
    if deadline.passed:
        return stalled_exchange(host, deadline.seconds)
    if isinstance(error, paramiko.IncompatiblePeer):
        return NotSsh(host.machine, f"no common encryption with {host.where}: {text}", "update its SSH server")
    if isinstance(error, EOFError | ConnectionError) or not text or "EOF" in text or "no existing session" in text:
        hint = "its SSH server may be overloaded (MaxStartups) or refuse this address; check its log"
        return Dropped(host.machine, f"{host.where} closed the connection during the key exchange", hint)
    return NotSsh(host.machine, f"{host.where} breaks the SSH protocol: {text[:120]}", "is 'port' its SSH server's?")


def _check_identity(host: ResolvedHost, transport: Any, known: KnownHosts, trust: Trust | None) -> None:
    key = transport.get_remote_server_key()
    name, plain_name = host.known_names
    info = HostKeyInfo(host.machine, name, key.get_name(), key.asbytes())
    verdict = known.judge(info)
    if verdict is HostKeyStatus.UNKNOWN and plain_name != name:
        plain = known.judge(replace(info, name=plain_name))
        verdict = plain if plain in (HostKeyStatus.KNOWN, HostKeyStatus.REVOKED) else verdict
    if verdict is HostKeyStatus.REVOKED:
        raise HostKeyChanged(host.machine, f"its host key {info.fingerprint} is marked as revoked", "do not connect")
    if verdict is HostKeyStatus.CHANGED:
        raise _changed(host, info, known.of(name)[0])
    if verdict is HostKeyStatus.UNKNOWN:
        if trust is None or not trust(info):
            raise UnknownHostKey(info)
        _remember(host, info)


def _changed(host: ResolvedHost, info: HostKeyInfo, entry: KnownHost) -> HostKeyChanged:
    file = entry.origin.rpartition(":")[0]
    problem = (
        f"another machine answers at {host.where}, or its host key changed: it shows {info.fingerprint}, "
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
