"""Discovers machines: by multicast DNS on all interfaces and from known machines, and checks whether they answer.

::

    with Discovery(Sources(typed=("ada@studio.local",))) as discovery:
        version = discovery.wait(0, timeout=3.0)
        for machine in machines(discovery.state): ...

An announcement proves nothing: the record of a machine that was switched off lives on for minutes. So every path is
probed repeatedly, and a machine is online while one of its paths answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from functools import lru_cache
from typing import Any

from distributed.discovery.known_machines import (
    MachineCandidate,
    Sources,
    candidates,
    joined_candidates,
    look_up,
    own_endpoints,
    read_known_keys,
    with_expected,
)
from distributed.discovery.machine_identity import machines
from distributed.discovery.mdns_browser import Browser
from distributed.discovery.network_interfaces import Interfaces, list_interfaces
from distributed.discovery.reachability import PathWatch, in_thread
from distributed.discovery.sightings import (
    MOST_SIGHTINGS,
    Observation,
    Sighting,
    SightingKey,
    SightingOrigin,
    State,
    apply,
)
from distributed.ssh.keys.host_keys import KnownHosts

__all__ = ["Discovery", "Sources", "State", "machines"]

_TICK = 0.2
_LOOK_UPS_AT_ONCE = 8


class Discovery:
    """Discovers machines in the background until it is closed. Its methods may be called from any thread.

    Args:
        sources: known machines to include besides those on the network.
        browse: whether to listen for announcements at all.
        interfaces: lists the interfaces of this computer, called every ``interfaces_interval`` seconds.
        look: resolves the names of one candidate.
        retry_interval: seconds after which a failed look-up is repeated.

    Raises:
        BadInput: a hosts file cannot be used.
    """

    def __init__(
        self,
        sources: Sources | None = None,
        browse: bool = True,
        *,
        interfaces: Callable[[], Interfaces] = list_interfaces,
        interfaces_interval: float = 3.0,
        look: Callable[[MachineCandidate, Interfaces], Sighting | None] = look_up,
        retry_interval: float = 10.0,
    ) -> None:
        self._list_interfaces, self._interfaces_every = interfaces, interfaces_interval
        self._look, self._failed_every = look, retry_interval
        self._sources = sources or Sources()
        self._known_keys = read_known_keys(self._sources.known_hosts)
        self._candidates = candidates(self._sources, self._known_keys)
        hosts = KnownHosts.read(self._sources.known_hosts)
        self._expected = lru_cache(MOST_SIGHTINGS)(hosts.expected)
        self._interfaces, self._interfaces_due = interfaces(), 0.0
        self._browser = Browser(self._observe) if browse else None
        self._state, self._version = State(), 0
        self._changed = threading.Condition()
        self._paths = PathWatch(self._observe, self._known_keys.names)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop, self._look_ups_due, self._all_due = asyncio.Event(), asyncio.Event(), True
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def __enter__(self) -> Discovery:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop discovering. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    @property
    def state(self) -> State:
        with self._changed:
            return self._state

    @property
    def hashed_names(self) -> int:
        """Entries of known_hosts whose names are hashed and so cannot be listed."""
        return self._known_keys.hashed

    def wait(self, seen: int, timeout: float) -> int:
        """Wait until the state is newer than version ``seen``, at most ``timeout`` seconds; return its version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > seen, timeout)
            return self._version

    # ------------------------------------------------------------------------------------------------ the loop's thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        self._look_ups_due.set()
        self._spawn(self._look_up_periodically())
        try:
            self._listen()
            while not self._stop.is_set():
                self._refresh_interfaces()
                if self._browser is not None:
                    self._browser.ask_if_due()
                for look in self._paths.due(self._state):
                    self._spawn(look)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _TICK)
        finally:
            if self._browser is not None:
                self._browser.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _observe(self, observation: Observation) -> None:
        if isinstance(observation, Sighting):
            observation = with_expected(observation, self._expected)
        state = apply(self._state, observation)
        if state is not self._state:
            with self._changed:
                self._state, self._version = state, self._version + 1
                self._changed.notify_all()

    # -------------------------------------------------------------------------------------------------- observations

    def _listen(self) -> None:
        """Observe this computer with its current interfaces, and listen for announcements on them."""
        name = socket.gethostname()
        key = SightingKey(SightingOrigin.HERE, "", name.casefold())
        local = name if name.endswith(".local") else f"{name}.local"
        self._observe(Sighting(key, name.partition(".")[0], local, own_endpoints(self._interfaces)))
        if self._browser is not None:
            self._browser.listen_on(self._interfaces)

    async def _look_up_periodically(self) -> None:
        """Look up all candidates whenever due, one pass at a time: interfaces may come and go."""
        limit, failed = asyncio.Semaphore(_LOOK_UPS_AT_ONCE), set[SightingKey]()

        async def look_up_candidate(candidate: MachineCandidate) -> None:
            async with limit:
                interfaces = self._interfaces
                sighting = await in_thread(lambda: self._look(candidate, interfaces))
            (failed.add if sighting and sighting.problem else failed.discard)(candidate.key)
            if sighting is not None:
                self._observe(sighting)

        while True:
            # Not wait_for: before Python 3.12 it may swallow that this task is cancelled, and closing would hang.
            timer = self._loop.call_later(self._failed_every, self._look_ups_due.set)
            await self._look_ups_due.wait()
            timer.cancel()
            is_all_due, self._all_due = self._all_due, False
            self._look_ups_due.clear()
            known = {candidate.key for candidate in self._candidates}
            new = [candidate for candidate in joined_candidates(self._sources) if candidate.key not in known]
            self._candidates += new
            failed.update(candidate.key for candidate in new)
            due = [candidate for candidate in self._candidates if is_all_due or candidate.key in failed]
            await asyncio.gather(*map(look_up_candidate, due))

    def _refresh_interfaces(self) -> None:
        now = time.monotonic()
        if now < self._interfaces_due:
            return
        self._interfaces_due = now + self._interfaces_every
        interfaces = self._list_interfaces()
        if interfaces != self._interfaces:
            self._interfaces = interfaces
            self._listen()
            self._all_due = True
            self._look_ups_due.set()
