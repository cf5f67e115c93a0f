"""Downloads over ``https`` with limits: bytes, seconds, redirects, attempts, and the addresses that are allowed.

The addresses in a table are untrusted. Only public ones are connected to, unless the user allows others; the address
that was checked is the one that is connected to, so a name whose address changes in between leads nowhere else. Every
redirect is checked in the same way.
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
from profiles.quantities import bytes_text, span_text
from speech.recordings.recording import ExclusionReason, UnusableRecording

_BLOCK = 2**16
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_RETRYABLE = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class FetchLimits:
    """Limits of one download and of all together."""

    file_bytes: int = 500_000_000
    total_bytes: int = 100_000_000_000
    silence: float = 30.0
    """Longest wait for a byte, or for a connection, in seconds."""
    file_seconds: float = 900.0
    attempts: int = 4
    pause: float = 1.0
    """Seconds before the second attempt; doubled before every further one."""
    allow_private: bool = False
    """Whether addresses that are not public may be connected to."""
    ca_file: Path | None = None
    """Certificates to trust besides the system's; ``SSL_CERT_FILE`` replaces those."""


class FetchCancelled(Exception):
    """:meth:`Fetcher.cancel` was called."""


class DownloadLimitReached(Exception):
    """All downloads together have reached ``FetchLimits.total_bytes``."""


class _TransientFailure(Exception):
    """A failure after which another attempt may succeed."""

    def __init__(self, detail: str, pause: float = 0.0) -> None:
        super().__init__(detail)
        self.pause = pause


class Fetcher:
    """Downloads files; may be shared by threads.

    Args:
        fetched: bytes that earlier runs have fetched; they count towards the limit.

    Raises:
        BadInput: the file with certificates cannot be read.
    """

    def __init__(self, limits: FetchLimits, fetched: int = 0) -> None:
        self._limits = limits
        self._context = _tls_context(limits.ca_file)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._open: set[_CheckedConnection] = set()
        self._fetched = fetched

    def fetch(self, url: str, target: Path) -> int:
        """Download ``url`` to ``target``; return its size in bytes.

        Raises:
            UnusableRecording: the download failed; the exclusion says why.
            FetchCancelled: :meth:`cancel` was called.
            DownloadLimitReached: all downloads together are too large.
        """
        pause, failure = self._limits.pause, "no attempt"
        for attempt in range(self._limits.attempts):
            if attempt and self._stop.wait(pause):
                raise FetchCancelled
            try:
                return self._follow(url, target)
            except _TransientFailure as error:
                failure = str(error)
                pause = min(_LONGEST_PAUSE, max(error.pause, self._limits.pause * 2**attempt))
        raise _unusable(f"{failure} ({counted(self._limits.attempts, 'attempt')})", is_transient=True)

    def cancel(self) -> None:
        """End all downloads and pauses immediately; they raise :class:`FetchCancelled`."""
        self._stop.set()
        with self._lock:
            for connection in self._open:
                connection.abort()

    def _follow(self, url: str, target: Path) -> int:
        deadline = time.monotonic() + self._limits.file_seconds
        for _ in range(_MOST_REDIRECTS + 1):
            with self._request(url) as response:
                if response.status == 200:
                    return self._write(response, target, deadline)
                location = response.headers.get("Location", "")
                if response.status not in _REDIRECTS or not location:
                    raise _status_failure(response)
            url = urljoin(url, location)
        raise _unusable(f"more than {_MOST_REDIRECTS} redirects")

    @contextlib.contextmanager
    def _request(self, url: str) -> Iterator[http.client.HTTPResponse]:
        """Send the request; yield the response before its body is read."""
        url_parts = check_url(url)
        connection = _CheckedConnection(url_parts, self._context, self._limits)
        with self._lock:
            self._open.add(connection)
        target = quote(url_parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        target += f"?{quote(url_parts.query, safe=_QUERY)}" if url_parts.query else ""
        try:
            connection.request("GET", target, headers={"Accept-Encoding": "identity", "User-Agent": "muster"})
            with connection.getresponse() as response:
                yield response
        except ssl.SSLCertVerificationError as error:
            raise _unusable(f"certificate: {error.verify_message}", is_transient=True) from error
        except (OSError, http.client.HTTPException) as error:
            if self._stop.is_set():
                raise FetchCancelled from error
            raise _TransientFailure(_error_text(error)) from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _write(self, response: http.client.HTTPResponse, target: Path, deadline: float) -> int:
        limit, announced = self._limits.file_bytes, response.length
        if announced is not None and announced > limit:
            raise _too_large(limit)
        count = 0
        with target.open("wb") as file:
            while block := response.read1(_BLOCK):
                count += len(block)
                self._count(len(block))
                if count > limit:
                    raise _too_large(limit)
                if time.monotonic() > deadline:
                    raise _unusable(f"not done after {span_text(self._limits.file_seconds)}", is_transient=True)
                try:
                    file.write(block)
                except OSError as error:
                    raise BadInput(f"{target.parent}: {error.strerror}", "free some space") from error
        if announced is not None and count < announced:
            raise _TransientFailure(f"ended after {count} of {announced} bytes")
        return count

    def _count(self, received: int) -> None:
        if self._stop.is_set():
            raise FetchCancelled
        with self._lock:
            self._fetched += received
            if self._fetched > self._limits.total_bytes:
                raise DownloadLimitReached


_QUERY = "/%:@!$&'()*+,;=~-._?[]"


def check_url(url: str) -> SplitResult:
    """Return the parts of an address if its text allows following it.

    Raises:
        UnusableRecording: it is not ``https``, has no host, holds a user name, or is not an address.
    """
    try:
        url_parts = urlsplit(url)
        host, _ = url_parts.hostname, url_parts.port
    except ValueError as error:
        raise _unusable(f"not an address: {error}") from error
    if url_parts.scheme.lower() != "https":
        raise UnusableRecording(
            ExclusionReason.NOT_HTTPS, f"leads to {url_parts.scheme or 'no scheme'}, only https is followed"
        )
    if not host:
        raise _unusable("an address without a host")
    if url_parts.username is not None:
        raise _unusable("an address with a user name in it is not followed")
    return url_parts


def is_public(address: str) -> bool:
    """Whether an IP address is globally reachable, and not one of this machine, its network or a carrier's."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or ip
    return ip.is_global and not ip.is_multicast


class _CheckedConnection(http.client.HTTPSConnection):
    """A TLS connection to an address that was checked before."""

    def __init__(self, url_parts: SplitResult, context: ssl.SSLContext, limits: FetchLimits) -> None:
        host = url_parts.hostname or ""
        try:
            name = host if host.isascii() else host.encode("idna").decode()
            super().__init__(name, url_parts.port or 443, timeout=limits.silence, context=context)
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

    def abort(self) -> None:
        """Shut the connection down, so that a thread that waits for it fails immediately."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _addresses(self) -> list[str]:
        try:
            entries = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (UnicodeError, ValueError) as error:  # a label of more than 63 letters; a zero byte
            raise _unusable("not the name of a host") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
        allowed = addresses if self._limits.allow_private else [address for address in addresses if is_public(address)]
        if addresses and not allowed:
            raise _unusable(f"{addresses[0]} is not a public address; --allow-private allows it")
        return allowed


def _tls_context(ca_file: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    paths = ssl.get_default_verify_paths()
    if paths.cafile is None and paths.capath is None:  # a Python that was built for another system
        context.load_verify_locations(certifi.where())
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"{ca_file}: no certificates in it: {_error_text(error)}", "name a PEM file") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _status_failure(response: http.client.HTTPResponse) -> Exception:
    answer = f"the server said {response.status} {' '.join(response.reason.split())[:60]}".strip()
    if response.status in _RETRYABLE:
        delay = response.headers.get("Retry-After", "")
        is_number = delay.isascii() and delay.isdigit() and len(delay) < 6
        return _TransientFailure(answer, float(delay) if is_number else 0.0)
    return _unusable(answer, is_transient=True)


def _too_large(limit: int) -> UnusableRecording:
    return _unusable(f"more than {bytes_text(limit)}; --max-file allows more")


def _unusable(detail: str, is_transient: bool = False) -> UnusableRecording:
    return UnusableRecording(ExclusionReason.DOWNLOAD, detail, is_transient)


def _error_text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(reason).split())[:200]
