"""Whether an SSH server answers at an endpoint, which host key it has, and, if not, why.

A key exchange is enough to see a machine's host key: nobody logs in, and nothing is written down.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from distributed.discovery.mdns_sockets import LOCAL_NETWORK_HINT
from distributed.discovery.network_interfaces import Endpoint, PathKind
from distributed.discovery.sightings import Problem
from distributed.ssh.config import ResolvedHost
from distributed.ssh.errors import REMOTE_LOGIN, SshError, UnknownHostKey
from distributed.ssh.host_keys import HostKeyInfo
from distributed.ssh.session import open_transport
from distributed.ssh.wire import Deadline, Wire

CONNECT_TIMEOUT = 1.5
"""Seconds for a TCP connection in the local network; a sleeping Wi-Fi station takes up to one."""
KEY_EXCHANGE_TIMEOUT = 4.0
_AT_ONCE = 0.3
"""Seconds within which macOS refuses for want of permission; an absent machine takes longer to be given up."""
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)
_IP_BOUND_IF, _IPV6_BOUND_IF = 25, 125
"""macOS: send through this interface only."""
_PROBED_PORT = 9
"""A port that hardly anybody uses: a machine without firewall refuses it, and so shows that it is there."""


@dataclass(frozen=True)
class Failure:
    """How a connection failed."""

    error: OSError
    seconds: float
    """How long it took."""


def _connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    """Connect through the endpoint's interface, where the system lets a socket be bound to one."""
    version6 = ":" in endpoint.address
    stream = socket.socket(socket.AF_INET6 if version6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if endpoint.interface and endpoint.kind not in (PathKind.HERE, PathKind.ROUTED):
            with contextlib.suppress(OSError):
                _bind_to(stream, endpoint.interface, version6)
        stream.settimeout(timeout)
        stream.connect(_socket_address(endpoint))
    except BaseException:
        stream.close()
        raise
    return stream


def _bind_to(stream: socket.socket, interface: str, version6: bool) -> None:
    if sys.platform == "darwin":
        level, option = (socket.IPPROTO_IPV6, _IPV6_BOUND_IF) if version6 else (socket.IPPROTO_IP, _IP_BOUND_IF)
        stream.setsockopt(level, option, socket.if_nametoindex(interface))
    elif hasattr(socket, "SO_BINDTODEVICE"):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")


def _socket_address(endpoint: Endpoint) -> tuple[str, int] | tuple[str, int, int, int]:
    """Return what ``connect`` takes.

    Raises:
        OSError: its interface is gone.
    """
    if ":" not in endpoint.address:
        return endpoint.address, endpoint.port
    scope = socket.if_nametoindex(endpoint.interface) if "%" in endpoint.scoped else 0
    return endpoint.address, endpoint.port, 0, scope


def knock(endpoint: Endpoint, timeout: float = CONNECT_TIMEOUT) -> Failure | None:
    """Connect and leave; return how it failed, or ``None``."""
    begin = time.monotonic()
    try:
        _connect(endpoint, timeout).close()
    except OSError as error:
        return Failure(error, time.monotonic() - begin)
    return None


def read_host_key(
    endpoint: Endpoint, timeout: float = KEY_EXCHANGE_TIMEOUT, kind: str = ""
) -> HostKeyInfo | Problem | Failure:
    """Agree on keys with the SSH server there, and leave.

    Servers with several host keys are asked for the same kind every time (Ed25519, ECDSA, RSA), so that a machine has
    one identity whichever way it is reached.

    Args:
        kind: ask for a key of this type first.

    Returns:
        Its host key; what is wrong with the server; or how the connection failed.
    """
    begin, deadline = time.monotonic(), Deadline(timeout)
    place = ResolvedHost(endpoint.where, endpoint.address, endpoint.port, "")
    try:
        stream = _connect(endpoint, min(timeout, CONNECT_TIMEOUT))
        open_transport(place, Wire(stream), None, deadline, (kind,) if kind else ())
    except UnknownHostKey as shown:
        return shown.key
    except SshError as error:
        return Problem(error.cause, error.beside(endpoint.where), error.hint)
    except OSError as error:
        return Failure(error, time.monotonic() - begin)
    raise AssertionError("a key was taken for a known one without any known_hosts file")


def explain(failure: Failure, endpoint: Endpoint, platform: str = sys.platform) -> Problem:
    """Say in one line why a connection failed, and what to do."""
    number = failure.error.errno
    if isinstance(failure.error, TimeoutError) or number == errno.ETIMEDOUT:
        hint = "is it on, awake and in this network?"
        return Problem("timeout", f"no answer from {endpoint.where} ({_over(endpoint)})", hint)
    if number in (errno.ECONNREFUSED, errno.ECONNRESET):
        message = f"{endpoint.address} is there, but no SSH server listens on port {endpoint.port}"
        return Problem("port_closed", message, REMOTE_LOGIN)
    local = endpoint.kind not in (PathKind.ROUTED, PathKind.VPN)
    if platform == "darwin" and number == errno.EHOSTUNREACH and local and failure.seconds < _AT_ONCE:
        message = f"macOS does not let this terminal reach {endpoint.where} (errno 65)"
        return Problem("local_network_permission", message, LOCAL_NETWORK_HINT)
    if number in (errno.EPERM, errno.EACCES):
        message = f"this computer forbids connections to {endpoint.where}"
        return Problem("firewall", message, f"allow outgoing TCP port {endpoint.port} in its own firewall")
    if number in _NO_ROUTE:
        message = f"no route to {endpoint.where} ({_over(endpoint)}): no machine there has this address"
        return Problem("no_route", message, "is it on, awake and in this network?")
    return Problem("no_route", f"cannot connect to {endpoint.where}: {failure.error.strerror or failure.error}")


def _over(endpoint: Endpoint) -> str:
    return f"{endpoint.kind.value}, {endpoint.interface}" if endpoint.interface else endpoint.kind.value


def explain_silence(endpoint: Endpoint, sign: str) -> Problem:
    """Say why a machine that gives a sign of life does not answer on its SSH port."""
    message = f"{endpoint.address} {sign} but drops connections to port {endpoint.port}: a firewall is in the way"
    hint = (
        "allow SSH there: on a Mac System Settings > Network > Firewall > Options, on Linux sudo ufw allow ssh, "
        "on Windows a firewall rule for that port"
    )
    return Problem("firewall", message, hint)


def sign_of_life(endpoint: Endpoint) -> str:
    """Return by what else the machine at an endpoint shows that it is there; empty if by nothing."""
    other = Endpoint(endpoint.address, endpoint.interface, _PROBED_PORT, endpoint.kind)
    failure = knock(other, timeout=1.0)
    if failure is None or failure.error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "answers on other ports"
    return "answers to ping" if _pings(endpoint) else ""


def _pings(endpoint: Endpoint) -> bool:
    names = ("ping6", "ping") if ":" in endpoint.address else ("ping",)
    program = next((path for path in map(shutil.which, names) if path), None)
    if program is None:
        return False
    try:
        command = [program, "-n", "-c", "1", endpoint.scoped]
        return subprocess.run(command, capture_output=True, timeout=1.5, stdin=subprocess.DEVNULL).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
