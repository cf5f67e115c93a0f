"""Which paths answer: whether an SSH server is at an endpoint, which host key it has, and, if not, why.

A key exchange is enough to see a machine's host key: nobody logs in, and nothing is written down. :class:`PathWatch`
looks at every endpoint of a state, again and again, as often as it needs.
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
from distributed.ssh.errors import CONNECTION_LIMIT, REMOTE_LOGIN, SshError, UnknownHostKey
from distributed.ssh.host_keys import Expected, HostKeyInfo, Keys
from distributed.ssh.session import open_transport
from distributed.ssh.wire import NO_ROUTE, Deadline, SshStream, in_background
from distributed.system import output

CONNECT_TIMEOUT = 1.5
"""Seconds for a TCP connection in the local network; a sleeping Wi-Fi station takes up to one."""
KEY_EXCHANGE_TIMEOUT = 4.0
_AT_ONCE = 0.3
"""Seconds within which macOS refuses for want of permission; an absent machine takes longer to be given up."""
_IP_BOUND_IF, _IPV6_BOUND_IF = 25, 125
"""macOS: send through this interface only."""
_PROBED_PORT = 9
"""A port that hardly anybody uses: a machine without firewall refuses it, and so shows that it is there."""
_BEST_EVERY = 2.0
"""Seconds between looks at the best path of a machine: gone is noticed within 10 s, time-outs included."""
_OTHERS_EVERY = 10.0
_CONNECT_EVERY = 20.0
"""Seconds between connections to an SSH server that answers, with signs of life of another kind between them: firewalls
limit new connections (``ufw limit``: five in 30 s), and a person's own are counted with ours."""
_MUTE_EVERY = 15.0
"""The same for a machine that gives no other sign of life."""
_RECENT = 60.0
_LONGEST_PAUSE = 15.0
_SECOND_TRY = 1.0
_DIAGNOSE_EVERY = 4
"""Failures between two searches for other signs of life."""
_LOOKS_AT_ONCE = 32
_PER_ADDRESS = 2
"""Looks at one address at once: a neighbour that announces many ports does not hold up the others."""
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
        scope = socket.if_nametoindex(endpoint.interface) if "%" in endpoint.scoped else 0  # OSError: it is gone
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
    """Connect and leave; return why it failed, or ``None``."""
    begin = time.monotonic()
    try:
        _connect(endpoint, timeout).close()
    except OSError as error:
        return explain(error, time.monotonic() - begin, endpoint)
    return None


def read_host_key(endpoint: Endpoint, timeout: float = KEY_EXCHANGE_TIMEOUT, kind: str = "") -> HostKeyInfo | Problem:
    """Agree on keys with the SSH server there, and leave.

    Servers with several host keys are asked for the same kind every time (Ed25519, ECDSA, RSA), so that a machine has
    one identity whichever way it is reached.

    Args:
        kind: ask for a key of this type first.

    Returns:
        Its host key; or why it was not shown.
    """
    begin, deadline = time.monotonic(), Deadline(timeout)
    host = ResolvedHost(endpoint.where, endpoint.address, endpoint.port, "")
    try:
        stream = _connect(endpoint, min(timeout, CONNECT_TIMEOUT))
        open_transport(host, SshStream(stream), None, deadline, (kind,) if kind else ())
    except UnknownHostKey as shown:
        return shown.key
    except SshError as error:
        return Problem(error.cause, error.beside(endpoint.where), error.hint)
    except OSError as error:
        return explain(error, time.monotonic() - begin, endpoint)
    raise AssertionError("a key was taken for a known one without any known_hosts file")


def explain(error: OSError, seconds: float, endpoint: Endpoint, platform: str = sys.platform) -> Problem:
    """Say in one line why a connection failed after so many seconds, and what to do."""
    number = error.errno
    if isinstance(error, TimeoutError) or number == errno.ETIMEDOUT:
        hint = "is it on, awake and in this network?"
        return Problem("timeout", f"no answer from {endpoint.where} ({_over(endpoint)})", hint)
    if number in (errno.ECONNREFUSED, errno.ECONNRESET):
        message = f"{endpoint.address} is there, but no SSH server listens on port {endpoint.port}"
        return Problem("port_closed", message, REMOTE_LOGIN)
    local = endpoint.kind not in (PathKind.ROUTED, PathKind.VPN)
    if platform == "darwin" and number == errno.EHOSTUNREACH and local and seconds < _AT_ONCE:
        message = f"macOS does not let this terminal reach {endpoint.where} (errno 65)"
        return Problem("local_network_permission", message, LOCAL_NETWORK_HINT)
    if number in (errno.EPERM, errno.EACCES):
        message = f"this computer forbids connections to {endpoint.where}"
        return Problem("firewall", message, f"allow outgoing TCP port {endpoint.port} in its own firewall")
    if number in NO_ROUTE:
        message = f"no route to {endpoint.where} ({_over(endpoint)}): no machine there has this address"
        return Problem("no_route", message, "is it on, awake and in this network?")
    return Problem("no_route", f"cannot connect to {endpoint.where}: {error.strerror or error}")


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
    if _pings(endpoint):
        return "answers to ping"
    unused_port = Endpoint(endpoint.address, endpoint.interface, _PROBED_PORT, endpoint.kind)
    failure = knock(unused_port, timeout=1.0)
    return "answers on other ports" if failure is None or failure.cause == "port_closed" else ""


def _pings(endpoint: Endpoint) -> bool:
    names = ("ping6", "ping") if ":" in endpoint.address else ("ping",)
    program = next((path for path in map(shutil.which, names) if path), None)
    return program is not None and bool(output(program, "-n", "-c", "1", endpoint.scoped, timeout=1.5))


# ------------------------------------------------------------------------------------------------------ again and again


def aside(call: Callable[[], _T]) -> Awaitable[_T]:
    """Run a call that blocks beside the event loop, in a thread that nobody waits for at the end."""
    return asyncio.wrap_future(in_background(call))


@dataclass
class _Rounds:
    """When an endpoint is looked at."""

    looked: float = float("-inf")
    failures: int = 0
    busy: bool = False
    reached: float = float("-inf")
    """When its SSH server answered last."""
    mute: bool = False
    """Whether it gave no sign of life when it was asked last, though its SSH server answers."""


class PathWatch:
    """Gives the looks that are due; lives in one event loop.

    Args:
        observe: takes what is found.
        known: names by the fingerprint of their host key.
        read: asks who answers somewhere for its host key.
        connect: sees whether somebody answers somewhere.
        sign: returns by what else somebody shows to be there, empty if by nothing.
        clock: seconds by which looks are due.
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
        self._observe, self._known, self._read, self._connect, self._clock = observe, known_names, read, connect, clock
        self._sign = probe_life
        self._state = State()
        self._rounds: dict[Endpoint, _Rounds] = {}
        self._looking: Counter[str] = Counter()
        self._best: set[Endpoint] = set()
        self._expected: dict[Endpoint, list[Expected]] = {}
        self._unproved: set[Endpoint] = set()
        """Known under a name that was seen after their key, by keys of a type that they were not asked for."""

    def due(self, state: State) -> Iterator[Coroutine[Any, Any, None]]:
        """Give what is to be run now; call it again and again with the newest state."""
        if state is not self._state:
            self._state = state
            self._expected = expected_at(state)
            self._unproved = {e for e, path in state.paths.items() if path.keys and self._unasked(e, path.keys)}
            self._best = {m.paths[0].endpoint for m in machines(state) if m.paths and m.status is Reachability.ONLINE}
            for endpoint in [e for e, rounds in self._rounds.items() if e not in state.paths and not rounds.busy]:
                del self._rounds[endpoint]
        now = self._clock()
        schedules = [(endpoint, self._rounds.setdefault(endpoint, _Rounds())) for endpoint in state.paths]
        # What machines are reached by comes first; after it, nobody is held up by many that are silent.
        for endpoint, rounds in sorted(schedules, key=lambda one: (one[0] not in self._best, one[1].looked)):
            if (
                rounds.busy
                or now < rounds.looked + self._pause(endpoint, rounds)
                or self._looking[endpoint.address] >= _PER_ADDRESS
            ):
                continue
            if self._looking.total() >= _LOOKS_AT_ONCE:
                return
            rounds.busy = True
            self._looking[endpoint.address] += 1
            yield self._look(endpoint, rounds)

    async def _look(self, endpoint: Endpoint, rounds: _Rounds) -> None:
        try:
            if self._is(endpoint, Reachability.ONLINE) and endpoint not in self._unproved:
                await self._knock(endpoint, rounds)
            else:
                await self._identify(endpoint, rounds)
        finally:
            rounds.busy = False
            self._looking -= Counter([endpoint.address])  # which drops what falls to zero
            rounds.looked = self._clock()

    def _pause(self, endpoint: Endpoint, rounds: _Rounds) -> float:
        if rounds.failures:
            return min(_BEST_EVERY * 2.0 ** min(rounds.failures - 1, 10), _LONGEST_PAUSE)
        if endpoint in self._unproved:
            return 0.0
        if rounds.mute:
            return _MUTE_EVERY if endpoint in self._best else _CONNECT_EVERY
        is_frequent = endpoint in self._best or self._is(endpoint, Reachability.CHECKING)
        return _BEST_EVERY if is_frequent else _OTHERS_EVERY

    def _is(self, endpoint: Endpoint, status: Reachability) -> bool:
        """Whether that is known of an endpoint now: it may be forgotten after it was looked at, and seen again."""
        path = self._state.paths.get(endpoint)
        return path is not None and path.status is status

    async def _knock(self, endpoint: Endpoint, rounds: _Rounds) -> None:
        if self._clock() < rounds.reached + _CONNECT_EVERY:
            rounds.mute = not await aside(lambda: self._sign(endpoint))
            if not rounds.mute:
                return
        failure = await aside(lambda: self._connect(endpoint))
        if failure is not None:
            self._hasten_others(endpoint)
            failure = await aside(lambda: self._connect(endpoint, _SECOND_TRY))  # one lost packet is no death
        if failure is not None:
            await self._failed(endpoint, rounds, failure)
        else:
            rounds.reached = self._clock()

    async def _identify(self, endpoint: Endpoint, rounds: _Rounds) -> None:
        result = await aside(lambda: self._read(endpoint))
        keys = {result.key_type: result.fingerprint} if isinstance(result, HostKeyInfo) else {}
        while isinstance(result, HostKeyInfo) and (kinds := self._unasked(endpoint, tuple(keys.items()))):
            kind = kinds[0]
            second_result = await aside(partial(self._read, endpoint, kind=kind))
            if isinstance(second_result, HostKeyInfo):
                keys[kind] = second_result.fingerprint if second_result.key_type == kind else ""
            else:
                result = second_result
        if isinstance(result, HostKeyInfo):
            rounds.failures, rounds.mute, rounds.reached = 0, False, self._clock()
            known_as = self._known.get(result.fingerprint, ())
            self._observe(Identified(endpoint, result.fingerprint, known_as, tuple(keys.items())))
        else:
            await self._failed(endpoint, rounds, result)

    async def _failed(self, endpoint: Endpoint, rounds: _Rounds, problem: Problem) -> None:
        rounds.failures += 1
        if problem.cause == "port_closed" and (ago := self._clock() - rounds.reached) < _RECENT:
            message = f"{endpoint.where} answered {ago:.0f} s ago and refuses connections now"
            problem = Problem(
                problem.cause, message, f"{CONNECTION_LIMIT}; or its SSH server was stopped: {REMOTE_LOGIN}"
            )
        silent = problem.cause == "timeout"
        if not silent or rounds.failures == 1:  # the search for other signs takes its time
            self._observe(Failed(endpoint, problem))
        if silent and rounds.failures % _DIAGNOSE_EVERY == 1:
            sign = await aside(lambda: self._sign(endpoint))
            self._observe(Failed(endpoint, explain_silence(endpoint, sign) if sign else problem))

    def _hasten_others(self, failed: Endpoint) -> None:
        """Look at a machine's other paths as soon as one is lost, so that it is not called offline late or wrongly."""
        for machine in machines(self._state):
            endpoints = [path.endpoint for path in machine.paths]
            if failed in endpoints:
                for endpoint in endpoints:
                    if endpoint != failed and endpoint in self._rounds and not self._rounds[endpoint].failures:
                        self._rounds[endpoint].looked = float("-inf")

    def _unasked(self, endpoint: Endpoint, shown: Keys) -> list[str]:
        """Return the types of key to ask for there, to see whether it is who is known under its names."""
        return sorted({kind for expected in self._expected.get(endpoint, ()) for kind in expected.unasked(shown)})
