"""Host keys, which identify machines. Reads OpenSSH's known_hosts files and adds to the user's own.

The key of an unknown machine is shown to the user; a machine that shows another key than the known one is refused.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import pwd
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

_LARGEST_FILE = 4 * 1024 * 1024
NEW_HOST_KEYS = "sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A, then restart its SSH server"
"""Command that gives a machine cloned with its host keys new ones."""
COMPARED = 8
"""Characters at the end of a fingerprint that the user is asked to compare."""


@dataclass(frozen=True)
class HostKeyInfo:
    """The key that a machine has shown."""

    machine: str
    """Name of the machine in the hosts file."""
    name: str
    """Name under which the key is stored: ``host``, ``[host]:port``, or the alias from ~/.ssh/config."""
    key_type: str
    """For example ``ssh-ed25519``."""
    blob: bytes
    """The public key in wire format."""
    certificate: bytes = b""
    """Host certificate that was shown with it, in wire format; mostly empty."""
    known_as: tuple[str, ...] = ()
    """Other names of the same key in known_hosts: the machine was accepted under these names."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint as printed by ``ssh-keygen -l``."""
        return fingerprint(self.blob)

    @property
    def compare_command(self) -> str:
        """Command that prints the same fingerprint on the machine itself (macOS and Linux)."""
        kind = next((kind for kind in ("ed25519", "ecdsa", "rsa") if kind in self.key_type), self.key_type)
        return f"ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub"


class HostKeyStatus(Enum):
    """Status of a key in the known_hosts files."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True)
class KnownHost:
    """One line of a known_hosts file."""

    marker: str
    """``@revoked``, ``@cert-authority`` or nothing."""
    hosts: str
    """Comma-separated patterns, or one hashed name."""
    key_type: str
    blob: bytes
    origin: str
    """``file:line``, for messages."""

    def covers(self, name: str) -> bool:
        """Whether this line is about the host ``name``."""
        if self.hosts.startswith("|"):
            return _matches_hashed(self.hosts, name)
        patterns = self.hosts.lower().split(",")
        if any(_matches(pattern[1:], name) for pattern in patterns if pattern.startswith("!")):
            return False
        return any(_matches(pattern, name) for pattern in patterns)


Keys = tuple[tuple[str, str], ...]
"""Types and fingerprints of host keys; an empty fingerprint: asked for that type, the machine showed another one."""


@dataclass(frozen=True)
class Expected:
    """The keys in known_hosts under one name."""

    name: str = ""
    """Name as written in known_hosts."""
    keys: Keys = ()

    def unasked(self, shown: Keys) -> tuple[str, ...]:
        """Return the types of key to ask for to decide whether a machine that shows these keys is the known one."""
        if any(key in self.keys for key in shown):
            return ()
        return tuple(dict.fromkeys(kind for kind, _ in self.keys if kind not in dict(shown)))

    def refutes(self, shown: Keys) -> bool:
        """Whether a machine that shows these keys is another one: asked for each known type, it showed no known key."""
        return bool(self.keys) and not self.unasked(shown) and not any(key in self.keys for key in shown)


class KnownHosts:
    """The known_hosts files of the system and the user, read once."""

    def __init__(self, entries: Iterable[KnownHost]) -> None:
        self.entries = list(entries)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> KnownHosts:
        """Read the files that exist; invalid lines are skipped, as OpenSSH does."""
        files = (parse_lines(read_lines(path.expanduser()), str(path)) for path in paths)
        return cls(entry for entries in files for entry in entries)

    def of(self, name: str) -> list[KnownHost]:
        """Return the plain keys known for a host."""
        return [entry for entry in self.entries if not entry.marker and entry.covers(name.lower())]

    def names_of(self, blob: bytes) -> tuple[str, ...]:
        """Return the names under which a key is known, each once; hashed ones cannot be read."""
        lines = (e.hosts for e in self.entries if not e.marker and e.blob == blob)
        names = [name for line in lines for name in (["a hashed name"] if line.startswith("|") else line.split(","))]
        return tuple(dict.fromkeys(names))

    def expected(self, *names: str) -> Expected:
        """Return the keys known under the first of these names that has any."""
        for name in names:
            if entries := self.of(name):
                return Expected(name, tuple((entry.key_type, fingerprint(entry.blob)) for entry in entries))
        return Expected()

    def authorities(self, *names: str) -> list[bytes]:
        """Return the authority keys trusted to certify a host with any of these names."""
        return [e.blob for e in self.entries if e.marker == "@cert-authority" and any(map(e.covers, names))]

    def judge(self, key: HostKeyInfo) -> HostKeyStatus:
        """Return the status of a key: known, or certified by a trusted authority, or not."""
        name = key.name.lower()
        signer = authority_of(key.certificate, name)
        if any(e.marker == "@revoked" and e.blob in (key.blob, signer) and e.covers(name) for e in self.entries):
            return HostKeyStatus.REVOKED
        entries = self.of(name)
        if signer in self.authorities(name) or any(entry.blob == key.blob for entry in entries):
            return HostKeyStatus.KNOWN
        return HostKeyStatus.CHANGED if entries else HostKeyStatus.UNKNOWN


def authority_of(certificate: bytes, name: str) -> bytes | None:
    """Return the key that signed a host certificate (OpenSSH's PROTOCOL.certkeys), in wire format.

    ``None`` where it is not valid now for the host ``name``, written as in known_hosts, or is no host certificate.
    """
    try:
        kind = certificate[4 : 4 + int.from_bytes(certificate[:4], "big")]
        identity = load_ssh_public_identity(kind + b" " + base64.b64encode(certificate))
        if not isinstance(identity, SSHCertificate):
            return None
        identity.verify_cert_signature()
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return None
    host = re.sub(r"^\[(.*)\]:\d+$", r"\1", name)
    principals = [principal.decode(errors="replace").lower() for principal in identity.valid_principals]
    is_named = not principals or any(_matches(principal, host) for principal in principals)
    is_valid = identity.valid_after <= time.time() < identity.valid_before
    if identity.type is not SSHCertificateType.HOST or identity.critical_options or not (is_named and is_valid):
        return None
    line = identity.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return base64.b64decode(line.split()[1])


def is_revoked(key: HostKeyInfo, file: Path) -> bool:
    """Whether a key is in a file of revoked keys: one public key per line, or a list made by ``ssh-keygen -k``.

    An unreadable file revokes all keys, as for ``ssh``.
    """
    try:
        data = file.read_bytes()
    except OSError:
        return True
    if not data.startswith(b"SSHKRL"):
        text = base64.b64encode(key.blob)
        return any(text in line.split() for line in data.splitlines() if not line.lstrip().startswith(b"#"))
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as shown:
        shown.write(f"{key.key_type} {base64.b64encode(key.certificate or key.blob).decode()}\n")
        shown.flush()
        words = ["ssh-keygen", "-Q", "-f", str(file), shown.name]
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode != 0


def fingerprint(blob: bytes) -> str:
    """SHA-256 fingerprint of a public key as OpenSSH writes it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def known_name(host: str, port: int, alias: str = "") -> str:
    """Return the name under which OpenSSH stores the key of a host."""
    if alias:
        return alias.lower()
    return host.lower() if port == 22 else f"[{host.lower()}]:{port}"


def remember(key: HostKeyInfo, path: Path, hashed: bool = False) -> None:
    """Append a key to a known_hosts file, in one write, so that several processes may do it concurrently.

    Raises:
        OSError: the file cannot be written.
    """
    name = key.name
    if hashed:
        salt = os.urandom(hashlib.sha1().digest_size)
        digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    line = f"{name} {key.key_type} {base64.b64encode(key.blob).decode()}\n"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "rb+", buffering=0) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        size = os.fstat(stream.fileno()).st_size
        torn = size > 0 and os.pread(stream.fileno(), 1, size - 1) != b"\n"
        stream.write(("\n" if torn else "").encode() + line.encode())


def in_home(files: Iterable[Path]) -> tuple[Path, ...]:
    """Put the usual files of ``$HOME`` before those of the account's home folder, which ssh uses whatever ``HOME`` is.

    New keys are written to the first file: all that Muster writes lies in one home folder.
    """
    listed = list(files)
    try:
        account = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh"
    except KeyError:  # a user without an entry, as in some containers: ssh does not start for it either
        return tuple(listed)
    usual = [file.name for file in listed if file.parent == account and file.name in ("known_hosts", "known_hosts2")]
    return tuple(dict.fromkeys([*(Path.home() / ".ssh" / name for name in usual), *listed]))


def split_paths(text: str) -> list[str]:
    """Split the files that ``ssh -G`` prints in one line: names with spaces are not quoted, but each begins with ``/``,
    ``~``, ``%`` or ``$``."""
    paths: list[str] = []
    for word in text.split(" "):
        if paths and not word.startswith(("/", "~", "%", "$")):
            paths[-1] += f" {word}"
        elif word:
            paths.append(word)
    return paths


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, up to a size limit; empty where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(_LARGEST_FILE).decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def parse_lines(lines: Iterable[str], origin: str) -> Iterator[KnownHost]:
    """Yield the entries of the lines of a known_hosts file; ``origin`` is its name."""
    for number, line in enumerate(lines, start=1):
        if (entry := parse_line(line, f"{origin}:{number}")) is not None:
            yield entry


def parse_line(line: str, origin: str = "") -> KnownHost | None:
    """Parse one line; ``None`` for comments, empty and invalid lines."""
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    if len(fields) < 3 or fields[0].startswith("#") or marker not in ("", "@revoked", "@cert-authority"):
        return None
    try:
        blob = base64.b64decode(fields[2].encode(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return KnownHost(marker, fields[0], fields[1], blob, origin)


def _matches(pattern: str, name: str) -> bool:
    """Match one of OpenSSH's patterns, which have only ``*`` and ``?``; brackets of ``[host]:port`` are literal."""
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, name) is not None


def _matches_hashed(hashed: str, name: str) -> bool:
    try:
        _, version, salt, digest = hashed.split("|")
        computed = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return version == "1" and hmac.compare_digest(computed, base64.b64decode(digest))
    except ValueError:
        return False
