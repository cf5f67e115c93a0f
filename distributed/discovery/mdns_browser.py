"""Browse for machines by multicast DNS on every suitable interface, inside a running event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Callable

from distributed.discovery.mdns_records import BROWSED, LONGEST_PACKET, RecordBook, query_packets
from distributed.discovery.mdns_sockets import MulticastSocket, explain_browsing
from distributed.discovery.network_interfaces import Interface, Interfaces
from distributed.discovery.sightings import Browsed, Ignored, Observation, Problem

_PTR = 12
_PAUSES = (0.25, 0.75, 2.0, 6.0)
"""Seconds between the first questions; after them :data:`_LAST_PAUSE` for ever (RFC 6762, 5.2)."""
_LAST_PAUSE = 20.0
_WORK_FOR_ONE, _WORK_FOR_ALL = 0.1, 0.3
"""Seconds of processor time a second for what one sender says, and for all; what comes then is thrown away unread. A
packet costs 0.3 ms, but a crafted one a hundred times as much."""
_PACKETS_AT_ONCE = 64
_MOST_ASKED = 512
"""Questions between two rounds on one interface: whoever invents names all the time is not asked for all of them."""


class Browser:
    """Listens and asks; tells what it hears.

    Args:
        tell: takes every observation.
    """

    def __init__(self, tell: Callable[[Observation], None]) -> None:
        self._tell = tell
        self._book = RecordBook()
        self._interfaces = Interfaces(())
        self._sockets: dict[tuple[str, int], MulticastSocket] = {}
        self._problems: dict[str, Problem] = {}
        self._asked: dict[str, set[tuple[str, int]]] = {}
        self._round = 0
        self._next_question = 0.0
        self._second = 0
        self._work: dict[str, float] = {}
        self._work_of_all = 0.0

    def listen_on(self, interfaces: Interfaces) -> None:
        """Listen on these interfaces from here on, and ask from the beginning."""
        before = {interface.name: interface for interface in self._interfaces.all}
        changed = {name for name, one in before.items() if one not in interfaces.all}
        for place in [place for place in self._sockets if place[0] in changed]:
            self._close(place)
        self._interfaces = interfaces
        self._problems.clear()
        for interface in interfaces.browsable:
            for version in (4, 6):
                if interface.first(version) is not None and (interface.name, version) not in self._sockets:
                    self._open(interface, version)
        self._round, self._next_question = 0, 0.0
        self._tell_where()

    def _open(self, interface: Interface, version: int) -> None:
        try:
            opened = MulticastSocket(interface, version)
        except OSError as error:
            self._problems[interface.name] = explain_browsing(interface.name, error)
            return
        self._sockets[interface.name, version] = opened
        asyncio.get_running_loop().add_reader(opened.fileno(), self._hear, opened)

    def _close(self, place: tuple[str, int]) -> None:
        gone = self._sockets.pop(place)
        asyncio.get_running_loop().remove_reader(gone.fileno())
        gone.close()

    def _tell_where(self) -> None:
        names = tuple(dict.fromkeys(name for name, _ in self._sockets if name not in self._problems))
        self._tell(Browsed(names, tuple(self._problems.values())))

    def ask_if_due(self) -> None:
        """Ask for the services if it is time to."""
        now = time.monotonic()
        if now < self._next_question:
            return
        self._next_question = now + (_PAUSES[self._round] if self._round < len(_PAUSES) else _LAST_PAUSE)
        self._round += 1
        self._asked.clear()
        for observation in self._book.expire(now):
            self._tell(observation)
        failed: dict[str, list[Problem | None]] = {}
        for (name, _), opened in self._sockets.items():
            questions = [(f"{service}.local.", _PTR) for service in BROWSED] + self._book.questions(name)
            failed.setdefault(name, []).extend(opened.send(packet) for packet in query_packets(questions))
        problems = {name: found[0] for name, found in failed.items() if found and all(found)}
        if problems.keys() - self._problems.keys():
            self._problems.update({name: problem for name, problem in problems.items() if problem is not None})
            self._tell_where()

    def _hear(self, opened: MulticastSocket) -> None:
        heard_on: set[str] = set()
        unread: Counter[str] = Counter()
        now = time.monotonic()
        for _ in range(_PACKETS_AT_ONCE):
            packet = opened.receive(LONGEST_PACKET + 1)
            if packet is None:
                break
            data, source, index = packet
            interface = next((one for one in self._interfaces.all if one.index == index), None)
            if interface is None or not _is_neighbour(interface, source):
                continue
            if self._is_too_much(source):
                unread[source] += 1
                continue
            begin = time.thread_time()
            for observation in self._book.hear(data, self._interfaces, interface.name, source, now):
                self._tell(observation)
            self._note_work(source, time.thread_time() - begin)
            heard_on.add(interface.name)
        for source, count in unread.items():
            self._tell(Ignored(source, count))
        for name in heard_on:
            self._ask_for_what_is_missing(name)

    def _is_too_much(self, source: str) -> bool:
        """Whether this sender, or all together, have kept us busy enough in this second."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._work, self._work_of_all = second, {}, 0.0
        return self._work.get(source, 0.0) > _WORK_FOR_ONE or self._work_of_all > _WORK_FOR_ALL

    def _note_work(self, source: str, seconds: float) -> None:
        self._work[source] = self._work.get(source, 0.0) + seconds
        self._work_of_all += seconds

    def _ask_for_what_is_missing(self, name: str) -> None:
        asked = self._asked.setdefault(name, set())
        questions = [question for question in self._book.questions(name) if question not in asked]
        del questions[max(0, _MOST_ASKED - len(asked)) :]
        asked.update(questions)
        for (where, _), sender in self._sockets.items():
            if where == name:
                for packet in query_packets(questions) if questions else ():
                    sender.send(packet)

    def close(self) -> None:
        """Stop listening."""
        for place in list(self._sockets):
            self._close(place)


def _is_neighbour(interface: Interface, source: str) -> bool:
    """Whether a sender is in the interface's own networks: nobody else may speak (RFC 6762, 11)."""
    try:
        return interface.on_link(ipaddress.ip_address(source))
    except ValueError:
        return True
