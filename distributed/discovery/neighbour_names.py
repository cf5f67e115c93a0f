"""What an address of this network is called, as far as that is known before a log-in.

The system's name service is asked (the router's DNS, /etc/hosts), and each machine itself by multicast DNS's reverse
question (RFC 6762, section 5.5: sent to its address, so that a Mac or a Linux with Avahi answers for itself alone).
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence

_MDNS_PORT = 5353
_LARGEST = 9000
"""Bytes of an answer, RFC 6762 section 17."""
_MOST_LOOKUPS = 32


def neighbour_names(addresses: Sequence[str], timeout: float = 1.5, mdns_port: int = _MDNS_PORT) -> dict[str, str]:
    """Return the host names, without a domain, of those addresses that have one, within ``timeout`` seconds.

    What a machine says of itself goes before what the name service says. Both are claims: escape them for display.
    """
    end = time.monotonic() + timeout
    answers: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for address in addresses[:_MOST_LOOKUPS]:  # daemons: the system's name service has no limit of time
        threading.Thread(target=_look_up, args=(address, answers.put), name="reverse-dns", daemon=True).start()
    announced = _ask_machines(addresses, end, mdns_port)
    names: dict[str, str] = {}
    with contextlib.suppress(queue.Empty):
        while len(names) < len(addresses[:_MOST_LOOKUPS]):
            address, name = answers.get(timeout=max(0.0, end - time.monotonic()))
            names[address] = name
    return {address: name for address, name in {**names, **announced}.items() if name}


def label_of(name: str) -> str:
    """Return the first label of a host name; empty where that is a number only, or no name of one machine."""
    label = re.sub(r"[^\w-]", "", name.partition(".")[0])[:64]
    return "" if label.isdecimal() or label.casefold() == "localhost" else label


def _look_up(address: str, answer: Callable[[tuple[str, str]], None]) -> None:
    name = ""
    with contextlib.suppress(OSError, UnicodeError):
        name = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    answer((address, label_of(name)))


def _ask_machines(addresses: Sequence[str], end: float, port: int) -> dict[str, str]:
    """Ask each machine for its own name, until ``end`` of :func:`time.monotonic`."""
    from zeroconf import (  # type: ignore[attr-defined]  # takes a while to load; documented, but not in its __all__
        DNSIncoming,
        DNSOutgoing,
        DNSPointer,
        DNSQuestion,
        const,
    )

    names: dict[str, str] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for address in addresses:
            query = DNSOutgoing(const._FLAGS_QR_QUERY, multicast=False)
            query.add_question(DNSQuestion(_reverse(address), const._TYPE_PTR, const._CLASS_IN))
            with contextlib.suppress(OSError):  # no route: the others may have one
                asking.sendto(query.packets()[0], (address, port))
        while len(names) < len(addresses) and (left := end - time.monotonic()) > 0:
            asking.settimeout(left)
            packet, (sender, *_) = asking.recvfrom(_LARGEST)
            pointers = [one for one in DNSIncoming(packet).answers() if isinstance(one, DNSPointer)]
            own = [one.alias for one in pointers if one.name.rstrip(".").casefold() == _reverse(sender).rstrip(".")]
            names |= {sender: label_of(own[0])} if own and sender in addresses else {}
    return {address: name for address, name in names.items() if name}


def _reverse(address: str) -> str:
    return f"{ipaddress.ip_address(address).reverse_pointer}."
