"""Browses for machines by multicast DNS on every suitable interface, inside a running event loop.

There is one socket for each interface and IP version. The port is shared with the system's own responder
(mDNSResponder, avahi), so only multicast packets are received.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import struct
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container
from typing import Protocol

from distributed.discovery.mdns_records import BROWSED, LONGEST_PACKET, RecordBook, query_packets
from distributed.discovery.network_interfaces import Interface, Interfaces
from distributed.discovery.sightings import Browsed, Ignored, Observation, Problem
from profiles.installation import program

PORT = 5353
GROUP_4, GROUP_6 = "224.0.0.251", "ff02::fb"
_IP_MULTICAST_ALL, _IPV6_MULTICAST_ALL = 49, 29
"""Linux: turned off so that a packet is not copied to the sockets of all interfaces. The receiving socket is no proof
of the interface (seen on 6.18), so every packet carries its interface index."""
_IP_PKTINFO = {"linux": 8, "darwin": 26}.get(sys.platform, 0)
LOCAL_NETWORK_HINT = (
    "System Settings > Privacy & Security > Local Network: allow the application that runs this terminal, "
    "then start it again"
)
_PTR = 12
_PAUSES = (0.25, 0.75, 2.0, 6.0, 20.0)
"""Seconds between queries; the last value repeats (RFC 6762, 5.2)."""
_SENDER_BUDGET, _TOTAL_BUDGET = 0.1, 0.3
"""Processor time per second for the packets of one sender, and of all; packets beyond it are dropped unread. A packet
costs 0.3 ms, but a crafted one a hundred times as much."""
_PACKETS_AT_ONCE = 64
_MOST_ASKED = 512
"""Maximum questions between two rounds on one interface: a sender may invent names without end."""


class MulticastSocket:
    """Socket that sends to and receives from the mDNS group on one interface.

    Raises:
        OSError: the interface or the port cannot be used.
    """

    def __init__(self, interface: Interface, version: int) -> None:
        self.interface = interface
        self.version = version
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._set_up()
        except BaseException:
            self._socket.close()
            raise

    def _set_up(self) -> None:
        stream, linux = self._socket, sys.platform == "linux"
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Bound to the group, it receives no unicast replies meant for the system's responder; only Linux allows that.
        if self.version == 4:
            source = self.interface.source_address(4)
            assert source is not None
            stream.bind((GROUP_4 if linux else "", PORT))
            level, not_from_all, packet_info = socket.IPPROTO_IP, _IP_MULTICAST_ALL, _IP_PKTINFO
            stream.setsockopt(level, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP_4) + source.ip.packed)
            stream.setsockopt(level, socket.IP_MULTICAST_IF, source.ip.packed)
            stream.setsockopt(level, socket.IP_MULTICAST_TTL, 255)
        else:
            index, group = self.interface.index, socket.inet_pton(socket.AF_INET6, GROUP_6)
            level, not_from_all, packet_info = socket.IPPROTO_IPV6, _IPV6_MULTICAST_ALL, socket.IPV6_RECVPKTINFO
            stream.setsockopt(level, socket.IPV6_V6ONLY, 1)
            stream.bind((GROUP_6, PORT, 0, index) if linux else ("", PORT))
            stream.setsockopt(level, socket.IPV6_JOIN_GROUP, group + struct.pack("@I", index))
            stream.setsockopt(level, socket.IPV6_MULTICAST_IF, index)
            stream.setsockopt(level, socket.IPV6_MULTICAST_HOPS, 255)
        if linux:
            with contextlib.suppress(OSError):  # kernels before 4.20 lack it for IPv6
                stream.setsockopt(level, not_from_all, 0)
        if packet_info:
            stream.setsockopt(level, packet_info, 1)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, packet: bytes) -> Problem | None:
        """Send to the group; return the problem, or ``None``."""
        destination = (GROUP_4, PORT) if self.version == 4 else (GROUP_6, PORT, 0, self.interface.index)
        try:
            self._socket.sendto(packet, destination)
        except BlockingIOError:
            return None  # the queue is full; the query is repeated
        except OSError as error:
            return explain_browsing(self.interface.name, error)
        return None

    def receive(self, size: int) -> tuple[bytes, str, int] | None:
        """Return a packet, its sender, and the index of the receiving interface; ``None`` where nothing waits."""
        try:
            data, ancillary, _, sender = self._socket.recvmsg(size, 256)
        except OSError:
            return None
        index = self.interface.index
        for level, kind, value in ancillary:
            if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO) and len(value) >= 4:
                index = struct.unpack_from("@I", value)[0]  # ipi_ifindex comes first
            elif (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO) and len(value) >= 20:
                index = struct.unpack_from("@I", value, 16)[0]
        return data, str(sender[0]).partition("%")[0], index

    def close(self) -> None:
        self._socket.close()


def explain_browsing(interface: str, error: OSError, platform: str = sys.platform) -> Problem:
    """Explain why multicast DNS does not work on an interface."""
    if error.errno == errno.EHOSTUNREACH and platform == "darwin":
        message = f"macOS does not let this terminal use the local network (errno 65 on {interface})"
        return Problem("local_network_permission", message, LOCAL_NETWORK_HINT)
    if error.errno == errno.EADDRINUSE:
        message = f"another program holds UDP port {PORT} alone, so nothing is received on {interface}"
        return Problem("port_in_use", message, f"find it with: sudo lsof -nP -iUDP:{PORT}")
    if error.errno in (errno.EPERM, errno.EACCES):
        message = f"sending multicast DNS on {interface} is forbidden, by a firewall or a sandbox"
        return Problem("firewall", message, f"allow UDP port {PORT} in the firewall of this computer")
    message = f"multicast DNS does not work on {interface}: {error.strerror or error}"
    return Problem("no_multicast", message, f"name the machine itself: {program('machines', 'discover', 'USER@HOST')}")


class TimeSource(Protocol):
    """Clocks in seconds; the module ``time`` is one."""

    def monotonic(self) -> float:
        """Return the monotonic time."""
        ...

    def thread_time(self) -> float:
        """Return the processor time of this thread."""
        ...


class Browser:
    """Sends queries, and passes on observations from the answers.

    Args:
        clock: schedules queries and measures processor time.
        services: that are asked for.
    """

    def __init__(
        self,
        tell: Callable[[Observation], None],
        clock: TimeSource = time,
        interfaces: Interfaces | None = None,
        services: tuple[str, ...] = BROWSED,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._services = services
        self._book = RecordBook(services)
        self._interfaces = interfaces or Interfaces(())
        self._sockets: dict[tuple[str, int], MulticastSocket] = {}
        self._problems: dict[str, Problem] = {}
        self._asked: dict[str, set[tuple[str, int]]] = {}
        self._round = 0
        self._next_question = 0.0
        self._second = 0
        self._work: defaultdict[str, float] = defaultdict(float)
        """Seconds spent on each sender's packets in this second."""

    def listen_on(self, interfaces: Interfaces) -> None:
        """Listen on these interfaces from now on, and restart the queries."""
        before = {interface.name: interface for interface in self._interfaces.all}
        changed = {name for name, interface in before.items() if interface not in interfaces.all}
        self._close(changed)
        self._interfaces = interfaces
        self._problems.clear()
        for interface in interfaces.browsable:
            for version in (4, 6):
                if interface.source_address(version) is not None and (interface.name, version) not in self._sockets:
                    self._open(interface, version)
        self._round, self._next_question = 0, 0.0
        self._report_interfaces()

    def _open(self, interface: Interface, version: int) -> None:
        try:
            opened = MulticastSocket(interface, version)
        except OSError as error:
            self._problems[interface.name] = explain_browsing(interface.name, error)
            return
        self._sockets[interface.name, version] = opened
        asyncio.get_running_loop().add_reader(opened.fileno(), self.hear, opened)

    def _close(self, interfaces: Container[str]) -> None:
        for key in [key for key in self._sockets if key[0] in interfaces]:
            closed = self._sockets.pop(key)
            asyncio.get_running_loop().remove_reader(closed.fileno())
            closed.close()

    def _report_interfaces(self) -> None:
        names = tuple(dict.fromkeys(name for name, _ in self._sockets if name not in self._problems))
        self._tell(Browsed(names, tuple(self._problems.values())))

    def ask_if_due(self) -> None:
        """Query the services if it is due."""
        now = self._clock.monotonic()
        if now < self._next_question:
            return
        self._next_question = now + _PAUSES[min(self._round, len(_PAUSES) - 1)]
        self._round += 1
        self._asked.clear()
        for observation in self._book.expire(now):
            self._tell(observation)
        failed: dict[str, list[Problem | None]] = {}
        for (name, _), opened in self._sockets.items():
            questions = [(f"{service}.local.", _PTR) for service in self._services] + self._book.questions(name)
            failed.setdefault(name, []).extend(opened.send(packet) for packet in query_packets(questions))
        problems = {name: results[0] for name, results in failed.items() if results and all(results)}
        if problems.keys() - self._problems.keys():
            self._problems.update({name: problem for name, problem in problems.items() if problem is not None})
            self._report_interfaces()

    def hear(self, opened: MulticastSocket) -> None:
        """Process the packets that wait in a socket."""
        heard_on: set[str] = set()
        unread: Counter[str] = Counter()
        now = self._clock.monotonic()
        for _ in range(_PACKETS_AT_ONCE):
            packet = opened.receive(LONGEST_PACKET + 1)
            if packet is None:
                break
            data, source, index = packet
            interface = next((card for card in self._interfaces.all if card.index == index), None)
            if interface is None or not _is_neighbour(interface, source):
                continue
            if self._is_over_budget(source):
                unread[source] += 1
                continue
            begin = self._clock.thread_time()
            for observation in self._book.hear(data, self._interfaces, interface.name, source, now):
                self._tell(observation)
            self._work[source] += self._clock.thread_time() - begin
            heard_on.add(interface.name)
        for source, count in unread.items():
            self._tell(Ignored(source, count))
        for name in heard_on:
            self._ask_missing_records(name)

    def _is_over_budget(self, source: str) -> bool:
        """Whether this sender, or all together, have used up their processor time of this second."""
        second = int(self._clock.monotonic())
        if second != self._second:
            self._second = second
            self._work.clear()
        return self._work.get(source, 0.0) > _SENDER_BUDGET or sum(self._work.values()) > _TOTAL_BUDGET

    def _ask_missing_records(self, name: str) -> None:
        asked = self._asked.setdefault(name, set())
        questions = [question for question in self._book.questions(name) if question not in asked]
        del questions[max(0, _MOST_ASKED - len(asked)) :]
        asked.update(questions)
        for (interface, _), sender in self._sockets.items():
            if interface == name:
                for packet in query_packets(questions) if questions else ():
                    sender.send(packet)

    def close(self) -> None:
        """Stop listening."""
        self._close([name for name, _ in self._sockets])


def _is_neighbour(interface: Interface, source: str) -> bool:
    """Whether a sender is on the interface's own networks; others are ignored (RFC 6762, 11)."""
    try:
        return interface.on_link(ipaddress.ip_address(source))
    except ValueError:
        return True
