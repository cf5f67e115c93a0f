"""Downloads over ``https``, bounded in every direction: bytes, seconds, redirects, attempts, and where they may lead.

The addresses in a table are a stranger's. They are connected to only where they are public ones, unless a person allows
others; the address that was checked is the one that is dialled, so a name that changes its address in between leads
nowhere else. Every redirect is checked in the same way.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, quote, urljoin, urlsplit

import certifi

from profiles.errors import BadInput, counted
from training.recordings.recording import ExclusionReason, UnusableRecording

_BLOCK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class FetchLimits:
    """What one download, and all together, may take."""

    file_bytes: int = 500_000_000
    total_bytes: int = 100_000_000_000
    silence: float = 30.0
    """Seconds without a byte, or to connect."""
    file_seconds: float = 900.0
    attempts: int = 4
    pause: float = 1.0
    """Seconds before the second attempt; doubled before every further one."""
    allow_private: bool = False
    """Whether addresses that are not public may be asked."""
    ca_file: Path | None = None
    """Certificates to trust besides the system's; ``SSL_CERT_FILE`` replaces those."""


class FetchCancelled(Exception):
    """Somebody asked for the end."""


class TooMuch(Exception):
    """All downloads together have reached their bound."""


class _Passing(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, detail: str, pause: float = 0.0) -> None:
        super().__init__(detail)
        self.pause = pause


class Fetcher:
    """Downloads files; safe to be shared by threads.

    Args:
        fetched: bytes that earlier runs have fetched, which count.

    Raises:
        BadInput: the file with certificates cannot be read.
    """

    def __init__(self, limits: FetchLimits, fetched: int = 0) -> None:
        self._limits = limits
        self._context = _trusting(limits.ca_file)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._open: set[_CheckedConnection] = set()
        self._fetched = fetched

    def fetch(self, url: str, target: Path) -> int:
        """Write what is at ``url`` to ``target``; return its bytes.

        Raises:
            UnusableRecording: it cannot be had; the reason says why.
            FetchCancelled, TooMuch: see there.
        """
        pause, failure = self._limits.pause, "no attempt"
        for attempt in range(self._limits.attempts):
            if attempt and self._stop.wait(pause):
                raise FetchCancelled
            try:
                return self._follow(url, target)
            except _Passing as error:
                failure = str(error)
                pause = min(_LONGEST_PAUSE, max(error.pause, self._limits.pause * 2**attempt))
        raise _unusable(f"{failure} ({counted(self._limits.attempts, 'attempt')})", may_pass=True)

    def cancel(self) -> None:
        """End all downloads and pauses at once; they raise :class:`FetchCancelled`."""
        self._stop.set()
        with self._lock:
            for connection in self._open:
                connection.break_off()

    def _follow(self, url: str, target: Path) -> int:
        deadline = time.monotonic() + self._limits.file_seconds
        for _ in range(_MOST_REDIRECTS + 1):
            with self._asked(url) as response:
                if response.status == 200:
                    return self._write(response, target, deadline)
                where = response.headers.get("Location", "")
                if response.status not in _REDIRECTS or not where:
                    raise _refused(response)
            url = urljoin(url, where)
        raise _unusable(f"more than {_MOST_REDIRECTS} redirects")

    @contextlib.contextmanager
    def _asked(self, url: str) -> Iterator[http.client.HTTPResponse]:
        """Send the request; give the answer, whose body is still to come."""
        parts = checked(url)
        connection = _CheckedConnection(parts, self._context, self._limits)
        with self._lock:
            self._open.add(connection)
        target = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        target += f"?{quote(parts.query, safe=_QUERY)}" if parts.query else ""
        try:
            connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "muster"})
            with connection.getresponse() as response:
                yield response
        except ssl.SSLCertVerificationError as error:
            raise _unusable(f"certificate: {error.verify_message}", may_pass=True) from error
        except (OSError, http.client.HTTPException) as error:
            if self._stop.is_set():
                raise FetchCancelled from error
            raise _Passing(_words(error)) from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _write(self, response: http.client.HTTPResponse, target: Path, deadline: float) -> int:
        limit, told = self._limits.file_bytes, response.length
        if told is not None and told > limit:
            raise _too_large(limit)
        count = 0
        with target.open("wb") as file:
            while block := response.read1(_BLOCK):
                count += len(block)
                self._count(len(block))
                if count > limit:
                    raise _too_large(limit)
                if time.monotonic() > deadline:
                    raise _unusable(f"not done after {self._limits.file_seconds:.0f} s", may_pass=True)
                try:
                    file.write(block)
                except OSError as error:
                    raise BadInput(f"{target.parent}: {error.strerror}", "free some space") from error
        if told is not None and count < told:
            raise _Passing(f"ended after {count} of {told} bytes")
        return count

    def _count(self, fresh: int) -> None:
        if self._stop.is_set():
            raise FetchCancelled
        with self._lock:
            self._fetched += fresh
            if self._fetched > self._limits.total_bytes:
                raise TooMuch


_QUERY = "/%:@!$&'()*+,;=~-._?[]"


def checked(url: str) -> SplitResult:
    """Return the parts of an address that may be asked, as far as its text tells.

    Raises:
        UnusableRecording: no ``https``, no host, a name and password in it, or no address at all.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise _unusable(f"not an address: {error}") from error
    if parts.scheme.lower() != "https":
        raise UnusableRecording(
            ExclusionReason.NOT_HTTPS, f"leads to {parts.scheme or 'no scheme'}, only https is followed"
        )
    if not host:
        raise _unusable("an address without a host")
    if parts.username is not None:
        raise _unusable("an address with a user name in it is not followed")
    return parts


def public(address: str) -> bool:
    """Whether an IP address is one of the open network, and not of this machine, its network or a carrier's."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found.sixtofour or found
    return found.is_global and not found.is_multicast


class _CheckedConnection(http.client.HTTPSConnection):
    """A TLS connection to an address that was looked at first."""

    def __init__(self, parts: SplitResult, context: ssl.SSLContext, limits: FetchLimits) -> None:
        host = parts.hostname or ""
        try:
            name = host if host.isascii() else host.encode("idna").decode()
            super().__init__(name, parts.port or 443, timeout=limits.silence, context=context)
        except (UnicodeError, http.client.InvalidURL) as error:
            raise _unusable("not the name of a host") from error
        self._tls, self._limits = context, limits
        self._socket: ssl.SSLSocket | None = None  # kept: a response that ends with its connection takes ``sock`` away

    def connect(self) -> None:
        failure: OSError | None = None
        for address in self._addresses():
            try:
                plain = socket.create_connection((address, self.port), self._limits.silence)
            except OSError as error:
                failure = error
                continue
            try:
                self.sock = self._socket = self._tls.wrap_socket(plain, server_hostname=self.host)
            except BaseException:
                plain.close()
                raise
            return
        raise failure or OSError("no address")

    def break_off(self) -> None:
        """Let whoever waits for this connection fail now."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (UnicodeError, ValueError) as error:  # a label of more than 63 letters; a zero byte
            raise _unusable("not the name of a host") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        allowed = addresses if self._limits.allow_private else [one for one in addresses if public(one)]
        if addresses and not allowed:
            raise _unusable(f"{addresses[0]} is not a public address; --allow-private allows it")
        return allowed


def _trusting(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and paths.capath is None:  # a Python that was built for another system
        context.load_verify_locations(certifi.where())
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"{ca_file}: no certificates in it: {_words(error)}", "name a PEM file") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _refused(response: http.client.HTTPResponse) -> Exception:
    said = f"the server said {response.status} {' '.join(response.reason.split())[:60]}".strip()
    if response.status in _TRY_AGAIN:
        after = response.headers.get("Retry-After", "")
        return _Passing(said, float(after) if after.isascii() and after.isdigit() and len(after) < 6 else 0.0)
    return _unusable(said, may_pass=True)


def _too_large(limit: int) -> UnusableRecording:
    return _unusable(f"more than {limit / 1e6:g} MB; --max-file allows more")


def _unusable(why: str, may_pass: bool = False) -> UnusableRecording:
    return UnusableRecording(ExclusionReason.DOWNLOAD, why, may_pass)


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:200]
