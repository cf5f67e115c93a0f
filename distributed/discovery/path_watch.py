"""Which paths answer: every endpoint of a state is looked at, again and again, at a pace that fits it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from distributed.discovery.known_machines import KnownKeys
from distributed.discovery.machine_identity import expected_at, machines
from distributed.discovery.network_interfaces import Endpoint
from distributed.discovery.reachability import Failure, explain, explain_silence, knock, read_host_key, sign_of_life
from distributed.discovery.sightings import Failed, Identified, Observation, Problem, State, Status
from distributed.ssh.host_keys import Expected, HostKeyInfo, Keys

_T = TypeVar("_T")
_BEST_EVERY = 2.0
"""Seconds between knocks at the best path of a machine: gone is noticed within 10 s, time-outs included."""
_OTHERS_EVERY = 10.0
_LONGEST_PAUSE = 15.0
_SECOND_TRY = 1.0
_DIAGNOSE_EVERY = 4
"""Failures between two searches for other signs of life."""
_LOOKS_AT_ONCE = 32
_PER_ADDRESS = 2
"""Looks at one address at once: a neighbour that announces many ports does not hold up the others."""


class Aside(Protocol):
    """Runs a call that blocks beside the event loop."""

    def __call__(self, call: Callable[[], _T]) -> Awaitable[_T]: ...


@dataclass
class _Rounds:
    """When an endpoint is looked at."""

    looked: float = float("-inf")
    failures: int = 0
    identified: bool = False
    busy: bool = False


class PathWatch:
    """Gives the looks that are due; lives in one event loop.

    Args:
        observe: takes what is found.
        aside: runs calls that block.
        known: names by host key.
    """

    def __init__(self, observe: Callable[[Observation], None], aside: Aside, known: KnownKeys) -> None:
        self._observe, self._aside, self._known = observe, aside, known
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
            self._best = {m.paths[0].endpoint for m in machines(state) if m.paths and m.status is Status.ONLINE}
            for endpoint in [e for e, rounds in self._rounds.items() if e not in state.paths and not rounds.busy]:
                del self._rounds[endpoint]
        now = time.monotonic()
        for endpoint in state.paths:
            rounds = self._rounds.setdefault(endpoint, _Rounds())
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
            if rounds.identified and endpoint not in self._unproved:
                await self._knock(endpoint, rounds)
            else:
                await self._identify(endpoint, rounds)
        finally:
            rounds.busy = False
            self._looking -= Counter([endpoint.address])  # which drops what falls to zero
            rounds.looked = time.monotonic()

    def _pause(self, endpoint: Endpoint, rounds: _Rounds) -> float:
        if rounds.failures:
            return min(_BEST_EVERY * 2.0 ** min(rounds.failures - 1, 10), _LONGEST_PAUSE)
        if endpoint in self._unproved:
            return 0.0
        return _BEST_EVERY if endpoint in self._best else _OTHERS_EVERY

    async def _knock(self, endpoint: Endpoint, rounds: _Rounds) -> None:
        failure = await self._aside(lambda: knock(endpoint))
        if failure is not None:
            self._hasten_others(endpoint)
            failure = await self._aside(lambda: knock(endpoint, _SECOND_TRY))  # one lost packet is no death
        if failure is not None:
            await self._failed(endpoint, rounds, failure)

    async def _identify(self, endpoint: Endpoint, rounds: _Rounds) -> None:
        seen = await self._aside(lambda: read_host_key(endpoint))
        keys = {seen.key_type: seen.fingerprint} if isinstance(seen, HostKeyInfo) else {}
        while isinstance(seen, HostKeyInfo) and (kinds := self._unasked(endpoint, tuple(keys.items()))):
            kind = kinds[0]
            other = await self._aside(partial(read_host_key, endpoint, kind=kind))
            if isinstance(other, HostKeyInfo):
                keys[kind] = other.fingerprint if other.key_type == kind else ""
            else:
                seen = other
        if isinstance(seen, HostKeyInfo):
            rounds.identified, rounds.failures = True, 0
            known_as = self._known.names.get(seen.fingerprint, ())
            self._observe(Identified(endpoint, seen.fingerprint, known_as, tuple(keys.items())))
        else:
            await self._failed(endpoint, rounds, seen)

    async def _failed(self, endpoint: Endpoint, rounds: _Rounds, seen: Failure | Problem) -> None:
        rounds.failures += 1
        rounds.identified = False  # who answers there next may be another machine
        if isinstance(seen, Problem):
            self._observe(Failed(endpoint, seen))
            return
        problem = explain(seen, endpoint)
        if problem.cause != "timeout":
            self._observe(Failed(endpoint, problem))
        elif rounds.failures % _DIAGNOSE_EVERY == 1:
            if rounds.failures == 1:
                self._observe(Failed(endpoint, problem))  # the search for other signs takes its time
            sign = await self._aside(lambda: sign_of_life(endpoint))
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
