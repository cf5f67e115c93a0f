"""Computers on this network that share a code: they announce its number by multicast DNS, and nothing else of it.

An announcement proves nothing. Whoever announces the number of a code takes part in an exchange that checks one guess
at the words, as whoever dials a door; so at most :data:`MOST_ASKED` are asked with one code.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable

from distributed.discovery.announce import Announcement
from distributed.discovery.mdns_browser import Browser
from distributed.discovery.mdns_records import JOIN
from distributed.discovery.network_interfaces import Interfaces, list_interfaces
from distributed.discovery.sightings import Browsed, Observation, Problem, Sighting
from distributed.joining.dialling import Meeting
from distributed.joining.pairing.codes import Code
from distributed.joining.pairing.exchange import Introduction
from distributed.joining.pairing.keys import JoiningKey
from profiles.errors import BadInput, MachinesNotReady, MusterError

SEARCH_SECONDS = 8.0
"""Seconds after which a search finds nobody else: answers come within one, or to a question that is repeated."""
MOST_ASKED = 16
_MOST_PER_SOURCE = 2
_OTHERS_SECONDS = 2.0
"""Seconds of the search after which a code that all have refused counts as wrong: another one may have its number."""
_HEAD_START = 1.0
"""Seconds that a sharer has to answer before the next one is asked, too."""
_LONGEST = 30.0
"""Seconds after which sharers that are silent, or not reached, are given up."""
_FOLLOW_EVERY = 5.0
_TICK = 0.1
_GIVE_ADDRESS = "give the address that share shows: --at ADDRESS"


class SlotAnnouncement:
    """Announces in the background that this computer shares a code, until it is closed.

    Where nothing can be announced, the address that ``share`` shows is the way.

    Args:
        slot: number of the code.
        port: TCP port of the door.
    """

    def __init__(self, slot: int, port: int) -> None:
        self._slot, self._port = slot, port
        self._closed = threading.Event()
        threading.Thread(target=self._announce, name="announcement", daemon=True).start()

    def _announce(self) -> None:
        label = secrets.token_hex(8)  # a host name would say whose computer lets others in
        with contextlib.suppress(MachinesNotReady), self._announcement(label) as announcement:
            while not self._closed.wait(_FOLLOW_EVERY):
                announcement.follow_interfaces()

    def _announcement(self, label: str) -> Announcement:
        return Announcement(self._port, label, service=JOIN, properties={"slot": str(self._slot)})

    def close(self) -> None:
        """Withdraw the announcement, in the background. Idempotent."""
        self._closed.set()


class SharerSearch:
    """Browses in the background for computers that share a code with a number; use it as a context manager.

    Args:
        tell: called with the addresses (``host:port``, the best first) of each computer, from a thread of its own.
    """

    def __init__(
        self,
        slot: int,
        tell: Callable[[tuple[str, ...]], None],
        interfaces: Callable[[], Interfaces] = list_interfaces,
    ) -> None:
        self._slot, self._tell, self._list_interfaces = str(slot), tell, interfaces
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._browse()), name="sharers", daemon=True)
        self._told: dict[frozenset[str], str] = {}
        """Sources of the announcements that were told, by their addresses."""
        self.problems: tuple[Problem, ...] = ()
        """Why nothing is heard on an interface."""

    def __enter__(self) -> SharerSearch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    async def _browse(self) -> None:
        browser = Browser(self._observe, services=(JOIN,))
        browser.listen_on(self._list_interfaces())
        try:
            while not self._stopped.is_set():
                browser.ask_if_due()
                await asyncio.sleep(_TICK)
        finally:
            browser.close()

    def _observe(self, observation: Observation) -> None:
        if isinstance(observation, Browsed):
            self.problems = observation.problems
        if isinstance(observation, Sighting) and dict(observation.details).get("slot") == self._slot:
            self._take(observation)

    def _take(self, sighting: Sighting) -> None:
        """Tell the addresses of a computer, once, though it is heard on several interfaces."""
        ranked = sorted(sighting.endpoints, key=lambda endpoint: endpoint.kind.rank)
        addresses = tuple(endpoint.host_port for endpoint in ranked)
        identity = frozenset(address for address in addresses if "%" not in address) or frozenset(addresses)
        source = sighting.key.source
        if identity not in self._told and list(self._told.values()).count(source) < _MOST_PER_SOURCE:
            self._told[identity] = source
            self._tell(addresses)


class _Attempts:
    """Meetings with sharers, each in a thread."""

    def __init__(self, meet: Callable[[str], Meeting]) -> None:
        self._meet = meet
        self._outcomes: queue.SimpleQueue[Meeting | MusterError] = queue.SimpleQueue()
        self.count = self.running = 0
        self.refusal: MusterError | None = None
        """Why the last one came to nothing; that a code was refused says more than that nobody answered."""
        self._last_start = 0.0

    def start(self, addresses: tuple[str, ...]) -> None:
        self.count, self.running, self._last_start = self.count + 1, self.running + 1, time.monotonic()
        threading.Thread(target=self._try, args=(addresses,), name="meeting", daemon=True).start()

    def may_start(self) -> bool:
        late = time.monotonic() - self._last_start >= _HEAD_START
        return self.count < MOST_ASKED and (not self.running or late)

    def _try(self, addresses: tuple[str, ...]) -> None:
        outcome: Meeting | MusterError = MachinesNotReady("it has no address", "")
        for address in addresses:
            try:
                outcome = self._meet(address)
            except MachinesNotReady as error:  # not reached there
                outcome = error
                continue
            except MusterError as error:
                outcome = error
            break
        self._outcomes.put(outcome)

    def next(self, seconds: float) -> Meeting | None:
        """Return the meeting with the computer that knows the code, if it takes place within some seconds."""
        try:
            outcome = self._outcomes.get(timeout=seconds)
        except queue.Empty:
            return None
        self.running -= 1
        if not isinstance(outcome, MusterError):
            return outcome
        if not isinstance(self.refusal, BadInput):
            self.refusal = outcome
        return None


def meet_nearby(
    code: Code, identity: JoiningKey, introduction: Introduction, seconds: float = SEARCH_SECONDS
) -> Meeting:
    """Find the computer on this network that shares a code, and meet it.

    Raises:
        BadInput: who shares a code with this number does not take it.
        MachinesNotReady: there is none.
    """
    sharers: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
    attempts = _Attempts(lambda address: Meeting(code, address, identity, introduction))
    begin = time.monotonic()
    with SharerSearch(code.slot, sharers.put) as search:
        while (past := time.monotonic() - begin) < (_LONGEST if attempts.running else seconds):
            while attempts.may_start() and not sharers.empty():
                attempts.start(sharers.get())
            if (meeting := attempts.next(_TICK)) is not None:
                return meeting
            is_refused = isinstance(attempts.refusal, BadInput) and not attempts.running and sharers.empty()
            if is_refused and past >= _OTHERS_SECONDS:
                break
        raise _failure(code, attempts, search.problems)


def _failure(code: Code, attempts: _Attempts, problems: tuple[Problem, ...]) -> MusterError:
    if attempts.count >= MOST_ASKED:
        problem = f"{attempts.count} computers here say that they share code {code.slot}, and none of those knows it"
        return MachinesNotReady(problem, f"somebody may be in the way: {_GIVE_ADDRESS}")
    if attempts.refusal is not None:
        return attempts.refusal
    problem = f"no computer on this network shares a code with number {code.slot}"
    if not problems:
        return MachinesNotReady(problem, f"does share still run there? From elsewhere {_GIVE_ADDRESS}")
    return MachinesNotReady(f"{problem}; {problems[0].message}", f"{problems[0].hint}; or {_GIVE_ADDRESS}")
