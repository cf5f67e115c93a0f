"""Browse for machines by multicast DNS on every suitable interface, inside a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import time
from collections.abc import Callable

from distributed.discovery.mdns_records import BROWSED, LONGEST_PACKET, RecordBook, query_packets
from distributed.discovery.mdns_sockets import MulticastSocket, explain_browsing
from distributed.discovery.network_interfaces import Interface, Interfaces
from distributed.discovery.sightings import Browsed, Ignored, Observation, Problem

_PTR = 12
_PAUSES = (0.25, 0.75, 2.0, 6.0)
"""Seconds between the first questions; after them :data:`_LAST_PAUSE` for ever (RFC 6762, 5.2)."""
_LAST_PAUSE = 20.0
_PACKETS_PER_SECOND = 400
"""From one sender; what it sends more in a second is thrown away unread."""
_PACKETS_AT_ONCE = 64
_MOST_SENDERS = 1024


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
        self._heard: dict[str, int] = {}

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
        now = time.monotonic()
        for _ in range(_PACKETS_AT_ONCE):
            packet = opened.receive(LONGEST_PACKET + 1)
            if packet is None:
                break
            data, source, index = packet
            interface = next((one for one in self._interfaces.all if one.index == index), None)
            if interface is not None and self._may_speak(interface, source):
                for observation in self._book.hear(data, self._interfaces, interface.name, source, now):
                    self._tell(observation)
                heard_on.add(interface.name)
        for name in heard_on:
            self._ask_for_what_is_missing(name)

    def _may_speak(self, interface: Interface, source: str) -> bool:
        """Whether to read a packet: only neighbours may speak (RFC 6762, 11), and only so much a second."""
        with contextlib.suppress(ValueError):
            if not interface.on_link(ipaddress.ip_address(source)):
                return False
        second = int(time.monotonic())
        if second != self._second or len(self._heard) > _MOST_SENDERS:
            self._second, self._heard = second, {}
        count = self._heard[source] = self._heard.get(source, 0) + 1
        if count > _PACKETS_PER_SECOND:
            self._tell(Ignored(source))
        return count <= _PACKETS_PER_SECOND

    def _ask_for_what_is_missing(self, name: str) -> None:
        asked = self._asked.setdefault(name, set())
        questions = [question for question in self._book.questions(name) if question not in asked]
        asked.update(questions)
        for (where, _), sender in self._sockets.items():
            if where == name:
                for packet in query_packets(questions) if questions else ():
                    sender.send(packet)

    def close(self) -> None:
        """Stop listening."""
        for place in list(self._sockets):
            self._close(place)
