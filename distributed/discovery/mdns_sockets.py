"""Multicast DNS sockets: one for each interface and IP version, so that it is known where a packet came in.

The port is shared with the system's own responder (mDNSResponder, avahi): we only listen to what is multicast.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys

from distributed.discovery.network_interfaces import Interface
from distributed.discovery.sightings import Problem

PORT = 5353
GROUP_4, GROUP_6 = "224.0.0.251", "ff02::fb"
_IP_MULTICAST_ALL, _IPV6_MULTICAST_ALL = 49, 29
"""Linux: off, a packet is not copied to the sockets of all interfaces. Which one gets it is no proof of where it came
in (seen on 6.18), so every packet is asked for its interface."""
_IP_PKTINFO = {"linux": 8, "darwin": 26}.get(sys.platform, 0)
LOCAL_NETWORK_HINT = (
    "System Settings > Privacy & Security > Local Network: allow the application that runs this terminal, "
    "then start it again"
)


class MulticastSocket:
    """Sends to and hears the mDNS group on one interface.

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
        stream = self._socket
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Bound to the group, it takes no unicast answer away from the system's responder; only Linux allows that.
        linux = sys.platform == "linux"
        if self.version == 4:
            own = self.interface.first(4)
            assert own is not None
            stream.bind((GROUP_4 if linux else "", PORT))
            member = socket.inet_aton(GROUP_4) + own.ip.packed
            stream.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
            stream.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own.ip.packed)
            stream.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
            self._not_from_all(socket.IPPROTO_IP, _IP_MULTICAST_ALL)
            if _IP_PKTINFO:
                stream.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        else:
            stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            stream.bind((GROUP_6, PORT, 0, self.interface.index) if linux else ("", PORT))
            member = socket.inet_pton(socket.AF_INET6, GROUP_6) + struct.pack("@I", self.interface.index)
            stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
            stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, self.interface.index)
            stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
            self._not_from_all(socket.IPPROTO_IPV6, _IPV6_MULTICAST_ALL)
            stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)

    def _not_from_all(self, level: int, option: int) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # kernels before 4.20 lack it for IPv6
                self._socket.setsockopt(level, option, 0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, packet: bytes) -> Problem | None:
        """Send to the group; return why it cannot be done."""
        to = (GROUP_4, PORT) if self.version == 4 else (GROUP_6, PORT, 0, self.interface.index)
        try:
            self._socket.sendto(packet, to)
        except BlockingIOError:
            return None  # the queue is full; it is asked again
        except OSError as error:
            return explain_browsing(self.interface.name, error)
        return None

    def receive(self, size: int) -> tuple[bytes, str, int] | None:
        """Return a packet, who sent it, and the index of the interface it came in on; ``None`` where nothing waits."""
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
    """Say in one line why multicast DNS does not work on an interface."""
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
    return Problem("no_multicast", message, "name the machine itself: discover USER@HOST")
