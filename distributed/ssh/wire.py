"""The byte stream under an SSH connection: name resolution, TCP, and the first line of the server.

Every kind of failure is distinguished here, within a deadline and with bounded memory, before paramiko sees a byte.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import ipaddress
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from distributed.hosts.file import nearest_machine
from distributed.hosts.joined import NotConnected, call_joined
from distributed.ssh.config import ResolvedHost
from distributed.ssh.errors import (
    WENT_SILENT,
    ConnectTimeout,
    Dropped,
    NameUnknown,
    NoRoute,
    NotSsh,
    PortClosed,
    SshError,
    Stalled,
    refused_again,
    remote_login,
)
from distributed.ssh.login_history import note_answer, seconds_since_answer
from profiles.quantities import span_text
from training.exchange.links.dialling import send_small_segments

_UNAUTHENTICATED_LIMIT = 256 * 1024
"""Maximum bytes that a server may send before the log-in; an honest one needs about 5 KiB."""
_GREETING_LIMIT = 8 * 1024
"""Maximum bytes up to the end of the server's identification (RFC 4253, 4.2)."""
NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL)

_BUSY = (b"Not allowed at this time", b"Exceeded MaxStartups")
"""What OpenSSH (9.8, 9.9) sends instead of its identification to a client that it refuses temporarily."""
_TCP_RXT_CONNDROPTIME = 0x80
"""In Darwin's netinet/tcp.h: seconds of retransmission after which a connection is dropped."""
_UNACKNOWLEDGED = 20.0
"""Seconds of unacknowledged data after which a connection is closed. After an outage TCP waits up to twice as long as
that took. On a link that fails repeatedly our data may never arrive although the other side is heard, and a run's agent
would end for lack of a beat."""

_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}

_MAC_NETWORK = (
    " It also means that the terminal may not use the network: System Settings > Privacy & Security > Local Network"
)
_T = TypeVar("_T")


class Deadline:
    """A deadline that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never quite zero: a zero timeout means non-blocking to a socket."""
        return max(self._end - time.monotonic(), 0.01)

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end


class SshStream:
    """A socket, or a channel through another machine, that records when data was last received.

    It returns the server's first line to paramiko once more, and limits the data before the log-in.
    """

    def __init__(self, stream: Any, process: subprocess.Popen[bytes] | None = None) -> None:
        self._stream = stream
        self._process = process
        self._greeting = b""
        self._budget: int | None = _UNAUTHENTICATED_LIMIT
        self.last_heard = time.monotonic()

    def read_greeting(self, deadline: Deadline) -> bytes:
        """Read up to the line that starts with ``SSH-``, and keep it for paramiko.

        Raises:
            OSError: the stream broke; TimeoutError where the deadline passed.
            EOFError: it ended; the argument holds what was read.
            ValueError: it is not an SSH server; the argument holds what was read.
        """
        seen, line = b"", b""
        while len(seen) < _GREETING_LIMIT:
            if deadline.passed:
                raise TimeoutError
            self._stream.settimeout(deadline.remaining)
            byte = bytes(self._stream.recv(1))
            if not byte:
                raise EOFError(seen)
            seen, line = seen + byte, line + byte
            if byte == b"\n":
                if line.startswith(b"SSH-"):
                    self._greeting = line
                    return line
                line = b""
        raise ValueError(seen)

    def logged_in(self) -> None:
        """Lift the limit on received data, and record the successful log-in."""
        self._budget = None
        if isinstance(self._stream, socket.socket) and self._process is None:
            with contextlib.suppress(OSError):  # it is lost already
                note_answer(*self._stream.getpeername()[:2])

    def recv(self, size: int) -> bytes:
        if self._greeting:
            data, self._greeting = self._greeting[:size], self._greeting[size:]
            return data
        data = bytes(self._stream.recv(size))
        if data:
            self.last_heard = time.monotonic()
        if self._budget is not None:
            self._budget -= len(data)
            if self._budget < 0:
                raise OSError(errno.EPROTO, "too much data before login")
        return data

    def send(self, data: bytes) -> int:
        return int(self._stream.send(data))

    def settimeout(self, seconds: float | None) -> None:
        self._stream.settimeout(seconds)

    def getpeername(self) -> Any:
        return self._stream.getpeername()

    @property
    def on_loopback(self) -> bool:
        """Whether it connects this computer to itself."""
        if not isinstance(self._stream, socket.socket) or self._process is not None:
            return False
        return ipaddress.ip_address(str(self._stream.getpeername()[0]).partition("%")[0]).is_loopback

    @property
    def _closed(self) -> bool:
        """Read by paramiko at the end."""
        return bool(self._stream._closed)

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # a channel through a machine that is lost
            self._stream.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def dial(host: ResolvedHost, deadline: Deadline) -> SshStream:
    """Connect to a machine directly, or with the user's ProxyCommand.

    Raises:
        SshError: NameUnknown, NoRoute, ConnectTimeout or PortClosed.
    """
    if host.joined:
        return SshStream(_called(host, deadline))
    if host.proxy_command:
        ours, theirs = socket.socketpair()  # as ssh does
        with theirs:
            command, end = ["/bin/sh", "-c", f"exec {host.proxy_command}"], theirs.fileno()
            process = subprocess.Popen(command, stdin=end, stdout=end, stderr=subprocess.DEVNULL)
        return SshStream(_passed_stream(host, ours, process, deadline) if host.proxy_passes_stream else ours, process)
    worst: SshError | None = None
    addresses = _look_up(host, deadline)
    for number, (family, address) in enumerate(addresses):
        try:
            seconds = deadline.remaining / (len(addresses) - number)
            return SshStream(_connect(family, address, seconds, host.bind_address))
        except OSError as error:
            failure = _explain_connect(host, str(address[0]), error, deadline)
            worst = failure if worst is None or isinstance(failure, PortClosed) else worst
    raise worst or NameUnknown(host.machine, *explain_name(host))


def _called(host: ResolvedHost, deadline: Deadline) -> socket.socket:
    """Return the connection that a machine which has joined opens to us.

    Raises:
        NoRoute: it is away.
    """
    try:
        stream = call_joined(host.joined, deadline.remaining)
    except NotConnected as error:
        raise NoRoute(host.machine, error.problem, error.hint) from None
    _set_options(stream)
    return stream


def _passed_stream(
    host: ResolvedHost, channel: socket.socket, process: subprocess.Popen[bytes], deadline: Deadline
) -> socket.socket:
    """Return the open connection that the user's command passes (ProxyUseFdpass).

    Raises:
        Dropped: it passed none in time.
    """
    channel.settimeout(deadline.remaining)
    with channel, contextlib.suppress(OSError):
        _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if descriptors:
            return socket.socket(fileno=descriptors[0])
    process.kill()
    process.wait()
    problem = f"ProxyCommand passed no connection to {host.host_port}"
    raise Dropped(host.machine, problem, f"try it yourself: {host.proxy_command}")


def _connect(family: socket.AddressFamily, address: Any, seconds: float, source: str) -> socket.socket:
    stream = socket.socket(family, socket.SOCK_STREAM)
    try:
        if source:
            stream.bind((source, 0))
        stream.settimeout(seconds)
        send_small_segments(stream)  # where large packets are lost, the key exchange would hang
        stream.connect(address)
        _set_options(stream)
    except BaseException:
        stream.close()
        raise
    return stream


def _set_options(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNACKNOWLEDGED))
    elif sys.platform == "darwin":
        stream.setsockopt(socket.IPPROTO_TCP, _TCP_RXT_CONNDROPTIME, int(_UNACKNOWLEDGED))


def _look_up(host: ResolvedHost, deadline: Deadline) -> list[tuple[socket.AddressFamily, Any]]:
    family = _FAMILIES.get(host.address_family, socket.AF_UNSPEC)
    lookup = in_background(lambda: socket.getaddrinfo(host.hostname, host.port, family, socket.SOCK_STREAM))
    try:
        resolved = lookup.result(deadline.remaining)
    except concurrent.futures.TimeoutError:
        problem = f"looking up the name '{host.hostname}' took more than {span_text(deadline.seconds)}"
        raise NameUnknown(host.machine, problem, host.note or "is the name server of this computer up?") from None
    except (OSError, UnicodeError):
        raise NameUnknown(host.machine, *explain_name(host)) from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in resolved))


def in_background(call: Callable[[], _T]) -> concurrent.futures.Future[_T]:
    """Run a blocking call in a daemon thread that is not joined at exit: a name service may hang."""
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # cannot be cancelled any more, so setting the result never fails

    def work() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - passed to the waiting thread
            future.set_exception(error)

    threading.Thread(target=work, name="look-up", daemon=True).start()
    return future


def explain_name(host: ResolvedHost) -> tuple[str, str]:
    """Return why a host has no address, and what to do."""
    scope = host.hostname.partition("%")[2]
    if ":" in host.hostname and scope:
        hint = "ip link (on a Mac: ifconfig) lists the interfaces; an address that starts with fe80 needs one of them"
        return f"{host.hostname}: this computer has no network interface '{scope}'", host.note or hint
    problem = f"the name '{host.hostname}' is unknown"
    if host.note:
        return problem, host.note
    close = nearest_machine(host.hostname)
    meant = f"did you mean {close}? If not, " if close else ""
    if host.hostname.endswith(".local"):
        return problem, f"{meant}is it on and in this network? If so, give its IP address in place of the name"
    return problem, f"{meant}check the spelling, or give its IP address in place of the name"


def _explain_connect(host: ResolvedHost, address: str, error: OSError, deadline: Deadline) -> SshError:
    endpoint = host.host_port if address == host.hostname else f"{host.host_port} ({address})"
    ago = seconds_since_answer(address, host.port)
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        hint = "is it on, awake and in this network? A firewall may drop the packets"
        problem = f"no answer from {endpoint} within {span_text(deadline.seconds)}"
        if ago is not None:
            return ConnectTimeout(host.machine, f"{problem}, and it answered {span_text(round(ago))} ago", WENT_SILENT)
        return ConnectTimeout(host.machine, problem, hint)
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        if ago is not None:
            return PortClosed(host.machine, *refused_again(endpoint, address, ago))
        return PortClosed(host.machine, f"{endpoint} is there, but no SSH server answers", remote_login(address))
    if error.errno == errno.EADDRNOTAVAIL and host.bind_address:
        problem = f"this computer has no address {host.bind_address} to connect to {endpoint} from"
        return NoRoute(host.machine, problem, "correct BindAddress in ~/.ssh/config")
    if error.errno in NO_ROUTE:
        hint = "is it on, awake and in this network?" + (_MAC_NETWORK if sys.platform == "darwin" else "")
        return NoRoute(host.machine, f"no route to {endpoint} ({error.strerror}, errno {error.errno})", hint)
    return NoRoute(host.machine, f"cannot connect to {endpoint}: {error.strerror or error}", "check the address")


def greet(host: ResolvedHost, wire: SshStream, deadline: Deadline) -> None:
    """Wait for the server's identification.

    Raises:
        SshError: Stalled, Dropped or NotSsh.
    """
    try:
        line = wire.read_greeting(deadline)
    except TimeoutError:
        raise stalled(host, "did not introduce itself as an SSH server", deadline.seconds) from None
    except ValueError as error:
        raise not_ssh(host, error.args[0]) from None
    except (OSError, EOFError) as error:
        seen = error.args[0] if isinstance(error, EOFError) else b""
        if any(words in seen for words in _BUSY):
            problem = (
                f"{host.host_port} lets nobody in from here for now; it said {seen[:60].decode('ascii', 'replace')!r}"
            )
            hint = "too many log-ins failed or were under way (PerSourcePenalties, MaxStartups): wait some minutes"
            raise Dropped(host.machine, problem, hint) from None
        if seen:
            raise not_ssh(host, seen) from None
        hint = "its SSH server may be overloaded (MaxStartups) or refuse this address; check its log"
        if host.proxy_command:
            hint = f"try it yourself: {host.proxy_command}"
        raise Dropped(host.machine, f"{host.host_port} closed the connection at once", hint) from None
    if not line.startswith((b"SSH-2.0-", b"SSH-1.99-")):
        raise not_ssh(host, line)


def stalled(host: ResolvedHost, silence: str, seconds: float, notice: str = "") -> Stalled:
    """Return the error for a server that went silent, with the notice that it has shown, if any."""
    problem = f"{host.host_port} accepted the connection but {silence} within {span_text(seconds)}"
    if "://" in notice:
        hint = "open the address that it shows, confirm the log-in there, and try again"
        return Stalled(host.machine, f"{problem}; it says: {notice!r}", hint)
    return Stalled(host.machine, problem, "is this the port of its SSH server? Else the machine is overloaded or hung")


def stalled_exchange(host: ResolvedHost, seconds: float) -> Stalled:
    """Return the error for a server that went silent after its identification; the next packets are larger."""
    problem = f"{host.host_port} introduced itself, but the key exchange did not end within {span_text(seconds)}"
    hint = "it is overloaded or hung, or large packets are lost on the way (a VPN's MTU), which this shows: ping -M do"
    return Stalled(host.machine, problem, f"{hint} -s 1400 {host.hostname} (on a Mac: ping -D -s 1400)")


def not_ssh(host: ResolvedHost, seen: bytes) -> NotSsh:
    """Return the error for a server that does not speak SSH."""
    problem = f"what answers at {host.host_port} is not an SSH server; it said {seen[:40].decode('ascii', 'replace')!r}"
    return NotSsh(host.machine, problem, "check 'port' in the hosts file")
