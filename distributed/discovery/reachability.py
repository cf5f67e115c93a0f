"""Probes paths: whether an SSH server answers at an endpoint and with which host key, and if not, why.

A key exchange is enough to see a machine's host key: there is no log-in, and nothing is stored. :class:`PathWatch`
probes every endpoint of a state repeatedly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from distributed.discovery.machine_identity import expected_at, machines
from distributed.discovery.mdns_browser import LOCAL_NETWORK_HINT
from distributed.discovery.network_interfaces import Endpoint, PathKind
from distributed.discovery.sightings import Failed, Identified, Observation, Problem, Reachability, State
from distributed.ssh.config import ResolvedHost
from distributed.ssh.errors import SshError, UnknownHostKey, refused_again, remote_login
from distributed.ssh.keys.host_keys import Expected, HostKeyInfo, Keys
from distributed.ssh.session import open_transport
from distributed.ssh.wire import NO_ROUTE, Deadline, SshStream, in_background
from distributed.system import output

CONNECT_TIMEOUT = 1.5
"""Seconds for a TCP connection in the local network; a sleeping Wi-Fi station takes up to one."""
KEY_EXCHANGE_TIMEOUT = 4.0
_AT_ONCE = 0.3
"""Seconds within which macOS refuses for lack of permission; an absent machine takes longer to fail."""
_IP_BOUND_IF, _IPV6_BOUND_IF = 25, 125
"""macOS socket options: send through this interface only."""
_PROBED_PORT = 9
"""A port that is rarely used: a machine without firewall refuses it, and so shows that it is on."""
_BEST_INTERVAL = 2.0
"""Seconds between probes of the best path of a machine: a loss is noticed within 10 s, time-outs included."""
_OTHERS_INTERVAL = 10.0
_CONNECT_INTERVAL = 20.0
"""Seconds between connections to an SSH server that answers, with other probes between them: firewalls limit new
connections (``ufw limit``: five in 30 s), and the user's own count too."""
_MUTE_INTERVAL = 15.0
"""The same for a machine that answers no other probe."""
_RECENT = 60.0
_LONGEST_PAUSE = 15.0
_SECOND_TRY = 1.0
_DIAGNOSE_AFTER = 4
"""Failures between two searches for other signs of life."""
_CONCURRENT_PROBES = 32
_PER_ADDRESS = 2
"""Concurrent probes of one address, so that a machine that announces many ports does not delay the others."""
_T = TypeVar("_T")


def _connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    """Connect through the endpoint's interface, where the system lets a socket be bound to one."""
    version6 = ":" in endpoint.address
    stream = socket.socket(socket.AF_INET6 if version6 else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if endpoint.interface and endpoint.kind not in (PathKind.HERE, PathKind.ROUTED):
            with contextlib.suppress(OSError):
                _bind_to(stream, endpoint.interface, version6)
        stream.settimeout(timeout)
        # Raises OSError if the interface is gone.
        scope = socket.if_nametoindex(endpoint.interface) if "%" in endpoint.scoped else 0
        address = endpoint.address, endpoint.port
        stream.connect((*address, 0, scope) if version6 else address)
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


def knock(endpoint: Endpoint, timeout: float = CONNECT_TIMEOUT) -> Problem | None:
    """Connect and disconnect; return why it failed, or ``None``."""
    begin = time.monotonic()
    try:
        _connect(endpoint, timeout).close()
    except OSError as error:
        return explain(error, time.monotonic() - begin, endpoint)
    return None


def read_host_key(endpoint: Endpoint, timeout: float = KEY_EXCHANGE_TIMEOUT, kind: str = "") -> HostKeyInfo | Problem:
    """Do a key exchange with the SSH server at an endpoint, and disconnect.

    Servers with several host keys are asked for the same type every time (Ed25519, ECDSA, RSA), so that a machine has
    one identity on every path.

    Args:
        kind: type of key to ask for first.

    Returns:
        Its host key, or why it was not shown.
    """
    begin, deadline = time.monotonic(), Deadline(timeout)
    host = ResolvedHost(endpoint.host_port, endpoint.address, endpoint.port, "")
    try:
        stream = _connect(endpoint, min(timeout, CONNECT_TIMEOUT))
        open_transport(host, SshStream(stream), None, deadline, (kind,) if kind else ())
    except UnknownHostKey as shown:
        return shown.key
    except SshError as error:
        return Problem(error.cause, error.message_for(endpoint.host_port), error.hint)
    except OSError as error:
        return explain(error, time.monotonic() - begin, endpoint)
    raise AssertionError("a key was taken for a known one without any known_hosts file")


def explain(error: OSError, seconds: float, endpoint: Endpoint, platform: str = sys.platform) -> Problem:
    """Explain in one line why a connection failed after ``seconds``, and what to do."""
    number = error.errno
    if isinstance(error, TimeoutError) or number == errno.ETIMEDOUT:
        hint = "is it on, awake and in this network?"
        return Problem("timeout", f"no answer from {endpoint.host_port} ({_over(endpoint)})", hint)
    if number in (errno.ECONNREFUSED, errno.ECONNRESET):
        message = f"{endpoint.host_port} is there, but no SSH server answers"
        return Problem("port_closed", message, remote_login(endpoint.address))
    local = endpoint.kind not in (PathKind.ROUTED, PathKind.VPN)
    if platform == "darwin" and number == errno.EHOSTUNREACH and local and seconds < _AT_ONCE:
        message = f"macOS does not let this terminal reach {endpoint.host_port} (errno 65)"
        return Problem("local_network_permission", message, LOCAL_NETWORK_HINT)
    if number in (errno.EPERM, errno.EACCES):
        message = f"this computer forbids connections to {endpoint.host_port}"
        return Problem("firewall", message, f"allow outgoing TCP port {endpoint.port} in its own firewall")
    if number in NO_ROUTE:
        message = f"no route to {endpoint.host_port} ({_over(endpoint)}): no machine there has this address"
        return Problem("no_route", message, "is it on, awake and in this network?")
    return Problem("no_route", f"cannot connect to {endpoint.host_port}: {error.strerror or error}")


def _over(endpoint: Endpoint) -> str:
    return f"{endpoint.kind.value}, {endpoint.interface}" if endpoint.interface else endpoint.kind.value


def explain_silence(endpoint: Endpoint, sign: str) -> Problem:
    """Explain why a machine that shows a sign of life does not answer on its SSH port."""
    message = f"{endpoint.host_port} {sign} but drops SSH connections: a firewall is in the way"
    hint = (
        "allow SSH there: on a Mac System Settings > Network > Firewall > Options, on Linux sudo ufw allow ssh, "
        "on Windows a firewall rule for that port"
    )
    return Problem("firewall", message, hint)


def sign_of_life(endpoint: Endpoint) -> str:
    """Return how else the machine at an endpoint answers; empty if it does not."""
    if _pings(endpoint):
        return "answers to ping"
    unused_port = Endpoint(endpoint.address, endpoint.interface, _PROBED_PORT, endpoint.kind)
    failure = knock(unused_port, timeout=1.0)
    return "answers on other ports" if failure is None or failure.cause == "port_closed" else ""


def _pings(endpoint: Endpoint) -> bool:
    names = ("ping6", "ping") if ":" in endpoint.address else ("ping",)
    program = next((path for path in map(shutil.which, names) if path), None)
    return program is not None and bool(output(program, "-n", "-c", "1", endpoint.scoped, timeout=1.5))


# --------------------------------------------------------------------------------------------------- repeated probes


def in_thread(call: Callable[[], _T]) -> Awaitable[_T]:
    """Run a blocking call outside the event loop, in a thread that is not joined at exit."""
    return asyncio.wrap_future(in_background(call))


@dataclass
class _Schedule:
    """When an endpoint was and is to be probed."""

    looked: float = float("-inf")
    failures: int = 0
    busy: bool = False
    reached: float = float("-inf")
    """When its SSH server last answered."""
    mute: bool = False
    """Whether the last probe other than SSH failed although its SSH server answers."""


class PathWatch:
    """Schedules the probes that are due; belongs to one event loop.

    Args:
        observe: receives the observations.
        known_names: names by the fingerprint of their host key.
        read: reads the host key at an endpoint.
        connect: tests whether an endpoint accepts connections.
        probe_life: returns how else a machine answers, empty if it does not.
        clock: monotonic clock of the schedule.
    """

    def __init__(
        self,
        observe: Callable[[Observation], None],
        known_names: Mapping[str, tuple[str, ...]],
        read: Callable[..., HostKeyInfo | Problem] = read_host_key,
        connect: Callable[..., Problem | None] = knock,
        clock: Callable[[], float] = time.monotonic,
        probe_life: Callable[[Endpoint], str] = sign_of_life,
    ) -> None:
        self._observe, self._known_names, self._clock = observe, known_names, clock
        self._read, self._connect = read, connect
        self._probe_life = probe_life
        self._state = State()
        self._schedules: dict[Endpoint, _Schedule] = {}
        self._in_progress: Counter[str] = Counter()
        self._best: set[Endpoint] = set()
        self._expected: dict[Endpoint, list[Expected]] = {}
        self._unverified: set[Endpoint] = set()
        """Endpoints whose name was learnt after their key was read, and has known keys of a type not yet asked for."""

    def due(self, state: State) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the probes to run now; call it repeatedly with the newest state."""
        if state is not self._state:
            self._state = state
            self._expected = expected_at(state)
            self._unverified = {e for e, path in state.paths.items() if path.keys and self._unasked(e, path.keys)}
            self._best = {m.paths[0].endpoint for m in machines(state) if m.paths and m.status is Reachability.ONLINE}
            for endpoint in [
                e for e, schedule in self._schedules.items() if e not in state.paths and not schedule.busy
            ]:
                del self._schedules[endpoint]
        now = self._clock()
        schedules = [(endpoint, self._schedules.setdefault(endpoint, _Schedule())) for endpoint in state.paths]
        # The best paths come first; among the others, those probed longest ago, so that silent ones delay none.
        for endpoint, schedule in sorted(schedules, key=lambda pair: (pair[0] not in self._best, pair[1].looked)):
            if (
                schedule.busy
                or now < schedule.looked + self._pause(endpoint, schedule)
                or self._in_progress[endpoint.address] >= _PER_ADDRESS
            ):
                continue
            if self._in_progress.total() >= _CONCURRENT_PROBES:
                return
            schedule.busy = True
            self._in_progress[endpoint.address] += 1
            yield self._probe(endpoint, schedule)

    async def _probe(self, endpoint: Endpoint, schedule: _Schedule) -> None:
        try:
            if self._is(endpoint, Reachability.ONLINE) and endpoint not in self._unverified:
                await self._knock(endpoint, schedule)
            else:
                await self._identify(endpoint, schedule)
        finally:
            schedule.busy = False
            self._in_progress -= Counter([endpoint.address])  # drops counts of zero
            schedule.looked = self._clock()

    def _pause(self, endpoint: Endpoint, schedule: _Schedule) -> float:
        if schedule.failures:
            return min(_BEST_INTERVAL * 2.0 ** min(schedule.failures - 1, 10), _LONGEST_PAUSE)
        if endpoint in self._unverified:
            return 0.0
        if schedule.mute:
            return _MUTE_INTERVAL if endpoint in self._best else _CONNECT_INTERVAL
        is_frequent = endpoint in self._best or self._is(endpoint, Reachability.CHECKING)
        return _BEST_INTERVAL if is_frequent else _OTHERS_INTERVAL

    def _is(self, endpoint: Endpoint, status: Reachability) -> bool:
        """Whether an endpoint has this status now; it may have been forgotten since it was probed."""
        path = self._state.paths.get(endpoint)
        return path is not None and path.status is status

    async def _knock(self, endpoint: Endpoint, schedule: _Schedule) -> None:
        if self._clock() < schedule.reached + _CONNECT_INTERVAL:
            schedule.mute = not await in_thread(lambda: self._probe_life(endpoint))
            if not schedule.mute:
                return
        failure = await in_thread(lambda: self._connect(endpoint))
        if failure is not None:
            self._probe_siblings_soon(endpoint)
            failure = await in_thread(
                lambda: self._connect(endpoint, _SECOND_TRY)
            )  # a single lost packet does not count
        if failure is not None:
            await self._failed(endpoint, schedule, failure)
        else:
            schedule.reached = self._clock()

    async def _identify(self, endpoint: Endpoint, schedule: _Schedule) -> None:
        result = await in_thread(lambda: self._read(endpoint))
        keys = {result.key_type: result.fingerprint} if isinstance(result, HostKeyInfo) else {}
        while isinstance(result, HostKeyInfo) and (kinds := self._unasked(endpoint, tuple(keys.items()))):
            kind = kinds[0]
            second_result = await in_thread(partial(self._read, endpoint, kind=kind))
            if isinstance(second_result, HostKeyInfo):
                keys[kind] = second_result.fingerprint if second_result.key_type == kind else ""
            else:
                result = second_result
        if isinstance(result, HostKeyInfo):
            schedule.failures, schedule.mute, schedule.reached = 0, False, self._clock()
            known_as = self._known_names.get(result.fingerprint, ())
            self._observe(Identified(endpoint, result.fingerprint, known_as, tuple(keys.items())))
        else:
            await self._failed(endpoint, schedule, result)

    async def _failed(self, endpoint: Endpoint, schedule: _Schedule, problem: Problem) -> None:
        schedule.failures += 1
        if problem.cause == "port_closed" and (ago := self._clock() - schedule.reached) < _RECENT:
            problem = Problem(problem.cause, *refused_again(endpoint.host_port, endpoint.address, ago))
        silent = problem.cause == "timeout"
        if not silent or schedule.failures == 1:  # the search for other signs takes its time
            self._observe(Failed(endpoint, problem))
        if silent and schedule.failures % _DIAGNOSE_AFTER == 1:
            sign = await in_thread(lambda: self._probe_life(endpoint))
            self._observe(Failed(endpoint, explain_silence(endpoint, sign) if sign else problem))

    def _probe_siblings_soon(self, failed: Endpoint) -> None:
        """Probe a machine's other paths at once when one is lost, so that it is not reported offline wrongly."""
        for machine in machines(self._state):
            endpoints = [path.endpoint for path in machine.paths]
            if failed in endpoints:
                for endpoint in endpoints:
                    if endpoint != failed and endpoint in self._schedules and not self._schedules[endpoint].failures:
                        self._schedules[endpoint].looked = float("-inf")

    def _unasked(self, endpoint: Endpoint, shown: Keys) -> list[str]:
        """Return the types of key to ask for at an endpoint, to verify that it is the machine known under its names."""
        return sorted({kind for expected in self._expected.get(endpoint, ()) for kind in expected.unasked(shown)})
