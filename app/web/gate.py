"""Who may come in: one-time tickets, session cookies, and the names under which this server is asked for.

No network in here. Why each is checked: the ticket, because every program of every user of this machine can reach a
loopback port; the Host header, because a page from outside can make its own name point here (DNS rebinding); the Origin
header, because a page from outside can open a WebSocket to anywhere, and the browser adds the cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets

_MOST_SESSIONS = 64


class Gate:
    """Hands out tickets, turns each into one session, and knows the sessions."""

    def __init__(self) -> None:
        self._tickets: list[str] = []
        self._sessions: list[str] = []

    def new_ticket(self) -> str:
        """Return a ticket that lets one browser in, once; an earlier one that nobody used is worth nothing any more."""
        self._tickets = [secrets.token_urlsafe(32)]
        return self._tickets[0]

    def redeem(self, ticket: str) -> str | None:
        """Return a new session for a ticket that was not used yet, else nothing."""
        if not _among(ticket, self._tickets):
            return None
        self._tickets = []
        session = secrets.token_urlsafe(32)
        self._sessions = [*self._sessions, session][-_MOST_SESSIONS:]
        return session

    def admits(self, session: str) -> bool:
        """Whether a session is one of ours."""
        return _among(session, self._sessions)


def _among(given: str, known: list[str]) -> bool:
    """Compare with all in a time that does not depend on how much of one fits."""
    found = [hmac.compare_digest(given.encode("utf-8", "surrogatepass"), one.encode()) for one in known]
    return any(found)


class Names:
    """Under which names this server may be asked for.

    Args:
        address: it listens on; ``0.0.0.0`` or ``::`` stand for all of this machine's.
        port: it listens on.
        own: names of this machine.
    """

    def __init__(self, address: str, port: int, own: tuple[str, ...] = ()) -> None:
        self._port = port
        self._any_address = ipaddress.ip_address(address).is_unspecified
        self._names = {"localhost", "127.0.0.1", "[::1]", bracketed(address)}
        if not ipaddress.ip_address(address).is_loopback:
            self._names |= {name.lower() for name in own if name}

    def is_ours(self, host: str) -> bool:
        """Whether a Host header means this server. Where it listens on all addresses, any literal address does: only a
        name can be made to point here by somebody else."""
        name, colon, port = host.rpartition(":")
        if not colon or name.endswith(":") or port != str(self._port):
            return False
        return name.lower() in self._names or (self._any_address and _is_address(name))

    def is_same_origin(self, origin: str, host: str) -> bool:
        """Whether an Origin header is of a page of this server, as it was asked for."""
        return origin.lower() == f"http://{host.lower()}"


def bracketed(address: str) -> str:
    """Return an address as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def _is_address(name: str) -> bool:
    """Whether it is a literal address as it stands in a URL."""
    inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return (ipaddress.ip_address(inner).version == 6) == (inner != name)
    except ValueError:
        return False
